"""Map the tensors of a model that is cut into stages to the ranks that hold them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from tutti.comm.communicator import Communicator
from tutti.nn.rng_streams import keyed_modules
from tutti.nn.swap import buffers, parameters
from tutti.parallel.pipeline import stage_partition
from tutti.parallel.pipeline.graph_trace import draws_by_functions, graph_draws
from tutti.parallel.pipeline.recorded_forward import ForwardRecord
from tutti.parallel.pipeline.virtual_stage import VirtualStage, cut_into_stages, modules_of, read_directly, tensors_of
from tutti.types.run_context import RunContext


@dataclass(frozen=True)
class CutModel:
    """One model that is cut into pipeline stages, and this rank's virtual stages of it.

    A script may train several models together, such as a generator and a discriminator. Each is then cut into stages of
    its own over the same ranks.

    Attributes:
        name: name of the model among the prepared module's submodules; "" for the prepared module itself.
        model: the whole model.
        cuts: the graph of the model's forward, and the bounds of the stages among its nodes.
        virtual_stages: this rank's virtual stages, in the model's order.
        calls: for each virtual stage of the whole model, how often earlier stages call each module that has an RNG
            stream of its own, by the module's name in the prepared module.
        keyed: whether the model has modules with an RNG stream of their own.
        draws: whether functions outside of modules with RNG streams may draw random numbers. The RNG state then travels
            from stage to stage with the activations.
    """

    name: str
    model: nn.Module
    cuts: stage_partition.StagePartition
    virtual_stages: Sequence[VirtualStage]
    calls: Sequence[Mapping[str, int]]
    keyed: bool
    draws: bool


@dataclass(frozen=True)
class StageOwnership:
    """Record of the ranks that hold each tensor of models that are cut into pipeline stages, as one rank needs it.

    Attributes:
        models: the models, with this rank's stages of each; a single one where the prepared module is a model.
        not_owned: names of tensors that this rank holds, but whose first stage is on another rank. That rank saves them
            and counts them in norms.
        groups: for parameters that several virtual stages use, pairs of the ranks of the stage axis that hold them, in
            ascending order, and the parameters.
        stages: for each parameter and persistent buffer, by its name, the indices of the virtual stages that hold it.
        drawn_apart: modules with an RNG stream of their own that stages of several ranks call, by name.
    """

    models: Sequence[CutModel]
    not_owned: frozenset[str]
    groups: list[tuple[tuple[int, ...], list[nn.Parameter]]]
    stages: Mapping[str, Sequence[int]]
    drawn_apart: Mapping[str, nn.Module]

    @property
    def parts(self) -> list[nn.Module]:
        """This rank's virtual stages as a list of modules, one for each, in the model's order.

        The parameters and buffers of the modules have their names in the module given to ``tutti.prepare``, and are the
        same objects as there. With several models each entry is an ``nn.ModuleDict`` of one virtual stage of each
        model.
        """
        if [each.name for each in self.models] == [""]:
            return [stage.module for stage in self.models[0].virtual_stages]
        parts = list[nn.Module]()
        for stages in zip(*(each.virtual_stages for each in self.models), strict=True):
            part = nn.ModuleDict()
            for each, stage in zip(self.models, stages, strict=True):
                part.add_module(each.name, stage.holder)
            parts.append(part)
        return parts


def stages_here(
    plain: nn.Module, found: Mapping[str, stage_partition.StagePartition], run_context: RunContext
) -> StageOwnership:
    """Cut models into virtual pipeline stages, and return which of them, and of their tensors, this rank has.

    A virtual stage is a run of consecutive modules of a model; a pipeline rank computes one or several of them. Not
    collective.

    Args:
        plain: the module given to ``tutti.prepare``, a model or a container of several; the stages share its modules
            and parameters.
        found: partition of each model into equally many stages, by the model's name in ``plain``, "" for ``plain``
            itself: the graph of its forward, and the stages' bounds among the nodes.
        run_context: the run, of which the mesh is read; rank r of p on its stage axis has the stages r, r + p, r + 2p,
            ….

    Returns:
        A ``StageOwnership``: ``models`` with this rank's virtual stages; ``stages`` has for each parameter and
        persistent buffer, by name, the indices of the virtual stages that hold it; ``not_owned`` the names of this
        rank's tensors that another rank saves and counts in norms; and ``groups`` the parameters that several stages
        share, with their ranks.
    """
    ranks, here = run_context.mesh.stage, run_context.mesh.at("stage")
    for cuts in found.values():
        if isinstance(cuts.record, ForwardRecord):
            cuts.record.move_buffers()
    names = {id(p): name for name, p in parameters([plain])}
    names |= {id(slot.get()): slot.name for slot in buffers([plain])}
    streams = {id(module): name for name, module in keyed_modules(plain).items()}
    holders: dict[str, set[int]] = {}
    used: dict[str, set[int]] = {}
    callers: dict[str, set[int]] = {}
    calls_before = {name: _calls_before(cuts, plain.get_submodule(name), streams) for name, cuts in found.items()}
    for name, cuts in found.items():
        model, rows = plain.get_submodule(name), calls_before[name]
        for stage, (nodes, held) in enumerate(zip(cuts.stages, _held(cuts, model), strict=True)):
            for tensor in held:
                holders.setdefault(names[tensor], set()).add(stage)
            for tensor in tensors_of(nodes, model) & names.keys():
                used.setdefault(names[tensor], set()).add(stage)
            for drawing, count in rows[stage + 1].items():
                if count != rows[stage].get(drawing):
                    callers.setdefault(drawing, set()).add(stage % ranks)
    models = []
    for name, cuts in found.items():
        model, rows = plain.get_submodule(name), calls_before[name]
        also = _also(cuts, model, _held_in(name, model, holders, len(cuts.stages)))
        virtual_stages = cut_into_stages(model, cuts.graph, cuts.bounds, also, cuts.record)
        own = {m for nodes in cuts.stages for _, m in modules_of(nodes, model) if id(m) not in streams}
        *calls, last = rows
        # Draws of the loss function continue where the model's last draw has ended, which may be on an earlier stage.
        draws = any(map(draws_by_functions, own)) or graph_draws(cuts.graph) or (bool(calls[-1]) and calls[-1] == last)
        keyed = any(id(module) in streams for module in model.modules())
        models.append(CutModel(name, model, cuts, virtual_stages[here::ranks], calls, keyed, draws))
    where = {name: sorted(used.get(name, {0})) for name in names.values()}
    where |= {name: sorted(stages) for name, stages in holders.items()}
    borrowed = {n for n in holders if here in {i % ranks for i in where[n]} and where[n][0] % ranks != here}
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for name, parameter in parameters([plain]):
        if len(holders.get(name, ())) > 1:
            groups.setdefault(tuple(sorted({i % ranks for i in holders[name]})), []).append(parameter)
    apart = [name for name, stages in callers.items() if len(stages) > 1]
    return StageOwnership(
        models, frozenset(borrowed), list(groups.items()), where, {name: plain.get_submodule(name) for name in apart}
    )


def _held(cuts: stage_partition.StagePartition, model: nn.Module) -> list[set[int]]:
    """Return for each stage the ``id()`` of its parameters, and of buffers that the model's own forward reads there."""
    slots = buffers([model])
    known = {id(slot.get()) for slot in slots}
    rows = [
        {id(p) for p in row.values()}
        | ({id(t) for t in read_directly(nodes, model).values()} & known)
        | {id(slot.get()) for slot in slots if slot.name in cuts.buffers_everywhere}
        for row, nodes in zip(cuts.held(model), cuts.stages, strict=True)
    ]
    rows[0] |= {id(slot.get()) for slot in slots if slot.name in _idle(cuts, model)}
    return rows


def _idle(cuts: stage_partition.StagePartition, model: nn.Module) -> set[str]:
    """Return the names of buffers that no stage uses; the first one holds them."""
    used = set().union(*(tensors_of(nodes, model) for nodes in cuts.stages))
    return {slot.name for slot in buffers([model]) if id(slot.get()) not in used} - cuts.buffers_everywhere


def _held_in(name: str, model: nn.Module, holders: Mapping[str, set[int]], stages: int) -> list[set[str]]:
    """Return for each stage the names in a model of the parameters that the stage holds, also for other models.

    A parameter that several models share has one name in checkpoints, the first, and each stage holds it under this.
    """
    names = {own: f"{name}.{own}".lstrip(".") for own, _ in model.named_parameters()}
    return [{own for own, full in names.items() if stage in holders.get(full, ())} for stage in range(stages)]


def _also(
    cuts: stage_partition.StagePartition, model: nn.Module, held: Sequence[Collection[str]]
) -> list[frozenset[str]]:
    """Return for each stage the names of tensors that it holds beside those of the modules that it calls."""
    rows = zip(held, cuts.stages, strict=True)
    also = [_aliases(row, model, nodes) | cuts.buffers_everywhere for row, nodes in rows]
    also[0] |= _idle(cuts, model)
    return also


def _aliases(held: Collection[str], plain: nn.Module, nodes: Sequence[Node]) -> frozenset[str]:
    """Return the first names of parameters that a stage uses under another name only."""
    called = {f"{at}.{name}".lstrip(".") for at, m in modules_of(nodes, plain) for name, _ in _all_named(m)}
    return frozenset(set(held) - called - read_directly(nodes, plain).keys())


def _all_named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def groups_of(
    holding: StageOwnership, run_context: RunContext
) -> list[tuple[Communicator | None, Sequence[nn.Parameter]]]:
    """Return the parameters of this rank that several virtual pipeline stages use, such as tied weights.

    Collective over all ranks of the job: creates a subgroup for each set of ranks that hold the same parameters, and
    broadcasts each of these parameters, in place, from the first rank that holds it.

    Args:
        holding: which ranks hold which of the model's tensors, from ``stages_here``.
        run_context: mesh and communicators of the run.

    Returns:
        A list of pairs: a communicator over the ranks that hold the parameters (None where this rank alone holds them),
        and the list of these parameters.
    """
    groups: list[tuple[Communicator | None, Sequence[nn.Parameter]]] = []
    here = run_context.mesh.at("stage")
    for ranks, shared in holding.groups:
        comm = (
            run_context.comms.subgroup("stage", ranks, f"weights shared by stages {ranks}") if len(ranks) > 1 else None
        )
        if here in ranks:
            groups.append((comm, shared))
        if comm is not None:
            for parameter in shared:
                comm.broadcast(parameter.data, 0, "weights shared by stages")
    return groups


def _calls_before(
    found: stage_partition.StagePartition, model: nn.Module, names: Mapping[int, str]
) -> list[Mapping[str, int]]:
    """Return for each stage, and for the end, how often each of some modules has been called before, by its name.

    Args:
        found: partition of the model into stages.
        model: the model.
        names: names of the modules that count, by their ``id()``.
    """
    counts: dict[str, int] = {}
    rows: list[Mapping[str, int]] = [{}]
    for nodes in found.stages:
        for _, called in modules_of(nodes, model):
            for inner in called.modules():
                if id(inner) in names:
                    counts[names[id(inner)]] = counts.get(names[id(inner)], 0) + 1
        rows.append(dict(counts))
    return rows
