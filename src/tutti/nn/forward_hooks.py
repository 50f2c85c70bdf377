"""Forward hooks and forward pre-hooks that a script has registered on modules."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from tutti.nn.gradient_hooks import hook_package
from tutti.torch_compat import forward_hooks, tree_map, wrap_forward_hooks

_MARK = "tutti.seen_by_hook"


def find_script_hook(modules: Iterable[tuple[str, nn.Module]]) -> tuple[str, str] | None:
    """Return name and place of the first module with a forward hook or forward pre-hook of the script; None for none.

    Hooks of PyTorch and of tutti do not count.

    Args:
        modules: (name, module) pairs.

    Returns:
        A pair of texts: the module's name, and ``FILE:LINE`` of the hook's definition, or its type where the hook is no
        function.
    """
    for name, module in modules:
        for hook in forward_hooks(module):
            if _is_of_script(hook):
                return name, _place(hook)
    return None


class KeptGraphs:
    """Finds forward hooks of the script that keep tensors with their autograd graph beyond the forward.

    A hook that returns nothing may keep tensors that it is called with, such as features for the loss. It is therefore
    called with views of the module's inputs and outputs. If the autograd node of a view is alive after the forward,
    outside of the graph of the forward's results, the hook has kept the view or a tensor that it has computed from the
    view.

    Args:
        model: modules whose hooks are watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: list[tuple[str, str, ReferenceType[_Mark]]] = []

    def begin(self) -> None:
        """Wrap the script's forward hooks on the model, to find out whether they keep tensors after the forward.

        A hook may keep a tensor with its autograd graph, such as features from which the script computes a loss. To
        find out, each wrapped hook gets views of the module's inputs and outputs in place of these in later forwards
        with gradients; after such a forward ``kept`` tells whether a view is still alive. Hooks that are registered
        later are not watched. The hooks stay wrapped, in their modules' own hook tables.
        """
        for name, module in self._model.named_modules():
            if forward_hooks(module):
                wrap_forward_hooks(module, partial(self._watched, name))

    def _watched(self, name: str, hook: Any) -> Any:
        watched = not _is_of_script(hook) or isinstance(hook, _WatchedHook)
        return hook if watched else _WatchedHook(hook, name, self._seen)

    def kept(self, results: Iterable[Any]) -> tuple[str, str] | None:
        """Return the first forward hook that has kept a tensor with its autograd graph since the last call of ``kept``.

        Called after a forward; the hooks are those that ``begin`` has wrapped. A tensor that is part of the graph of
        ``results`` does not count, nor does a hook that has returned a value.

        Args:
            results: results of the forward, whose graphs may stay alive; values that are no tensors are ignored.

        Returns:
            A pair of texts: the name of the hook's module, and ``FILE:LINE`` of the hook's definition or its type; None
            if no hook has kept a tensor.
        """
        alive = [(name, place, mark) for name, place, made in self._seen if (mark := made()) is not None]
        self._seen.clear()
        ahead: list[Any] = [value.grad_fn for value in results if isinstance(value, Tensor)] if alive else []
        used, visited = set[Any](), set[Any]()
        while ahead:
            node = ahead.pop()
            if node is not None and node not in visited:
                visited.add(node)
                used.add(node.metadata.get(_MARK))
                ahead += [following for following, _ in node.next_functions]
        return next(((name, place) for name, place, mark in alive if mark not in used), None)


class _Mark:
    """Lives as long as the graph node that holds it."""


class _WatchedHook:
    """A hook of the script that is given views of what its module takes and returns.

    Args:
        func: the script's hook.
        name: the module's name.
        seen: gets the module's name, the place of the hook and a mark for each view.
    """

    def __init__(self, func: Any, name: str, seen: list[tuple[str, str, ReferenceType[_Mark]]]) -> None:
        self.func, self._name, self._seen = func, name, seen

    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        """Call the script's hook, which takes the module and ``rest``; return its result."""
        if not torch.is_grad_enabled():
            return self.func(module, *rest)
        marks = list[ReferenceType[_Mark]]()
        result = self.func(module, *tree_map(lambda value: _marked(value, marks), rest))
        if result is None:
            self._seen += [(self._name, _place(self.func), mark) for mark in marks]
        return result


def _marked(value: Any, marks: list[ReferenceType[_Mark]]) -> Any:
    """Return a view of a tensor that needs a gradient; its node holds a mark, to which ``marks`` gets a reference."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    view, mark = value.view_as(value), _Mark()
    # The stubs of PyTorch call this property a method.
    made_by: Any = view.grad_fn
    made_by.metadata[_MARK] = mark
    marks.append(ref(mark))
    return view


def _is_of_script(hook: Any) -> bool:
    return hook_package(hook) not in ("tutti", "torch")


def _place(hook: Any) -> str:
    code = getattr(getattr(hook, "func", hook), "__code__", None)
    return type(hook).__name__ if code is None else f"{code.co_filename}:{code.co_firstlineno}"
