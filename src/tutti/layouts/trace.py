"""A model's forward as a graph of calls of its modules, read by ``torch.fx`` without computing anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

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
    *(torch.bernoulli, torch.multinomial, torch.normal, torch.dropout, torch.poisson),
}
_RANDOM_METHODS = {"bernoulli", "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "multinomial"}


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
        graph = _read(model, opened)
    except Exception as error:
        why = f"torch.fx cannot follow its forward: {str(error).splitlines()[0] if str(error) else repr(error)}"
        raise UsageError(f"a {name} cannot be cut into stages", why=why, remedy=remedy) from error
    if any(node.op == "placeholder" and str(node.target).startswith("*") for node in graph.nodes):
        raise UsageError(f"a {name} cannot be cut into stages", why="its forward takes *args", remedy=remedy)
    if _draws(graph):
        why = "its own forward draws random numbers, which would depend on the stages"
        raise UsageError(f"a {name} cannot be cut into stages", why=why, remedy=remedy)
    with mode([model], training=not model.training):
        other = _read(model, opened)
    if str(other) != str(graph):
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
        graph = _read(module, None)
        with mode([module], training=not module.training):
            other = _read(module, None)
    except Exception:
        return False
    return not _draws(graph) and str(other) == str(graph)


def _read(model: nn.Module, opened: Collection[str] | None) -> fx.Graph:
    return _Tracer(opened).trace(model)


def _draws(graph: fx.Graph) -> bool:
    """Whether a function that may draw random numbers is called."""
    return any(
        (node.op == "call_function" and (node.target in _RANDOM or _attends(node)))
        or (node.op == "call_method" and node.target in _RANDOM_METHODS)
        for node in graph.nodes
    )


def _attends(node: fx.Node) -> bool:
    """Whether it is an attention with dropout."""
    if node.target is not functional.scaled_dot_product_attention:
        return False
    return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))


def _is_layer(module: nn.Module) -> bool:
    """Whether this is one of PyTorch's own modules, or stands for one; sequences are seen through."""
    return type(module).__module__.startswith(("torch.nn.", "tutti.nn.")) and not is_sequence(module)
