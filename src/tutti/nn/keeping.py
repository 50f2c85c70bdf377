"""Selective activation checkpointing: what is cheap is computed again in backward, what is expensive is kept.

Korthikanti et al. 2022, arXiv 2205.05198, section 5: norms, activation functions, dropout and the scores of attention
take most of the memory and few of the operations. Kept are products with weights, convolutions and fused attention.

``torch.utils.checkpoint.create_selective_checkpoint_contexts`` does the like, but ends with an error where a tensor
that it keeps is written into (a ReLU in place behind a convolution), and where backward calls what forward has not
(gathering parameters); here both are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_NAMES = (
    *("mm", "addmm", "linear", "convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"),
)
_EXPENSIVE = {getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)}


def keeping() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """One context for a forward and one for the same forward again, which finds there what the first has kept."""
    kept: list[_Kept | None] = []
    return _First(kept), _Second(kept)


class _Kept(NamedTuple):
    """What a function has given, and how often each tensor had been written into by then."""

    function: Any
    result: Any
    versions: list[int]

    def is_untouched(self) -> bool:
        return self.versions == _versions(self.result)


class _First(TorchDispatchMode):
    """Notes the results of expensive functions in the order of their calls."""

    def __init__(self, kept: list[_Kept | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EXPENSIVE and not draws(func, args, kwargs or {}):
            own = tree_map(_without_graph, result)
            self._kept.append(_Kept(func, own, _versions(own)))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        # What was written into since is not what the function gave: its memory is free, and it is computed again.
        self._kept[:] = [entry if entry and entry.is_untouched() else None for entry in self._kept]


class _Second(TorchDispatchMode):
    """Gives the noted results in place of calling expensive functions; any number of times."""

    def __init__(self, kept: list[_Kept | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __enter__(self) -> _Second:
        self._left: Iterator[_Kept | None] = iter(self._kept)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _EXPENSIVE and not draws(func, args, kwargs or {}):
            entry = next(self._left, None)
            if entry is not None and entry.function is func and entry.is_untouched():
                return entry.result
        return func(*args, **(kwargs or {}))


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function draws random numbers: left out, it would leave the stream where later draws do not belong."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return False


def _versions(result: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _without_graph(leaf: Any) -> Any:
    """A view of a tensor that counts with it how often it is written into, and holds nothing of autograd's graph."""
    if isinstance(leaf, Tensor):
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return leaf.detach()
    return leaf
