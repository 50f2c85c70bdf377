"""Which of a cut model's tensors live on which rank, and what ranks have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from tutti.comm.communicator import Communicator
from tutti.layouts import cuts
from tutti.layouts.sections import Section, cut, modules_of, read_directly
from tutti.layouts.trace import draws_by_functions
from tutti.nn.draws import keyed
from tutti.nn.swap import buffers, parameters
from tutti.types import Setting


@dataclass(frozen=True)
class Holding:
    """Who holds what of a model that is cut.

    Attributes:
        cuts: where.
        borrowed: names of tensors here that a rank before this one holds too.
        groups: parameters here that several sections use, with the ranks of the stage axis that hold them.
        calls: for each stage, how often earlier ones have called each module that has a random stream.
        draws: whether something may be drawn by functions, which begins where the stage before has ended.
    """

    cuts: cuts.Cuts
    borrowed: frozenset[str]
    groups: list[tuple[tuple[int, ...], list[nn.Parameter]]]
    calls: list[Mapping[str, int]]
    draws: bool


def stages_here(plain: nn.Module, found: cuts.Cuts, setting: Setting) -> tuple[list[Section], Holding]:
    """This rank's sections of the model, from the first on, and what it has in common with other ranks."""
    ranks, here = setting.grid.stage, setting.grid.at("stage")
    held = found.held(plain)
    names = {id(slot.get()): slot.name for slot in buffers([plain])}
    direct = [{names[id(t)] for t in read_directly(n, plain).values() if id(t) in names} for n in found.stages]
    holders: dict[str, list[int]] = {}
    for stage, row in enumerate(zip(held, direct, strict=True)):
        for name in (*row[0], *row[1]):
            holders.setdefault(name, []).append(stage)
    mine = range(here, len(held), ranks)
    also = [_aliases(row.keys(), plain, nodes) for row, nodes in zip(held, found.stages, strict=True)]
    sections = cut(plain, found.graph, found.bounds, also)
    borrowed = {n for n, s in holders.items() if here in {i % ranks for i in s} and s[0] % ranks != here}
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for name, parameter in parameters([plain]):
        if len(holders.get(name, ())) > 1:
            groups.setdefault(tuple(sorted({i % ranks for i in holders[name]})), []).append(parameter)
    streams = keyed(plain)
    own = {m for nodes in found.stages for name, m in modules_of(nodes, plain) if name not in streams}
    *calls, last = _calls_before(found, streams)
    # What the loss draws after the model's call begins where the model's last draw has ended, on whichever stage.
    draws = any(map(draws_by_functions, own)) or (bool(calls[-1]) and calls[-1] == last)
    return [sections[i] for i in mine], Holding(found, frozenset(borrowed), list(groups.items()), calls, draws)


def _aliases(held: Collection[str], plain: nn.Module, nodes: Sequence[Node]) -> frozenset[str]:
    """First names of parameters that a stage has under another name alone."""
    called = {f"{at}.{name}" for at, m in modules_of(nodes, plain) for name, _ in _all_named(m)}
    return frozenset(set(held) - called - read_directly(nodes, plain).keys())


def _all_named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def groups_of(holding: Holding, setting: Setting) -> list[tuple[Communicator | None, Sequence[nn.Parameter]]]:
    """Communicators among the ranks that hold the same parameters, which begin as the first one's. Collective."""
    groups: list[tuple[Communicator | None, Sequence[nn.Parameter]]] = []
    here = setting.grid.at("stage")
    for ranks, shared in holding.groups:
        comm = setting.comms.among("stage", ranks, f"weights shared by stages {ranks}") if len(ranks) > 1 else None
        if here in ranks:
            groups.append((comm, shared))
        if comm is not None:
            for parameter in shared:
                comm.broadcast(parameter.data, 0, "weights shared by stages")
    return groups


def _calls_before(found: cuts.Cuts, chosen: Mapping[str, nn.Module]) -> list[Mapping[str, int]]:
    """For each stage and at the end, how often each module that has a random stream has been called until then."""
    counts: dict[str, int] = {}
    rows: list[Mapping[str, int]] = [{}]
    for nodes in found.stages:
        for node in nodes:
            for name in chosen:
                if node.op == "call_module" and (name == node.target or name.startswith(f"{node.target}.")):
                    counts[name] = counts.get(name, 0) + 1
        rows.append(dict(counts))
    return rows
