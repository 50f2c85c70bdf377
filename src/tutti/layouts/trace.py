"""A model's forward as a graph of calls of its modules, read by ``torch.fx`` without computing anything."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional

from tutti.errors import UsageError
from tutti.nn.swap import mode
from tutti.nn.units import is_sequence

_RANDOM = {
    *(getattr(functional, name) for name in dir(functional) if "dropout" in name),
    *(functional.rrelu, functional.gumbel_softmax, functional.multi_head_attention_forward),
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.bernoulli, torch.binomial, torch.multinomial, torch.normal, torch.poisson, torch.rrelu, torch.rrelu_),
    *(getattr(torch, name) for name in dir(torch) if "dropout" in name),
    *(getattr(functional, name) for name in dir(functional) if name.startswith("fractional_max_pool")),
}
_RANDOM_METHODS = {
    *("bernoulli", "bernoulli_", "multinomial", "uniform_", "normal_", "random_", "exponential_"),
    *("cauchy_", "geometric_", "log_normal_"),
}


class _Read(NamedTuple):
    """A forward as a graph, and the names of the functions that draw random numbers in it."""

    graph: fx.Graph
    drawing: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.graph)


class _Tracer(fx.Tracer):
    """Calls of all modules but ``opened`` ones become one node each."""

    def __init__(self, opened: Collection[str] | None) -> None:
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._opened is None:
            return _is_layer(m)
        return module_qualified_name not in self._opened

    def create_proxy(self, kind: str, target: Any, args: Any, *rest: Any, **named: Any) -> Any:
        # An argument that may be left out keeps its default: the graph would differ with what is given.
        if kind == "placeholder" and args:
            return args[0]
        return super().create_proxy(kind, target, args, *rest, **named)


def trace(model: nn.Module, opened: Collection[str]) -> fx.Graph:
    """The graph of ``model``, in which modules named in ``opened`` are seen through.

    Raises UsageError where the forward cannot be read, or draws random numbers outside of its modules, or does
    something else in training than in evaluation.
    """
    name = type(model).__name__
    remedy = (
        "make the model an nn.Sequential of its blocks, or move what its forward decides or draws into modules; "
        "or take --strategy mirrored"
    )
    try:
        graph, drawing = read = _read(model, opened)
    except Exception as error:
        why = f"torch.fx cannot follow its forward: {str(error).splitlines()[0] if str(error) else repr(error)}"
        raise UsageError(f"a {name} cannot be cut into stages", why=why, remedy=remedy) from error
    if any(node.op == "placeholder" and str(node.target).startswith("*") for node in graph.nodes):
        raise UsageError(f"a {name} cannot be cut into stages", why="its forward takes *args", remedy=remedy)
    if drawing:
        why = f"its own forward draws random numbers by {', '.join(drawing)}, which would depend on the stages"
        raise UsageError(f"a {name} cannot be cut into stages", why=why, remedy=remedy)
    with mode([model], training=not model.training):
        other = _read(model, opened)
    if str(other) != str(read):
        why = "its own forward does something else in training than in evaluation"
        raise UsageError(f"a {name} cannot be cut into stages", why=why, remedy=remedy)
    return graph


def openable(module: nn.Module) -> bool:
    """Whether a module may be seen through: everything in it can be read, and draws only by modules of PyTorch."""
    if next(module.children(), None) is None or module._forward_hooks or module._forward_pre_hooks:
        return False
    if is_sequence(module):
        return True
    if _is_layer(module):
        return False
    try:
        read = _read(module, None)
        with mode([module], training=not module.training):
            other = _read(module, None)
    except Exception:
        return False
    return not read.drawing and str(other) == str(read)


def draws_by_functions(module: nn.Module) -> bool:
    """Whether something in it may draw random numbers other than by modules of PyTorch; True where it is not known."""
    return any(_may_draw(inner) for inner in module.modules() if not (_is_layer(inner) or is_sequence(inner)))


def _may_draw(module: nn.Module) -> bool:
    try:
        for training in (True, False):
            with mode([module], training=training):
                if _read(module, ()).drawing:
                    return True
    except Exception:
        return True
    return False


def _read(model: nn.Module, opened: Collection[str] | None) -> _Read:
    before = torch.get_rng_state(), random.getstate()
    try:
        graph = _Tracer(opened).trace(model)
        # What does not depend on the inputs is computed while the forward is read, and would stay the same for ever.
        drawn = not torch.equal(torch.get_rng_state(), before[0]) or random.getstate() != before[1]
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
    names = {_name(node) for node in graph.nodes if _draws(node)}
    return _Read(graph, (*sorted(names), *(["a function such as torch.rand"] if drawn else [])))


def _draws(node: fx.Node) -> bool:
    """Whether it is the call of a function that may draw random numbers."""
    if node.op == "call_function":
        return node.target in _RANDOM or _attends(node)
    return node.op == "call_method" and node.target in _RANDOM_METHODS


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _attends(node: fx.Node) -> bool:
    """Whether it is an attention with dropout."""
    if node.target is not functional.scaled_dot_product_attention:
        return False
    return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))


def _is_layer(module: nn.Module) -> bool:
    """Whether this is one of PyTorch's own modules, or stands for one; sequences are seen through."""
    return type(module).__module__.startswith(("torch.nn.", "tutti.nn.")) and not is_sequence(module)
