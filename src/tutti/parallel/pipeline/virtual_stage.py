"""Cut a traced model into virtual stages: modules, inputs and outputs of each."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from tutti.errors import UsageError
from tutti.parallel.pipeline.recorded_forward import ForwardRecord
from tutti.parallel.pipeline.whole_forward import WholeForward, WholeStage
from tutti.torch_compat import module_buffers, order_members

_LOCAL = {getattr, operator.getitem, operator.floordiv, operator.mul, operator.add, operator.sub}
_IN_PLACE = {getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "setitem")}


@dataclass(frozen=True)
class VirtualStage:
    """One virtual pipeline stage of a model: its module, and the values that enter and leave it.

    Attributes:
        module: computes the stage; holds the stage's submodules under their names in the whole model. Its positional
            arguments are the values of ``given``, then those of ``incoming``.
        given: names of the arguments of the model's call that the stage reads; every stage has these values. Where
            stages follow a recorded forward, ``args`` and ``kwargs``, the call's positional and keyword arguments.
        incoming: names of the values that the stage receives from the previous stage.
        outgoing: names of the values that the stage sends to the next stage; empty for the last stage, which returns
            the model's output.
        single_output: whether ``module`` returns a single value; otherwise it returns a tuple of the values of
            ``outgoing``.
    """

    module: nn.Module
    given: tuple[str, ...] = ()
    incoming: tuple[str, ...] = ()
    outgoing: tuple[str, ...] = ()
    single_output: bool = False

    @property
    def holder(self) -> nn.Module:
        """The module that has the stage's submodules and tensors under their names in the whole model.

        It is ``module`` itself, or the whole model on a stage that computes a model that is not cut.
        """
        whole = self.module.whole if isinstance(self.module, WholeStage) else None
        return self.module if whole is None else whole


def body(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a model's graph that are divided over pipeline stages, each for exactly one stage, in order.

    The model may be cut into stages between any two of these nodes. The graph's inputs and output, reads of attributes,
    and cheap values that every stage recomputes from the inputs, such as shapes, are left out.

    Args:
        graph: graph of the model's forward.
    """
    local = _local(graph)
    return [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output") and n not in local]


def modules_of(nodes: Iterable[fx.Node], plain: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a list of (module name, module) pairs for the ``call_module`` nodes among the given nodes, in order.

    A module that several nodes call appears once for each call.

    Args:
        nodes: nodes of the graph of the model's forward; nodes that call no module are skipped.
        plain: the whole model.
    """
    return [(str(n.target), plain.get_submodule(str(n.target))) for n in nodes if n.op == "call_module"]


def read_directly(nodes: Iterable[fx.Node], plain: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that graph nodes take as arguments, outside of any module's forward.

    Args:
        nodes: nodes of the graph of the model's forward.
        plain: the whole model.

    Returns:
        A dict from names in the model to the model's own tensors, in alphabetical order.
    """
    names = {str(n.target) for node in nodes for n in node.all_input_nodes if n.op == "get_attr"}
    found = {}
    for name in sorted(names):
        path, _, key = name.rpartition(".")
        value = getattr(plain.get_submodule(path), key)
        if isinstance(value, Tensor):
            found[name] = value
    return found


def tensors_of(nodes: Iterable[fx.Node], plain: nn.Module) -> set[int]:
    """Return the ``id()`` of each parameter and buffer that graph nodes use.

    These are the tensors of the modules that the nodes call, and the tensors that the nodes take as arguments.

    Args:
        nodes: nodes of the graph of the model's forward.
        plain: the whole model, whose modules and tensors the nodes name.
    """
    nodes = list(nodes)
    called = [module for _, module in modules_of(nodes, plain)]
    return {id(t) for module in called for t in (*module.parameters(), *module.buffers())} | {
        id(t) for t in read_directly(nodes, plain).values()
    }


def cut_into_stages(
    plain: nn.Module,
    graph: fx.Graph,
    bounds: Sequence[int],
    also: Sequence[Collection[str]],
    record: ForwardRecord | WholeForward | None = None,
) -> list[VirtualStage]:
    """Build all virtual pipeline stages of a model, which share their modules and parameters with it. Not collective.

    Args:
        plain: the whole model.
        graph: graph of the model's forward, from ``torch.fx`` or from ``record``.
        bounds: (stages + 1,) indices into ``body(graph)``, the list of the nodes that are divided over stages; stage i
            computes the nodes from bound i to bound i + 1, exclusive.
        also: for each stage, names of parameters and buffers that the stage holds in addition to those of the modules
            that it calls.
        record: record of the forward, for stages that run the model's own code; None for stages that run parts of
            ``graph``.

    Returns:
        The virtual stages of the whole model, in order. Each has its ``module`` and the names of the values that the
        stage receives (``incoming``) and sends (``outgoing``).
    """
    nodes = body(graph)
    last = last_uses(graph)
    [output] = [n for n in graph.nodes if n.op == "output"]
    crossing = [[n for n in nodes[:bound] if last[n] >= bound] for bound in bounds]
    stages = []
    for number, (low, high) in enumerate(pairwise(bounds)):
        end = output if number == len(bounds) - 2 else None
        passed = [] if end else crossing[number + 1]
        if record is not None:
            stage = record.stage(nodes[low:high], crossing[number], passed)
            stage.hold(also[number], plain)
            _tidy(stage, plain)
            names = tuple(n.name for n in crossing[number]), tuple(n.name for n in passed)
            stages.append(VirtualStage(stage, ("args", "kwargs"), *names, single_output=end is not None))
            continue
        given = _given(graph, nodes[low:high], end)
        stages.append(_section(plain, given, nodes[low:high], crossing[number], passed, end, also[number]))
    return stages


def last_uses(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return for each node of a model's graph the last node that uses its value, which shows the cuts it crosses.

    Args:
        graph: graph of the model's forward.

    Returns:
        For each node of ``body(graph)``, the list of the nodes that are divided over stages, the index in this list of
        the last node that uses its value; the length of the list where the model's output uses the value, -1 for a
        value without users.
    """
    nodes = body(graph)
    place = {node: i for i, node in enumerate(nodes)}
    [output] = [n for n in graph.nodes if n.op == "output"]
    return {
        node: max([place.get(user, len(nodes)) for user in _users(node, place, output)], default=-1) for node in nodes
    }


def _users(node: fx.Node, place: dict[fx.Node, int], output: fx.Node) -> Iterable[fx.Node]:
    """Yield the nodes of the body, or the output, that use a node's value."""
    for user in node.users:
        if user in place or user is output:
            yield user
        else:
            yield from _users(user, place, output)


def _local(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that only read the arguments of the call, such as their shape: every stage recomputes them."""
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
) -> VirtualStage:
    names = tuple(n.name for n in incoming), tuple(n.name for n in outgoing)
    chain = None if also else _chain(plain, nodes, [*given, *incoming], outgoing, output)
    if chain is not None:
        return VirtualStage(chain, tuple(str(n.target) for n in given), *names, single_output=True)
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
    return VirtualStage(module, tuple(str(n.target) for n in given), *names, single_output=output is not None)


def _given(whole: fx.Graph, nodes: Sequence[fx.Node], output: fx.Node | None) -> list[fx.Node]:
    """Return the inputs of the graph that the nodes read, directly or through recomputed nodes (``_local``)."""
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
    """Return the stage as an ``nn.Sequential`` where it is a plain chain of the model's children; otherwise None."""
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
    """Give the modules that ``torch.fx`` has built the order, containers and buffers that they have in ``plain``."""
    for name, own in module.named_modules():
        if own is not module and type(own) is not nn.Module:
            continue
        origin = plain.get_submodule(name)
        order_members(own, origin)
        own.training = origin.training
        if own is not module:
            # Never called: a container of the submodules that the module of this name has here.
            own.__class__ = nn.ModuleList


def crossing_values(outputs: Any, stage: VirtualStage) -> list[Any]:
    """Return the result of a pipeline stage's module as a list of values to send to the next stage.

    Args:
        outputs: result of ``stage.module``: a single value where ``stage.single_output`` is true, otherwise a tuple.
        stage: the virtual stage that has computed ``outputs``; not the last one, which sends nothing.
    """
    return [outputs] if stage.single_output else list(outputs)


def check_buffers(stages: Sequence[Sequence[fx.Node]], plain: nn.Module) -> None:
    """Check that no two pipeline stages would have copies of a buffer, or of a tensor that the forward writes.

    Args:
        stages: for each stage, the nodes of the graph of the model's forward that the stage computes.
        plain: the whole model.

    Raises:
        UsageError: two stages call a module that has buffers; or two stages read a parameter or buffer that the model's
            own forward writes in place.
    """
    where: dict[nn.Module, int] = {}
    for stage, nodes in enumerate(stages):
        for name, module in modules_of(nodes, plain):
            for inner in module.modules():
                if module_buffers(inner) and where.setdefault(inner, stage) != stage:
                    raise UsageError(
                        f"the module {name} is called on both sides of a cut",
                        where=f"stages {where[inner]} and {stage}",
                        why="it holds buffers, such as the statistics of batch norm, which would exist twice",
                        remedy="choose other cuts, take fewer stages, or strategy='mirrored'",
                    )
    readers: dict[str, list[int]] = {}
    for stage, nodes in enumerate(stages):
        for name in read_directly(nodes, plain):
            readers.setdefault(name, []).append(stage)
    for name in sorted({writes(node) for nodes in stages for node in nodes} - {""}):
        if len(readers[name]) > 1:
            raise UsageError(
                f"the model's own forward writes {name} on one side of a cut and reads it on another",
                where=f"stages {', '.join(map(str, readers[name]))}",
                why="each stage would have its own copy",
                remedy="move what uses it into one module, take fewer stages, or strategy='mirrored'",
            )


def writes(node: fx.Node, op: str = "get_attr") -> str:
    """Return the name of the tensor that a graph node changes in place, a parameter or buffer by default; "" for none.

    Only a method or function that writes its first argument counts, such as ``add_``.

    Args:
        node: a node of the graph of the model's forward.
        op: kind of the written tensor, the ``op`` of the node that stands for it: ``get_attr`` for a parameter or
            buffer of the model, ``placeholder`` for an argument of the model's forward.
    """
    if not node.args or not isinstance(node.args[0], fx.Node) or node.args[0].op != op:
        return ""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    in_place = in_place or (node.op == "call_function" and node.target in _IN_PLACE)
    return str(node.args[0].target) if in_place else ""
