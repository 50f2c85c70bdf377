"""What the devices of a pipeline will hold, known before there are any: from shapes, on one device."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from tutti.laws.balance import balance
from tutti.layouts import cuts
from tutti.layouts.config import LayersConfig, PipelineConfig
from tutti.layouts.measured import seconds as seconds
from tutti.layouts.sections import body, last_uses, modules_of, read_directly
from tutti.nn.swap import parameters
from tutti.schedules.pipeline import held, make


class Counter(Protocol):
    """Counts the bytes of tensors: those there are, and the most there were since ``peak`` was last set."""

    peak: int

    @property
    def now(self) -> int: ...


@dataclass(frozen=True)
class Block:
    """Calls of a model's graph that follow each other; the model may be cut before the first.

    Attributes:
        name: of the module that it begins with; empty where it begins with something else.
        weight: what stages are made even in, seconds or parameters.
        parameters: bytes of those that it uses, by their first name in the model, and whether each is trained.
        buffers: bytes.
        kept: bytes that the forward of a micro-batch leaves until its backward.
        most: bytes that are there besides while it is computed.
        entering: bytes of what a stage that begins here is sent.
    """

    name: str
    weight: float
    parameters: Mapping[str, tuple[int, bool]]
    buffers: int
    kept: int
    most: int
    entering: int


class Held(NamedTuple):
    """Bytes on one device; ``messages``: what it is sent and sends, with the gradients that go the other way."""

    parameters: int
    trained: int
    buffers: float
    activations: float
    messages: float


@dataclass(frozen=True)
class Ahead:
    """A model's blocks, and where it is cut.

    Attributes:
        blocks: in order.
        bounds: (stages + 1,) indices into them.
        measured: whether ``weight`` is time.
        samples: in the micro-batch that was looked at.
    """

    blocks: tuple[Block, ...]
    bounds: tuple[int, ...]
    measured: bool
    samples: int

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that later stages begin with."""
        return tuple(self.blocks[bound].name for bound in self.bounds[1:-1])

    @property
    def shares(self) -> list[float]:
        """Each stage's part of all weights."""
        sums = [sum(block.weight for block in self.blocks[a:b]) for a, b in pairwise(self.bounds)]
        return [part / (sum(sums) or 1) for part in sums]

    def held(self, config: Any, ranks: int, micro_batches: int, factor: float = 1.0) -> list[Held]:
        """What each rank holds, with so many micro-batches of ``factor`` times the samples that were looked at."""
        order = make(config.schedule, ranks, micro_batches, config.chunks)
        stages = list(pairwise(self.bounds))
        return [
            self._device({s: stages[s] for s in range(rank, len(stages), ranks)}, order.ranks[rank], factor)
            for rank in range(ranks)
        ]

    def fitting(
        self,
        config: Any,
        ranks: int,
        micro_batches: int,
        factor: float,
        fits: Callable[[Held], float],
    ) -> Ahead | None:
        """The cut that is most even among those whose stages all fit; None where none does.

        ``fits``: the part of a device's memory that what it holds takes, at most 1.
        """
        order, stages = make(config.schedule, ranks, micro_batches, config.chunks), ranks * config.chunks
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

    def _device(self, stages: Mapping[int, tuple[int, int]], actions: Sequence[Any], factor: float) -> Held:
        own = [block for a, b in stages.values() for block in self.blocks[a:b]]
        found = {name: entry for block in own for name, entry in block.parameters.items()}
        kept = {s: sum(b.kept for b in self.blocks[a:z]) + self.blocks[a].entering for s, (a, z) in stages.items()}
        ends = [self.blocks[z].entering for _, z in stages.values() if z < len(self.blocks)]
        sent = sum(self.blocks[a].entering for a, _ in stages.values()) + 2 * sum(ends)
        return Held(
            sum(size for size, _ in found.values()),
            sum(size for size, trained in found.values() if trained),
            sum(block.buffers for block in own),
            factor * (held(actions, lambda stage: kept.get(stage, 0)) + max(block.most for block in own)),
            factor * sent,
        )


def find(
    config: LayersConfig | PipelineConfig, plain: nn.Module, ranks: int, seconds: Mapping[str, float]
) -> cuts.Cuts:
    """Where a run cuts the model, if modules take so long. Raises UsageError as ``cuts.find``."""
    timed = seconds if config.schedule != "one_by_one" and not config.cuts else {}
    return cuts.find(plain, ranks * config.chunks, config.cuts, timed)


def look(
    plain: nn.Module,
    found: cuts.Cuts,
    took: Mapping[str, float],
    run: Callable[[Any], Any],
    counter: Counter,
    samples: int,
) -> Ahead:
    """Run forward and backward once and see what each block leaves; ``run``: calls both on a model."""
    nodes = body(found.graph)
    starts = _starts(nodes, found.bounds, plain)
    watched = _Watched(plain, found.graph, starts, counter)
    run(watched)
    watched.end()
    uses = last_uses(found.graph)
    first = {id(p): name for name, p in parameters([plain])}
    blocks = []
    for number, (low, high) in enumerate(pairwise([*starts, len(nodes)])):
        here = nodes[low:high]
        used = [p for _, module in modules_of(here, plain) for p in module.parameters()]
        used += [t for t in read_directly(here, plain).values() if isinstance(t, nn.Parameter)]
        inside = {m for _, module in modules_of(here, plain) for m in module.modules()}
        trained = sum(p.nbytes for p in set(used) if p.requires_grad)
        blocks.append(
            Block(
                name=str(here[0].target) if here[0].op == "call_module" else "",
                weight=sum(cuts.weight(node, plain, took) for node in here),
                parameters={first[id(p)]: (p.nbytes, p.requires_grad) for p in used},
                buffers=sum(b.nbytes for m in inside for b in m.buffers(recurse=False)),
                kept=max(watched.kept[number], 0),
                most=max(watched.forward[number], watched.backward[number] - trained, 0),
                entering=sum(watched.bytes.get(node, 0) for node in nodes[:low] if uses[node] >= low),
            )
        )
    bounds = [*(bisect_right(starts, bound) - 1 for bound in found.bounds[:-1]), len(starts)]
    return Ahead(tuple(blocks), tuple(bounds), found.measured, samples)


def _starts(nodes: Sequence[fx.Node], bounds: Sequence[int], plain: nn.Module) -> list[int]:
    """Where blocks begin: where the model is cut, and wherever a cut can be named before something with parameters."""
    seen: set[str] = set()
    starts = {0, *bounds[:-1]}
    for place, node in enumerate(nodes):
        name = str(node.target)
        if node.op == "call_module" and name not in seen and cuts.weight(node, plain):
            starts.add(place)
        seen.add(name)
    return sorted(starts)


class _Watched(fx.Interpreter):
    """What the loss function calls as its model: runs the graph and notes what each block leaves.

    Attributes:
        kept: bytes that a block's forward leaves.
        forward, backward: the most that was there besides.
        bytes: of each node's result.
    """

    def __init__(self, plain: nn.Module, graph: fx.Graph, starts: Sequence[int], counter: Counter) -> None:
        super().__init__(fx.GraphModule(plain, graph), graph=graph)
        self._plain, self._counter = plain, counter
        self._signature = inspect.signature(plain.forward)
        self._block = {node: bisect_right(starts, place) - 1 for place, node in enumerate(body(graph))}
        self.kept, self.forward, self.backward = [0] * len(starts), [0] * len(starts), [0] * len(starts)
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
        """Compute one node; what the ones before have left is theirs."""
        block = self._block.get(n, self._at)
        if block != self._at:
            self._leave()
            self._begin(block)
        result = super().run_node(n)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.bytes[n] = sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            if n in self._block and tensor.requires_grad:
                tensor.register_hook(lambda gradient, block=block: self._back_to(block))
        return result

    def end(self) -> None:
        """Backward is over."""
        self._leave()

    def _begin(self, block: int) -> None:
        self._at, self._before = block, self._counter.now
        self._counter.peak = self._before

    def _leave(self) -> None:
        now, besides = self._counter.now, self.backward if self._passed else self.forward
        if not self._passed:
            self.kept[self._at] += now - self._before
        low = self._before if self._passed else max(now, self._before)
        besides[self._at] = max(besides[self._at], self._counter.peak - low)

    def _back_to(self, block: int) -> None:
        """The gradient of a block's result is there; the loss belongs to the last block."""
        if not self._passed or block != self._at:
            self._leave()
            self._passed = True
            self._begin(block)
