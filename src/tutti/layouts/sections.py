"""A traced model cut into sections: what each computes, what it is given, and what it passes on."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from tutti.errors import UsageError

_LOCAL = {getattr, operator.getitem, operator.floordiv, operator.mul, operator.add, operator.sub}


@dataclass(frozen=True)
class Section:
    """One virtual stage of a model.

    Attributes:
        module: its modules under their names in the whole model; called with ``given`` and ``incoming``.
        given: arguments of the model's call that it reads, which every stage has.
        incoming: what it takes from the section before.
        outgoing: what it passes on to the next one; empty for the last, which returns the model's result.
        alone: ``module`` returns its one value, not a tuple of all.
    """

    module: nn.Module
    given: tuple[str, ...] = ()
    incoming: tuple[str, ...] = ()
    outgoing: tuple[str, ...] = ()
    alone: bool = False


def body(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something which cannot be computed anew on every stage, in order."""
    local = _local(graph)
    return [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output") and n not in local]


def modules_of(nodes: Iterable[fx.Node], plain: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that nodes call, by name, in order."""
    return [(str(n.target), plain.get_submodule(str(n.target))) for n in nodes if n.op == "call_module"]


def read_directly(nodes: Iterable[fx.Node], plain: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that nodes read from outside of any module's forward, by name."""
    names = {str(n.target) for node in nodes for n in node.all_input_nodes if n.op == "get_attr"}
    found = {}
    for name in sorted(names):
        path, _, key = name.rpartition(".")
        value = getattr(plain.get_submodule(path), key)
        if isinstance(value, Tensor):
            found[name] = value
    return found


def cut(plain: nn.Module, graph: fx.Graph, bounds: Sequence[int], also: Sequence[Collection[str]]) -> list[Section]:
    """Sections of ``body(graph)`` between ``bounds``; ``also``: for each, names of parameters that it holds besides."""
    nodes = body(graph)
    last = last_uses(graph)
    [output] = [n for n in graph.nodes if n.op == "output"]
    crossing = [[n for n in nodes[:bound] if last[n] >= bound] for bound in bounds]
    sections = []
    for number, (low, high) in enumerate(pairwise(bounds)):
        end = output if number == len(bounds) - 2 else None
        passed = [] if end else crossing[number + 1]
        given = _given(graph, nodes[low:high], end)
        sections.append(_section(plain, given, nodes[low:high], crossing[number], passed, end, also[number]))
    return sections


def last_uses(graph: fx.Graph) -> dict[fx.Node, int]:
    """Where in ``body(graph)`` the value of each of its nodes is used last; its length for the model's result."""
    nodes = body(graph)
    place = {node: i for i, node in enumerate(nodes)}
    [output] = [n for n in graph.nodes if n.op == "output"]
    return {
        node: max([place.get(user, len(nodes)) for user in _users(node, place, output)], default=-1) for node in nodes
    }


def _users(node: fx.Node, place: dict[fx.Node, int], output: fx.Node) -> Iterable[fx.Node]:
    """The nodes of the body that use a node's value, or the output."""
    for user in node.users:
        if user in place or user is output:
            yield user
        else:
            yield from _users(user, place, output)


def _local(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that only look at the arguments of the call, such as their shape."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        looks = (node.op == "call_function" and node.target in _LOCAL) or (
            node.op == "call_method" and node.target in ("size", "dim")
        )
        if looks and all(n.op == "placeholder" or n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _section(
    plain: nn.Module,
    given: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    incoming: Sequence[fx.Node],
    outgoing: Sequence[fx.Node],
    output: fx.Node | None,
    also: Collection[str],
) -> Section:
    names = tuple(n.name for n in incoming), tuple(n.name for n in outgoing)
    chain = None if also else _chain(plain, nodes, [*given, *incoming], outgoing, output)
    if chain is not None:
        return Section(chain, tuple(str(n.target) for n in given), *names, alone=True)
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in (*given, *incoming)}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for name in sorted(also):
        graph.get_attr(name)
    for node in nodes:
        copied(node)
    if output is not None:
        graph.output(fx.node.map_arg(output.args[0], copied))
    else:
        graph.output(tuple(copied(n) for n in outgoing))
    module = fx.GraphModule(plain, graph, class_name="Section")
    _tidy(module, plain)
    return Section(module, tuple(str(n.target) for n in given), *names, alone=output is not None)


def _given(whole: fx.Graph, nodes: Sequence[fx.Node], output: fx.Node | None) -> list[fx.Node]:
    """Placeholders that the nodes need, by themselves or through what they look up in them."""
    local, seen = _local(whole), set[fx.Node]()
    ahead = [*nodes, *([output] if output else [])]
    while ahead:
        for node in ahead.pop().all_input_nodes:
            if node not in seen:
                seen.add(node)
                ahead += [node] if node in local else []
    return [n for n in whole.nodes if n.op == "placeholder" and n in seen]


def _chain(
    plain: nn.Module,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outgoing: Sequence[fx.Node],
    output: fx.Node | None,
) -> nn.Sequential | None:
    """The section as an ``nn.Sequential``, where it is one child of the model after the other."""
    if len(inputs) != 1 or not nodes or not isinstance(plain, nn.Sequential):
        return None
    value, layers = inputs[0], OrderedDict[str, nn.Module]()
    for node in nodes:
        name = str(node.target)
        if node.op != "call_module" or node.args != (value,) or node.kwargs or "." in name or name in layers:
            return None
        layers[name], value = plain.get_submodule(name), node
    end = [output.args[0]] if output is not None else list(outgoing)
    return nn.Sequential(layers) if end == [value] else None


def _tidy(module: nn.Module, plain: nn.Module) -> None:
    """Make what ``torch.fx`` has built look like the part of ``plain`` that it is: order, containers, buffers."""
    for name, own in module.named_modules():
        if own is not module and type(own) is not nn.Module:
            continue
        origin = plain.get_submodule(name)
        for key in ("_modules", "_parameters", "_buffers"):
            there = getattr(own, key)
            setattr(own, key, {k: there[k] for k in getattr(origin, key) if k in there})
        own._non_persistent_buffers_set = origin._non_persistent_buffers_set & own._buffers.keys()
        own.training = origin.training
        if own is not module:
            # Never called: it only holds what was inside of the module of this name.
            own.__class__ = nn.ModuleList


def crossing_values(outputs: Any, section: Section) -> list[Any]:
    """What a section passes on, as a list."""
    return [outputs] if section.alone else list(outputs)


def check_buffers(stages: Sequence[Sequence[fx.Node]], plain: nn.Module) -> None:
    """Raise UsageError where a module with buffers of its own is called on several stages."""
    where: dict[nn.Module, int] = {}
    for stage, nodes in enumerate(stages):
        for name, module in modules_of(nodes, plain):
            for inner in module.modules():
                if inner._buffers and where.setdefault(inner, stage) != stage:
                    raise UsageError(
                        f"the module {name} is called on both sides of a cut",
                        where=f"stages {where[inner]} and {stage}",
                        why="it holds buffers, such as the statistics of batch norm, which would no longer be one",
                        remedy="choose other cuts, take fewer stages, or --strategy mirrored",
                    )
