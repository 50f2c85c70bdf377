"""Selective activation checkpointing (SAC): recompute cheap operators in backward, save results of expensive ones.

Korthikanti et al. 2022, arXiv 2205.05198, section 5: norms, activation functions, dropout and the scores of attention
take most of the memory and few of the operations. Saved are products with weights, convolutions and fused attention.

``torch.utils.checkpoint.create_selective_checkpoint_contexts`` is similar, but raises an error where a saved tensor is
written in place (a ReLU in place behind a convolution), and where backward calls operators that forward has not called
(gathering parameters); here both are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tutti.errors import UsageError
from tutti.torch_compat import (
    FUSED_PRODUCTS,
    TorchDispatchMode,
    operator_arguments,
    tensor_version,
    tree_leaves,
    tree_map,
    version_counting_view,
)

_NAMES = ("mm", "addmm", "linear", "convolution", *FUSED_PRODUCTS)
_EXPENSIVE = {getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)}


def selective_checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two contexts for ``context_fn`` of ``torch.utils.checkpoint``: for a forward and for its recomputation.

    Expensive operators are matrix products, convolutions and fused attention without dropout. The pair serves one
    forward: make a new pair for each call of ``checkpoint``.

    Returns:
        ``(forward, recomputation)``: the first context saves results of expensive operators; the second reuses them in
        place of computing them again.

    Raises:
        UsageError: in the second context, the expensive operators that recomputation calls differ from those of the
            forward: in kind, in number, or in the shapes of their tensors.
    """
    kept: list[_Kept] = []
    return _First(kept), _Second(kept)


class _Kept:
    """A call of an expensive operator: its result, valid until it is written in place, and its arguments' shapes."""

    def __init__(self, function: Any, shapes: list[torch.Size], result: Any) -> None:
        self.function, self.shapes, self.result = function, shapes, result
        self._versions = _versions(result)

    def is_untouched(self) -> bool:
        return self.result is not None and self._versions == _versions(self.result)


class _First(TorchDispatchMode):
    """Save the results of expensive operators in the order of their calls."""

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EXPENSIVE and not function_draws(func, args, kwargs or {}):
            self._kept.append(_Kept(func, _shapes(args), tree_map(_without_graph, result)))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        # A result that was written in place is recomputed, and its memory is freed.
        for entry in self._kept:
            if not entry.is_untouched():
                entry.result = None


class _Second(TorchDispatchMode):
    """Return the saved results instead of calling expensive operators. Can be entered several times.

    Results are matched by the order of calls, so recomputation must call the same expensive operators on tensors of
    the same shapes, and equally often: an additional call would silently shift every later result.

    Raises:
        UsageError: recomputation calls another expensive operator than the forward, or another number of them.
    """

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __enter__(self) -> _Second:
        self._left: Iterator[_Kept] = iter(self._kept)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[:1] == (None,) and next(self._left, None) is not None:
            raise _differs("fewer matrix products and convolutions")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _EXPENSIVE and not function_draws(func, args, kwargs or {}):
            entry = next(self._left, None)
            if entry is None:
                raise _differs(f"{func} once more")
            if entry.function is not func or entry.shapes != _shapes(args):
                raise _differs(f"{func} on {_shapes(args)} in place of {entry.function} on {entry.shapes}")
            if entry.is_untouched():
                return entry.result
        return func(*args, **(kwargs or {}))


def function_draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an expensive operator draws random numbers, so that its result must not be saved.

    Recomputation would skip the call, and so shift later draws. True if the operator has an argument ``dropout_p``, as
    fused attention has, and it is above 0 in this call.

    Args:
        func: the ATen operator, an ``OpOverload``.
        args, kwargs: positional and keyword arguments of the call.
    """
    for place, argument in enumerate(operator_arguments(func)):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return False


def _shapes(args: tuple[Any, ...]) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]


def _differs(what: str) -> UsageError:
    return UsageError(
        f"activation checkpointing: recomputing a module in backward calls {what}",
        why="kept results belong to the calls of the first forward, in their order",
        remedy="let the module's forward call the same functions each time; or leave the module out: "
        "activation_checkpointing=[names or classes], or take blocks in place of selective",
    )


def _versions(result: Any) -> list[int]:
    return [tensor_version(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _without_graph(leaf: Any) -> Any:
    """Return a view without autograd graph that shares the tensor's version counter; other values as they are."""
    return version_counting_view(leaf) if isinstance(leaf, Tensor) else leaf
