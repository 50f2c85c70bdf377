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
from tutti.parallel.pipeline.virtual_stage import VirtualStage, cut_into_stages, modules_of, read_directly, tensors_of
from tutti.types import RunContext


@dataclass(frozen=True)
class StageOwnership:
    """Which ranks hold which tensors of a model that is cut into pipeline stages.

    Attributes:
        cuts: the graph of the model's forward, and the bounds of the stages among its nodes.
        not_owned: names of tensors that this rank holds, but whose first stage is on another rank. That rank saves them
            and counts them in norms.
        groups: for parameters that several virtual stages use, pairs of the ranks of the stage axis that hold them, in
            ascending order, and the parameters.
        calls: for each virtual stage of the whole model, how often earlier stages call each module that has an RNG
            stream of its own, by the module's name.
        stages: for each parameter and persistent buffer, by its name, the indices of the virtual stages that hold it.
        draws: whether functions outside of modules with RNG streams may draw random numbers. The RNG state then travels
            from stage to stage with the activations.
        drawn_apart: names of modules with an RNG stream of their own that stages of several ranks call.
    """

    cuts: stage_partition.StagePartition
    not_owned: frozenset[str]
    groups: list[tuple[tuple[int, ...], list[nn.Parameter]]]
    calls: list[Mapping[str, int]]
    stages: Mapping[str, Sequence[int]]
    draws: bool
    drawn_apart: Sequence[str]


def stages_here(
    plain: nn.Module, found: stage_partition.StagePartition, run_context: RunContext
) -> tuple[list[VirtualStage], StageOwnership]:
    """Cut the model into virtual pipeline stages, and return those that this rank computes. Not collective.

    A virtual stage is a run of consecutive modules of the model; a pipeline rank computes one or several of them.

    Args:
        plain: the whole model; the stages share its modules and parameters.
        found: partition of the model into stages: the graph of its forward, and the stages' bounds among the nodes.
        run_context: the run, of which the mesh is read; rank r of p on its stage axis has the stages r, r + p,
            r + 2p, ….

    Returns:
        A pair. First a list of this rank's virtual stages in the model's order, each with its ``module`` and the names
        of the values that the stage receives (``incoming``) and sends (``outgoing``). Second a ``StageOwnership``,
        which is about all stages of the model: ``stages`` has for each parameter and persistent buffer, by name, the
        indices of the virtual stages that hold it; ``not_owned`` the names of this rank's tensors that another rank
        saves and counts in norms; and ``groups`` the parameters that several stages share, with their ranks.
    """
    ranks, here = run_context.grid.stage, run_context.grid.at("stage")
    held = found.held(plain)
    names = {id(slot.get()): slot.name for slot in buffers([plain])}
    everywhere = found.record.buffers if found.record is not None else frozenset[str]()
    direct = [
        {names[id(t)] for t in read_directly(n, plain).values() if id(t) in names} | everywhere for n in found.stages
    ]
    used = [tensors_of(nodes, plain) for nodes in found.stages]
    idle = {slot.name for slot in buffers([plain])} - {names[i] for each in used for i in each if i in names}
    idle -= everywhere
    direct[0] |= idle
    holders: dict[str, list[int]] = {}
    for stage, row in enumerate(zip(held, direct, strict=True)):
        for name in (*row[0], *row[1]):
            holders.setdefault(name, []).append(stage)
    mine = range(here, len(held), ranks)
    also = [_aliases(row.keys(), plain, nodes) | everywhere for row, nodes in zip(held, found.stages, strict=True)]
    also[0] |= idle
    virtual_stages = cut_into_stages(plain, found.graph, found.bounds, also, found.record)
    borrowed = {n for n, s in holders.items() if here in {i % ranks for i in s} and s[0] % ranks != here}
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for name, parameter in parameters([plain]):
        if len(holders.get(name, ())) > 1:
            groups.setdefault(tuple(sorted({i % ranks for i in holders[name]})), []).append(parameter)
    streams = keyed_modules(plain)
    own = {m for nodes in found.stages for name, m in modules_of(nodes, plain) if name not in streams}
    rows = _calls_before(found, streams)
    *calls, last = rows
    callers = {n: {i % ranks for i in range(len(calls)) if rows[i + 1].get(n) != rows[i].get(n)} for n in last}
    # Draws of the loss function continue where the model's last draw has ended, which may be on an earlier stage.
    draws = any(map(draws_by_functions, own)) or graph_draws(found.graph) or (bool(calls[-1]) and calls[-1] == last)
    where = {names[i]: [stage for stage, each in enumerate(used) if i in each] or [0] for i in names} | holders
    return [virtual_stages[i] for i in mine], StageOwnership(
        found,
        frozenset(borrowed),
        list(groups.items()),
        calls,
        where,
        draws,
        [name for name in callers if len(callers[name]) > 1],
    )


def _aliases(held: Collection[str], plain: nn.Module, nodes: Sequence[Node]) -> frozenset[str]:
    """Return the first names of parameters that a stage uses under another name only."""
    called = {f"{at}.{name}" for at, m in modules_of(nodes, plain) for name, _ in _all_named(m)}
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
    here = run_context.grid.at("stage")
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


def _calls_before(found: stage_partition.StagePartition, chosen: Mapping[str, nn.Module]) -> list[Mapping[str, int]]:
    """Return for each stage, and for the end, how often each module in ``chosen`` has been called before."""
    counts: dict[str, int] = {}
    rows: list[Mapping[str, int]] = [{}]
    for nodes in found.stages:
        for node in nodes:
            for name in chosen:
                if node.op == "call_module" and (name == node.target or name.startswith(f"{node.target}.")):
                    counts[name] = counts.get(name, 0) + 1
        rows.append(dict(counts))
    return rows
