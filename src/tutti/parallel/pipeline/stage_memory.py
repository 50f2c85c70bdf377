"""Predict the memory of each pipeline stage from tensor shapes, on one device and before any rank starts."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from tutti.config.layout_config import LayersConfig, PipelineConfig
from tutti.nn.ac_and_compile import plain_forward
from tutti.nn.swap import parameters
from tutti.parallel.pipeline import stage_partition
from tutti.parallel.pipeline.balance import balance
from tutti.parallel.pipeline.module_timing import module_seconds as module_seconds
from tutti.parallel.pipeline.pipeline_schedule import make_order, peak_activations
from tutti.parallel.pipeline.virtual_stage import body, last_uses, modules_of, read_directly
from tutti.torch_compat import tree_leaves
from tutti.workload.tensor_memory import Tracker


@dataclass(frozen=True)
class GraphBlock:
    """Consecutive calls in the graph of a model's forward; the model may be cut into stages before the first call.

    Attributes:
        name: name of the module that the first node calls; empty where the node calls no module.
        weight: cost by which stages are made even, seconds of the forward or number of parameters.
        parameters: for each parameter used, by its first name in the model: its bytes, and whether it is trained.
        buffers: bytes of all buffers of the modules called.
        kept: bytes that the forward of a micro-batch leaves until its backward.
        most: peak of temporary bytes in the block's forward or backward, whichever is larger.
        entering: bytes of the activations of one micro-batch that a stage beginning with this block receives.
    """

    name: str
    weight: float
    parameters: Mapping[str, tuple[int, bool]]
    buffers: int
    kept: int
    most: int
    entering: int


class StageMemory(NamedTuple):
    """Bytes that the pipeline stages of one rank take on its device.

    Attributes:
        parameters: bytes of all parameters.
        trained: bytes of the trained parameters among them.
        buffers: bytes of all buffers.
        activations: peak of the bytes of activations over the pipeline schedule, temporary tensors included.
        messages: bytes of the tensors sent to and received from neighbouring stages, activations and gradients.
    """

    parameters: int
    trained: int
    buffers: float
    activations: float
    messages: float


@dataclass(frozen=True)
class StagePlan:
    """A model's blocks (runs of consecutive calls in its graph) with their memory, and the stages' bounds among them.

    Attributes:
        blocks: the blocks, in the order of the forward.
        bounds: (stages + 1,) indices into ``blocks``; stage i consists of the blocks from bound i to bound i + 1,
            exclusive.
        measured: whether the blocks' ``weight`` is in seconds (True) or a number of parameters.
        samples: number of samples in the micro-batch from which the blocks' bytes were measured.
    """

    blocks: tuple[GraphBlock, ...]
    bounds: tuple[int, ...]
    measured: bool
    samples: int

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the module with which each pipeline stage begins, in order; the first stage is left out.

        This is the module that the first node of the stage calls, in the graph of the model's forward; "" where the
        node calls no module.
        """
        return tuple(self.blocks[bound].name for bound in self.bounds[1:-1])

    @property
    def shares(self) -> list[float]:
        """A list of each virtual pipeline stage's fraction of the model's forward time, or of its parameters, in order.

        The attribute ``measured`` says which of the two: True for time. The fractions, floats, add up to 1.
        """
        sums = [sum(block.weight for block in self.blocks[a:b]) for a, b in pairwise(self.bounds)]
        return [part / (sum(sums) or 1) for part in sums]

    def held(
        self, config: PipelineConfig | LayersConfig, ranks: int, micro_batches: int, factor: float = 1.0
    ) -> list[StageMemory]:
        """Predict the bytes that each pipeline rank holds, from the measured bytes of model blocks and the schedule.

        A block is a run of consecutive calls in the graph of the model's forward; a stage consists of several.

        Args:
            config: options of the layout, a ``PipelineConfig`` or ``LayersConfig`` with ``schedule`` (its name) and
                ``chunks`` (virtual stages a rank).
            ranks: pipeline ranks.
            micro_batches: number of micro-batches that go through the schedule.
            factor: samples in such a micro-batch ÷ samples in the micro-batch with which the blocks were measured;
                multiplies activations and messages.

        Returns:
            One ``StageMemory`` (bytes of parameters, trained parameters, buffers, activations, messages) a rank, over
            all of its virtual stages.
        """
        order = make_order(config.schedule, ranks, micro_batches, config.chunks)
        stages = list(pairwise(self.bounds))
        return [
            self._device({s: stages[s] for s in range(rank, len(stages), ranks)}, order.ranks[rank], factor)
            for rank in range(ranks)
        ]

    def fitting(
        self,
        config: PipelineConfig | LayersConfig,
        ranks: int,
        micro_batches: int,
        factor: float,
        fits: Callable[[StageMemory], float],
    ) -> StagePlan | None:
        """Return this plan with new bounds between stages: the most even stages that each fit into a device's memory.

        The plan holds the model's blocks (runs of consecutive calls in its graph) with their measured bytes, and the
        bounds of the pipeline stages among them. Even stages take equal time or, where no times are known, have equal
        numbers of parameters.

        Args:
            config: options of the layout, a ``PipelineConfig`` or ``LayersConfig`` with ``schedule`` (its name) and
                ``chunks`` (virtual stages a rank).
            ranks: number of pipeline ranks.
            micro_batches: number of micro-batches that go through the schedule.
            factor: samples in such a micro-batch ÷ samples in the micro-batch with which the blocks were measured;
                multiplies activations and messages.
            fits: function from the bytes of a stage to the fraction of a device's memory that this stage takes, 1 for
                all of it. With v virtual stages a rank, each may take at most 1/v.

        Returns:
            A ``StagePlan`` with the same blocks and other ``bounds``; None where no bounds make all stages fit.
        """
        order, stages = make_order(config.schedule, ranks, micro_batches, config.chunks), ranks * config.chunks
        if len(self.blocks) < stages:
            return None

        def may(stage: int, start: int, end: int) -> bool:
            alone = self._device({stage: (start, end)}, order.ranks[stage % ranks], factor)
            return bool(fits(alone) <= 1 / config.chunks)

        try:
            bounds = balance([block.weight for block in self.blocks], stages, may)
        except ValueError:
            return None
        return replace(self, bounds=tuple(bounds))

    def _device(self, stages: Mapping[int, tuple[int, int]], actions: Sequence[Any], factor: float) -> StageMemory:
        own = [block for a, b in stages.values() for block in self.blocks[a:b]]
        found = {name: entry for block in own for name, entry in block.parameters.items()}
        kept = {s: sum(b.kept for b in self.blocks[a:z]) + self.blocks[a].entering for s, (a, z) in stages.items()}
        ends = [self.blocks[z].entering for _, z in stages.values() if z < len(self.blocks)]
        sent = sum(self.blocks[a].entering for a, _ in stages.values()) + 2 * sum(ends)
        return StageMemory(
            sum(size for size, _ in found.values()),
            sum(size for size, trained in found.values() if trained),
            sum(block.buffers for block in own),
            factor * (peak_activations(actions, lambda stage: kept.get(stage, 0)) + max(block.most for block in own)),
            factor * sent,
        )


def find_measured_partition(
    config: LayersConfig | PipelineConfig,
    plain: nn.Module,
    ranks: int,
    seconds: Mapping[str, float],
    closed: Collection[str] = (),
    traced: stage_partition.TracedForward | None = None,
) -> stage_partition.StagePartition:
    """Cut a model into pipeline stages of even time, given the seconds that its modules take.

    Args:
        config: options of the layout, with the number of virtual stages a rank and, if the user has named them, the
            modules with which stages begin.
        plain: the whole model.
        ranks: number of pipeline ranks.
        seconds: seconds of each module's forward, by name. Unused where the options name the cuts, and with the
            schedule ``one_by_one``: its stages are even in the number of parameters.
        closed: names of modules that no cut may go through.
        traced: traces of the forward of ``plain`` that several calls share; None for new ones.

    Returns:
        A ``StagePartition``: the ``graph`` of the model's forward, the ``bounds`` of the virtual stages among its nodes
        (stages + 1 indices), and each stage's fraction of the whole model's time or parameters (``shares``).

    Raises:
        UsageError: the model cannot be cut into that many stages; the message names the reason.
    """
    timed = seconds if config.schedule != "one_by_one" and not config.begins else {}
    return stage_partition.find_stage_partition(
        plain, ranks * config.chunks, config.begins, timed, closed, members=config.modules, traced=traced
    )


@dataclass(frozen=True)
class _Span:
    """Part of a forward or backward that one node of the graph takes: bytes of live tensors, as ``Tracker`` counts.

    Attributes:
        place: index of the node in the body of the graph.
        passed: whether the forward had ended.
        before, peak, after: bytes at the begin, at most, and at the end.
    """

    place: int
    passed: bool
    before: int
    peak: int
    after: int


@dataclass(frozen=True, eq=False)
class GraphMemory:
    """Memory of one forward and backward of a model, node by node; ``stage_plan`` adds it up for runs of nodes.

    Attributes:
        plain: the whole model.
        graph: the graph of its forward.
        spans: bytes of live tensors, in the order in which nodes ran forward and backward.
        bytes: bytes of each node's output.
        samples: number of samples in the micro-batch that was run.
    """

    plain: nn.Module
    graph: fx.Graph
    spans: tuple[_Span, ...]
    bytes: Mapping[fx.Node, int]
    samples: int

    def stage_plan(self, found: stage_partition.StagePartition, took: Mapping[str, float]) -> StagePlan:
        """Return the stages of a partition, with the measured memory of the blocks of nodes that they consist of.

        A block is a run of consecutive calls in the graph of the model's forward; every stage begins with a block.

        Args:
            found: partition of the model into stages; its graph is the attribute ``graph``.
            took: seconds of each module's forward, by name, from which the blocks' ``weight`` is computed; empty for
                the number of their parameters instead.

        Returns:
            A ``StagePlan``: the model's ``blocks`` with bytes of parameters, buffers and activations of one
            micro-batch, and the ``bounds`` of the partition's stages among them (stages + 1 indices).
        """
        nodes, plain = body(self.graph), self.plain
        starts = _starts(nodes, found.bounds, plain)
        kept, most_forward, most_backward = self._peaks(starts)
        uses = last_uses(self.graph)
        first = {id(p): name for name, p in parameters([plain])}
        blocks = []
        for number, (low, high) in enumerate(pairwise([*starts, len(nodes)])):
            here = nodes[low:high]
            used = [p for _, module in modules_of(here, plain) for p in module.parameters()]
            used += [t for t in read_directly(here, plain).values() if isinstance(t, nn.Parameter)]
            inside = {m for _, module in modules_of(here, plain) for m in module.modules()}
            trained = sum(p.nbytes for p in set(used) if p.requires_grad)
            blocks.append(
                GraphBlock(
                    name=str(here[0].target) if here[0].op == "call_module" else "",
                    weight=sum(stage_partition.weight(node, plain, took) for node in here),
                    parameters={first[id(p)]: (p.nbytes, p.requires_grad) for p in used},
                    buffers=sum(b.nbytes for m in inside for b in m.buffers(recurse=False)),
                    kept=max(kept[number], 0),
                    most=max(most_forward[number], most_backward[number] - trained, 0),
                    entering=sum(self.bytes.get(node, 0) for node in nodes[:low] if uses[node] >= low),
                )
            )
        bounds = [*(bisect_right(starts, bound) - 1 for bound in found.bounds[:-1]), len(starts)]
        return StagePlan(tuple(blocks), tuple(bounds), found.measured, self.samples)

    def _peaks(self, starts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Return of each block the bytes that its forward leaves, and peaks of temporary bytes forward and backward.

        Args:
            starts: indices of the nodes with which blocks begin.
        """
        kept, forward, backward = ([0] * len(starts) for _ in range(3))

        def block_and_pass(span: _Span) -> tuple[int, bool]:
            return bisect_right(starts, span.place) - 1, span.passed

        for (block, passed), group in groupby(self.spans, key=block_and_pass):
            spans = list(group)
            before, after = spans[0].before, spans[-1].after
            peak = max(span.peak for span in spans)
            if passed:
                backward[block] = max(backward[block], peak - before)
            else:
                kept[block] += after - before
                forward[block] = max(forward[block], peak - max(after, before))
        return kept, forward, backward


def observe_graph(
    plain: nn.Module, graph: fx.Graph, run: Callable[[Any], Any], counter: Tracker, samples: int
) -> GraphMemory:
    """Run one forward and backward on one device, and measure the memory of each node of the model's graph.

    Args:
        plain: the whole model.
        graph: the graph of its forward, such as that of a partition of the model into stages.
        run: function that calls the loss function on the model it is given, with one micro-batch, and runs backward.
        counter: a ``Tracker`` that the caller has entered; counts the bytes of live tensors during the run.
        samples: number of samples in the micro-batch that ``run`` uses.

    Returns:
        A ``GraphMemory``, whose ``stage_plan`` has the memory of the blocks of any partition of this graph.
    """
    watched = _Watched(plain, graph, counter)
    run(watched)
    watched.end()
    return GraphMemory(plain, graph, tuple(watched.spans), watched.bytes, samples)


def _starts(nodes: Sequence[fx.Node], bounds: Sequence[int], plain: nn.Module) -> list[int]:
    """Return the indices at which blocks begin: the cuts, and each first call of a module with weight."""
    seen: set[str] = set()
    starts = {0, *bounds[:-1]}
    for place, node in enumerate(nodes):
        name = str(node.target)
        if node.op == "call_module" and name not in seen and stage_partition.weight(node, plain):
            starts.add(place)
        seen.add(name)
    return sorted(starts)


class _Watched(fx.Interpreter):
    """The model that the loss function calls: runs the graph node by node, and records the bytes of each.

    Attributes:
        spans: bytes of live tensors while each node ran, forward and backward.
        bytes: of each node's output.
    """

    def __init__(self, plain: nn.Module, graph: fx.Graph, counter: Tracker) -> None:
        super().__init__(fx.GraphModule(plain, graph), graph=graph)
        self._plain, self._counter = plain, counter
        self._signature = inspect.signature(plain_forward(plain))
        self._place = {node: place for place, node in enumerate(body(graph))}
        self.spans: list[_Span] = []
        self.bytes: dict[fx.Node, int] = {}
        self._at, self._before, self._passed = 0, 0, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind(*args, **kwargs).arguments
        self._begin(0)
        return self.run(*(given[str(node.target)] for node in self.graph.nodes if node.op == "placeholder"))

    def __getattr__(self, name: str) -> Any:
        if "_plain" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._plain, name)

    def run_node(self, n: fx.Node) -> Any:
        """Compute one node of the model's graph and return its value, as ``fx.Interpreter.run_node``.

        Args:
            n: the node.
        """
        place = self._place.get(n, self._at)
        if place != self._at:
            self._leave()
            self._begin(place)
        result = super().run_node(n)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.bytes[n] = sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            if n in self._place and tensor.requires_grad:
                tensor.register_hook(lambda gradient, place=place: self._back_to(place))
        return result

    def end(self) -> None:
        """Close the memory record of the node that ran last; to be called after backward."""
        self._leave()

    def _begin(self, place: int) -> None:
        self._at, self._before = place, self._counter.now
        self._counter.peak = self._before

    def _leave(self) -> None:
        self.spans.append(_Span(self._at, self._passed, self._before, self._counter.peak, self._counter.now))

    def _back_to(self, place: int) -> None:
        """Begin the record of a node's backward: its output's gradient is here. The loss belongs to the last node."""
        if not self._passed or place != self._at:
            self._leave()
            self._passed = True
            self._begin(place)
