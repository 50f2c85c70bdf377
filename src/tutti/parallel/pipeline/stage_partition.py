"""Partition a model into stages: evenly, or before the modules that the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import fx, nn

from tutti.config.layout_config import check_cuts
from tutti.errors import UsageError, counted, did_you_mean, script_line_of
from tutti.nn.absent_tensor import put_attributes_away
from tutti.nn.swap import parameters
from tutti.nn.untraced import Untraced
from tutti.parallel.pipeline.balance import balance
from tutti.parallel.pipeline.block_dispatch import ReadsValuesError
from tutti.parallel.pipeline.graph_trace import UntraceableError, openable, trace
from tutti.parallel.pipeline.recorded_forward import ForwardRecord, ReadOutsideError
from tutti.parallel.pipeline.virtual_stage import body, check_buffers, modules_of, tensors_of, writes
from tutti.parallel.pipeline.whole_forward import WholeForward

_EVEN = 1.25
"""A module is traced into where the largest stage is more than this many times the mean."""


@dataclass(frozen=True)
class StagePartition:
    """The graph of a model's forward, and the bounds of the virtual pipeline stages among its nodes.

    Attributes:
        graph: ``fx.Graph`` of the model's forward, whose nodes are calls of modules and functions.
        bounds: (stages + 1,) indices into ``body(graph)``, the list of the nodes that a single stage computes; stage i
            computes the nodes from bound i to bound i + 1, exclusive.
        names: for each stage but the first, the name of the module that its first node calls, or the node's ``target``
            as text if it calls no module. Empty where the last stage computes the whole model.
        shares: each stage's fraction of the whole model's forward time or number of parameters; they add up to 1.
        measured: whether ``shares`` are of measured time (True) or of the number of parameters.
        opened: names of the modules that were traced into, so that cuts may lie between their submodules; "" is the
            model.
        record: record of the forward, where every stage runs the model's own code up to its last block (a
            ``ForwardRecord``), or the last stage the whole model (a ``WholeForward``); None where stages run parts of
            ``graph``.
        written: names of attributes that the forward writes. A stage has those of its own modules only.
        several_calls: whether the loss function calls the model several times for a micro-batch, or asks for a gradient
            of its inputs, so that each rank needs the model's output.
    """

    graph: fx.Graph
    bounds: tuple[int, ...]
    names: tuple[str, ...]
    shares: tuple[float, ...]
    measured: bool
    opened: frozenset[str] = frozenset()
    record: ForwardRecord | WholeForward | None = None
    written: tuple[str, ...] = ()
    several_calls: bool = False

    @property
    def stages(self) -> list[list[fx.Node]]:
        """The graph nodes that each virtual pipeline stage computes, one list a stage, in the model's order.

        The lists leave out the graph's inputs and output, reads of attributes, and cheap values, such as shapes, that
        all stages recompute from the inputs.
        """
        nodes = body(self.graph)
        return [nodes[low:high] for low, high in pairwise(self.bounds)]

    @property
    def arguments(self) -> set[str]:
        """Names of the arguments of the model's forward that are inputs (placeholders) of its traced graph.

        The pipeline stages take these arguments from each call of the model; for all others they compute with the
        defaults.
        """
        return {str(node.target) for node in self.graph.nodes if node.op == "placeholder"}

    @property
    def buffers_everywhere(self) -> frozenset[str]:
        """Names of the buffers that every stage holds a copy of, because a recorded forward reads them on each stage.

        Empty where the graph comes from ``torch.fx``.
        """
        return frozenset(() if self.record is None else self.record.buffers)

    @property
    def read_by_several(self) -> list[str]:
        """Names of parameters that the code outside of blocks reads for the blocks, or the output, of several stages.

        A stage may read such a parameter several times in a micro-batch, and adds up its own gradients first: their sum
        over the stages is rounded in another order than on one device.
        """
        if not isinstance(self.record, ForwardRecord):
            return []
        for_blocks = [self.record.read_for_blocks(nodes) for nodes in self.stages]
        each = Counter(name for names in (*for_blocks[:-1], for_blocks[-1] | self.record.last) for name in names)
        return sorted(name for name in set().union(*for_blocks) if each[name] > 1)

    def held(self, plain: nn.Module) -> list[dict[str, nn.Parameter]]:
        """Return for each virtual pipeline stage the parameters that this stage uses, by name.

        A tied parameter appears in every stage that uses it. The first stage also has the parameters that no stage
        uses, because the model's ``state_dict`` has them.

        Args:
            plain: the whole model that was partitioned.

        Returns:
            One dictionary a stage, from a parameter's name in ``plain`` (of a tied parameter, the first name) to the
            parameter.
        """
        first = {id(p): name for name, p in parameters([plain])}
        rows, each = [], [tensors_of(nodes, plain) for nodes in self.stages]
        if isinstance(self.record, ForwardRecord):
            for nodes, used in zip(self.stages, each, strict=True):
                read = self.record.read_for_blocks(nodes) | (self.record.last if used is each[-1] else set())
                used.update(key for key, name in first.items() if name in read | self.record.everywhere)
        each[0] |= first.keys() - set().union(*each)
        for used in each:
            rows.append({name: p for name, p in parameters([plain]) if id(p) in used and first[id(p)] == name})
        return rows


def find_stage_partition(
    plain: nn.Module,
    stages: int,
    begins: Sequence[str],
    seconds: Mapping[str, float] | None = None,
    closed: Collection[str] = (),
    trial: Callable[[Any], Any] | None = None,
    written: Sequence[str] = (),
    members: Sequence[Sequence[str]] = (),
    traced: TracedForward | None = None,
    optional: Sequence[str] = (),
    device: torch.device | None = None,
) -> StagePartition:
    """Partition a model into pipeline stages, as evenly as possible, or before the modules that ``begins`` names.

    Cuts lie between the modules that the model's forward calls. A cut lies inside of a module only where ``begins``
    names a submodule of the module, or where stages would otherwise be too uneven.

    Args:
        plain: the whole model; it stays as it was.
        stages: number of virtual stages.
        begins: names of the modules before which the model is cut; empty to cut evenly.
        seconds: seconds of each module's forward, by name, to make stages even in time; None or empty for stages that
            are even in the number of parameters.
        closed: names of modules that are never traced into. If there are any, no forward is recorded.
        trial: calls the loss function on the model it is given with one micro-batch, to record a forward that
            ``torch.fx`` cannot follow; None where no micro-batch is at hand: such a model is then refused.
        written: names of attributes that the forward writes.
        members: for each stage the names of all its modules that have parameters, against which the result is checked;
            empty for no such check.
        traced: traces of the forward of ``plain`` that several calls share, with the attributes of ``written``; None
            for new ones.
        optional: names of arguments of the forward to which ``trial`` gives other values than their defaults. If there
            are any, the forward is recorded, because ``torch.fx`` would trace it with the defaults.
        device: the device of the micro-batch of ``trial``; None for that of the model.

    Returns:
        A ``StagePartition``: the ``graph`` of the model's forward, the ``bounds`` of the virtual stages among its nodes
        (stages + 1 indices), and each stage's fraction of the whole model's time or parameters (``shares``).

    Raises:
        UsageError: the model cannot be cut, or not into that many stages, or a stage would not have exactly its
            ``members``; the message names a way out.
    """
    check_cuts(begins, stages)
    _check_known(plain, [name for names in members for name in names])
    try:
        if optional:
            raise UntraceableError(
                f"a {type(plain).__name__} cannot be cut into stages",
                why=f"torch.fx follows its forward with the default of '{optional[0]}', and the loss function gives it"
                " another value",
                remedy="give the argument no default; or take strategy='mirrored'",
            )
        found = _find(plain, stages, begins, seconds, closed, traced or TracedForward(plain, written))
        return _with_members(replace(found, written=tuple(written)), plain, members)
    except UntraceableError as error:
        if trial is None or closed:
            raise
        untraceable = error
    try:
        found = _find(plain, stages, begins, seconds, closed, _RecordedForward(plain, trial, device))
    except UsageError:
        raise
    except Exception as error:
        # Blocks read values of their inputs, which fake tensors do not have.
        what = str(error).splitlines()[0] if str(error) else ""
        raise UntraceableError(
            untraceable.what,
            why=f"its forward cannot be recorded without the values of its tensors ({script_line_of(error)}):"
            f" {type(error).__name__} {what}",
            remedy="let the forwards of its blocks read no values of tensors; or take strategy='mirrored'",
        ) from error
    # Every stage writes the attributes of opened modules.
    of_blocks = tuple(name for name in written if name.rpartition(".")[0] not in found.opened)
    return _with_members(replace(found, written=of_blocks), plain, members)


def whole_on_the_last_stage(model: nn.Module, stages: int, written: Sequence[str] = ()) -> StagePartition:
    """Return the partition of a model that cannot be cut: the last stage computes all of it, the others nothing.

    For one model of a script that trains several, of which others are cut into equally many stages. Not collective.

    Args:
        model: the model.
        stages: number of virtual stages; all but the last are empty.
        written: names of attributes of the model's modules that the forward writes.

    Returns:
        A ``StagePartition``, whose ``graph`` has a single call, of the whole model, whose ``names`` are empty, and
        whose ``shares`` are 0 for all stages but the last.
    """
    record = WholeForward(model)
    bounds, shares = (0,) * stages + (1,), (0.0,) * (stages - 1) + (1.0,)
    return StagePartition(record.graph(), bounds, (), shares, False, record=record, written=tuple(written))


def _with_members(found: StagePartition, plain: nn.Module, members: Sequence[Sequence[str]]) -> StagePartition:
    """Return ``found``. Raises UsageError where a stage does not consist of the modules that ``members`` gives it."""
    if not members:
        return found
    called = [[str(node.target) for node in nodes if node.op == "call_module"] for nodes in found.stages]
    for stage, names in enumerate(members):
        for name in names:
            places = [i for i, targets in enumerate(called) if any(_overlaps(name, target) for target in targets)]
            if stage not in places:
                where = f"the forward calls it on stage {places[0]}" if places else "the forward does not call it"
                raise UsageError(
                    f"stage {stage} cannot have {name}, which stages= names for it",
                    why=where,
                    remedy="list modules in the order in which the forward calls them, or give cuts= alone",
                )
    for stage, (names, targets) in enumerate(zip(members, called, strict=True)):
        for target in targets:
            has_weights = any(True for _ in plain.get_submodule(target).parameters())
            if has_weights and not any(_overlaps(name, target) for name in names):
                raise UsageError(
                    f"stages= does not name {target}, which the forward calls on stage {stage}",
                    remedy=f"add {target} to stage {stage}, or give cuts= alone",
                )
    return found


def _overlaps(name: str, other: str) -> bool:
    """Return whether one module is the other one or inside of it."""
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


class _Reader(Protocol):
    """Reads a model's forward as a graph of the calls of its modules."""

    record: ForwardRecord | None

    def graph(self, opened: set[str]) -> fx.Graph:
        """Return the graph of the forward: the calls of modules that the model and the modules in ``opened`` make.

        Args:
            opened: names of the modules to look into; "" is the model. Names of more modules may be added to this set.
        """

    def openable(self, name: str) -> bool:
        """Return whether a cut between pipeline stages may lie inside of a module, to make the stages even.

        Args:
            name: name of the module in the whole model.
        """

    def enterable(self, name: str) -> bool:
        """Return whether a cut between pipeline stages that the user names may lie inside of a module.

        Args:
            name: name of the module in the whole model.
        """


class TracedForward:
    """Traces a model's forward by ``torch.fx``; each graph is traced once and then cached.

    Args:
        plain: the model, which must not change between two calls.
        written: names of attributes that the forward writes.

    Attributes:
        record: None: stages run parts of the traced graph, and not, by a ``ForwardRecord``, the model's own code.
    """

    record: ForwardRecord | None = None

    def __init__(self, plain: nn.Module, written: Sequence[str] = ()) -> None:
        self._plain, self._written = plain, written
        self._graphs: dict[frozenset[str], fx.Graph] = {}
        self._openable: dict[str, bool] = {}

    def graph(self, opened: set[str]) -> fx.Graph:
        """Return the graph of the forward: the calls of modules that the model and the modules in ``opened`` make.

        Args:
            opened: names of the modules to look into; "" is the model.

        Returns:
            The graph, the same object for equal ``opened``; callers do not change it.

        Raises:
            UntraceableError: ``torch.fx`` cannot trace the forward in training and in evaluation, or the two graphs
                differ; the model has hooks; its forward takes ``*args``, writes one of its arguments in place, or draws
                random numbers that do not depend on its inputs.
        """
        key = frozenset(opened)
        if key not in self._graphs:
            self._graphs[key] = self._trace(opened)
        return self._graphs[key]

    def _trace(self, opened: set[str]) -> fx.Graph:
        before = Untraced(self._plain)
        # What blocks write would be constants of the graph: reading it ends the trace.
        blocks = {
            name: "known after the block has run" for name in self._written if name.rpartition(".")[0] not in opened
        }
        put_attributes_away(self._plain, blocks, ())
        try:
            graph = trace(self._plain, opened)
        finally:
            before.undo()
        for node in graph.nodes:
            if name := writes(node, "placeholder"):
                # Every stage has its own. A recorded forward writes it on each of them.
                raise UntraceableError(
                    f"a {type(self._plain).__name__} cannot be cut into stages",
                    why=f"its forward writes its argument '{name}' in place ({node.target}), and later stages and the"
                    " loss function would read it unchanged",
                    remedy=f"make a new tensor, such as {name} * 2 in place of {name}.mul_(2)",
                )
        return graph

    def openable(self, name: str) -> bool:
        """Return whether cuts that tutti chooses may lie inside of a module: ``torch.fx`` can trace its forward.

        The first call for a name traces the module's forward; the result is cached by the name.

        Args:
            name: name of the module in the whole model.
        """
        if name not in self._openable:
            self._openable[name] = openable(self._plain.get_submodule(name))
        return self._openable[name]

    def enterable(self, name: str) -> bool:
        """Return whether a cut that the user names may lie inside of a module: ``torch.fx`` can trace its forward.

        The result is that of ``openable``: in a traced forward the user may cut inside of the same modules as tutti.

        Args:
            name: name of the module in the whole model.
        """
        return self.openable(name)


class _RecordedForward:
    """Records a forward with a micro-batch, which is on ``device``."""

    def __init__(self, plain: nn.Module, trial: Callable[[Any], Any], device: torch.device | None) -> None:
        self._plain, self._trial, self._device = plain, trial, device
        self._numbered: dict[str, Exception] = {}
        self.record: ForwardRecord | None = None

    def _record(self, opened: set[str]) -> ForwardRecord:
        """Record the forward; open blocks that read values of tensors, or let them run on made numbers."""
        while True:
            try:
                return ForwardRecord(self._plain, opened, self._trial, self._device, self._numbered)
            except ReadsValuesError as error:
                if not self._open_instead(error.name, opened):
                    self._numbered[error.name] = error.error

    def _open_instead(self, name: str, opened: set[str]) -> bool:
        """Open a block if it holds a list of blocks and the forward can then be recorded. Return whether it did."""
        if not any(_is_list_of_blocks(inner) for inner in self._plain.get_submodule(name).modules()):
            return False
        known, wider = dict(self._numbered), {*opened, name}
        try:
            self._record_opening(wider)
        except Exception:
            self._numbered = known
            return False
        opened |= wider
        return True

    def graph(self, opened: set[str]) -> fx.Graph:
        self.record = self._record_opening(opened)
        return self.record.graph()

    def _record_opening(self, opened: set[str]) -> ForwardRecord:
        """Record the forward; open blocks inside of which a module is called from outside."""
        while True:
            try:
                return self._record(opened)
            except ReadOutsideError as error:
                # The siblings of such a module become blocks, too.
                parts = error.name.split(".")[:-1]
                above = [".".join(parts[:depth]) for depth in range(1, len(parts))]
                inside = next((name for name in above if name not in opened), None)
                if inside is None:
                    raise
                opened.add(inside)

    def openable(self, name: str) -> bool:
        # Inside of a block, stages would exchange every addend of a residual stream in place of their sum.
        if not any(_is_list_of_blocks(inner) for inner in self._plain.get_submodule(name).modules()):
            return False
        try:
            record = self._record({"", *(self.record.opened if self.record else ()), name})
        except Exception:
            return False
        # Stages would add up their gradients of a parameter that several blocks are given.
        return max(Counter(name for call in record.calls for name in call.parameters).values(), default=1) == 1

    def enterable(self, name: str) -> bool:
        return True  # ``graph`` raises where it is not


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list or sequence of modules that have parts themselves, several of one class.

    Layers of a hybrid model, such as Jamba, are of two classes: with attention, and with a state-space model.
    """
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    return len({type(block) for block in module}) < len(module) and all(list(block.children()) for block in module)


def _find(
    plain: nn.Module,
    stages: int,
    begins: Sequence[str],
    seconds: Mapping[str, float] | None,
    closed: Collection[str],
    reader: _Reader,
) -> StagePartition:
    opened = {""} | {".".join(parts[:i]) for parts in (n.split(".") for n in begins) for i in range(1, len(parts))}
    _check_names(plain, begins, opened, closed, reader)
    while True:
        graph = reader.graph(opened)
        nodes = body(graph)
        sizes = [weight(node, plain) for node in nodes]
        weights = [weight(node, plain, seconds) for node in nodes]
        # No cut lies between a recorded call and the tensors that it returns.
        calls = [i for i, node in enumerate(nodes) if "output" not in node.meta or node.op == "call_module"]
        bounds = _at(nodes, begins) if begins else _even(sizes, weights, stages, calls)
        inside = None if begins else _heaviest(nodes, weights, bounds, stages, closed, reader)
        if inside is None:
            break
        opened.add(inside)
    if bounds is None:
        raise UsageError(
            f"a model of {counted(len(calls), 'block')} cannot be cut into {stages} stages",
            why=None if calls else "its forward calls no module, and its other methods cannot be cut",
            remedy=f"take stages={len(calls)} or fewer" if len(calls) > 1 else "take strategy='mirrored'",
        )
    total = sum(weights) or 1
    shares = tuple(sum(weights[a:b]) / total for a, b in pairwise(bounds))
    found = StagePartition(
        graph,
        tuple(bounds),
        tuple(str(nodes[b].target) for b in bounds[1:-1]),
        shares,
        bool(seconds),
        frozenset(opened),
        reader.record,
    )
    check_buffers(found.stages, plain)
    return found


def weight(node: fx.Node, plain: nn.Module, seconds: Mapping[str, float] | None = None) -> float:
    """Return the cost of a graph node by which pipeline stages are made even.

    The cost is the measured seconds of the module that the node calls or, without measured seconds, the number of
    elements of the module's parameters (0 for a node that calls no module).

    Args:
        node: a node of the graph of the model's forward.
        plain: the whole model.
        seconds: seconds of each module's forward, by name; a node whose module is not among the keys costs 0. None or
            empty for the number of elements.
    """
    if seconds:
        return seconds.get(str(node.target), 0.0)
    return sum(p.numel() for _, module in modules_of([node], plain) for p in module.parameters())


def _even(sizes: Sequence[float], weights: Sequence[float], stages: int, calls: Sequence[int]) -> list[int] | None:
    """Return even bounds before nodes with parameters, or before any of ``calls`` if those are too few.

    None for too few of them.
    """
    if len(calls) < stages:
        return None
    starts = [i for i, size in enumerate(sizes) if size]
    if len(starts) < stages:
        starts = [*calls]
    starts[0] = 0
    sums = [sum(weights[a:b]) for a, b in pairwise([*starts, len(sizes)])]
    return [[*starts, len(sizes)][bound] for bound in balance(sums, stages)]


def _heaviest(
    nodes: Sequence[fx.Node],
    weights: Sequence[float],
    bounds: Sequence[int] | None,
    stages: int,
    closed: Collection[str],
    reader: _Reader,
) -> str | None:
    """Return the heaviest module of the largest stage that can be traced into; None if stages are even or none can."""
    low, high = 0, len(nodes)
    if bounds is not None:
        sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
        if max(sums) * stages <= _EVEN * sum(sums):
            return None
        worst = sums.index(max(sums))
        low, high = bounds[worst], bounds[worst + 1]
    calls = [i for i in range(low, high) if nodes[i].op == "call_module"]
    names = (str(nodes[i].target) for i in sorted(calls, key=lambda i: -weights[i]))
    return next((name for name in names if name not in closed and reader.openable(name)), None)


def _check_names(
    plain: nn.Module, begins: Sequence[str], opened: Collection[str], closed: Collection[str], reader: _Reader
) -> None:
    _check_known(plain, begins)
    known = dict(plain.named_modules())
    for name in sorted(opened):
        if name in closed:
            raise UsageError(
                f"the model cannot be cut inside {name}",
                why="its forward is run on a share of its heads or features",
                remedy=f"cut before or after it, or leave it whole: whole={name}",
            )
        listed = isinstance(known[name], nn.ModuleList | nn.ModuleDict)
        if name and not listed and not reader.enterable(name):
            raise UntraceableError(
                f"the model cannot be cut inside {name}",
                why="its forward cannot be traced, or draws random numbers by itself",
                remedy="cut before or after it",
            )


def _check_known(plain: nn.Module, names: Sequence[str]) -> None:
    known = dict(plain.named_modules())
    for name in names:
        if name not in known:
            remedy = did_you_mean(name, filter(None, known))
            raise UsageError(f"the model has no module '{name}' to be cut at", remedy=remedy)


def _at(nodes: Sequence[fx.Node], begins: Sequence[str]) -> list[int]:
    places: list[int] = []
    for name in begins:
        place = next((i for i, n in enumerate(nodes) if n.op == "call_module" and n.target == name), None)
        if place is None or place == 0 or (places and place <= places[-1]):
            raise UsageError(
                f"no stage can begin with {name}",
                why="it is the model's first module, is not called, or is called before the cut that comes first",
                remedy="name modules in the order in which the model calls them",
            )
        places.append(place)
    return [0, *places, len(nodes)]
