"""A model's own forward, run on this rank's heads or features though it speaks of all of them.

Code such as ``x.view(samples, positions, heads, width // heads)`` names sizes of the whole. Within ``Local`` what comes
out of a split layer is smaller, and sizes that do not fit are cut down in the one place where that was seen to be right
when the plan was made; dropout draws for all heads or features and takes this rank's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tutti.errors import UsageError
from tutti.nn.heads import attend
from tutti.nn.parallel import Divided
from tutti.nn.slices import Slice, dropped

VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
SPLITS = (Tensor.split, torch.split)
DROPOUTS = (functional.dropout, torch.dropout)
ATTENTION = functional.scaled_dot_product_attention


class Local(TorchFunctionMode):
    """One forward.

    Args:
        slice_: of heads or features.
        width: features of all heads together.
        sizes: for each view whose size does not fit, which of its sizes to cut down.
        draws: for each call of dropout or attention the dimension that is split, from the last one; 0 where none is.
    """

    drops = True

    def __init__(self, slice_: Slice, width: int, sizes: Sequence[int], draws: Sequence[int]) -> None:
        super().__init__()
        self.slice_, self.width, self.sizes, self.draws = slice_, width, list(sizes), list(draws)
        self.viewed = self.drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in VIEWS:
            args = self._view(*args)
        elif func in SPLITS:
            args, kwargs = self._split(*args, **kwargs)
        elif func in DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        elif func is ATTENTION:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def cut(self, have: int, sizes: list[int]) -> int:
        """Which of the sizes of a view is too large."""
        if self.viewed >= len(self.sizes) or not self.sizes[self.viewed] < len(sizes):
            self._refuse(f"a view of {have} numbers as {sizes}")
        return self.sizes[self.viewed]

    def dim(self, tensor: Tensor) -> int:
        """Which dimension of what dropout or attention is given is split, counted from the last; 0 for none."""
        if self.drawn >= len(self.draws):
            self._refuse("another call of dropout")
        return self.draws[self.drawn]

    def _view(self, tensor: Tensor, *rest: Any) -> tuple[Any, ...]:
        sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else list(rest)
        have = tensor.numel()
        if not all(type(size) is int for size in sizes) or -1 in sizes or math.prod(sizes) == have:
            return (tensor, *rest)
        index = self.cut(have, sizes)
        self.viewed += 1
        size, left = divmod(sizes[index] * have, math.prod(sizes))
        if left:
            self._refuse(f"a view of {have} numbers as {sizes}")
        sizes[index] = size
        return tensor, sizes

    def _split(self, tensor: Tensor, size: Any, dim: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        here = self.width * len(self.slice_.mine) // self.slice_.length
        length, parts = tensor.shape[dim], 0 if type(size) is int else len(size)
        if size == self.width and length in (2 * here, 3 * here):
            size = here
        elif parts and all(part == self.width for part in size) and length == parts * here:
            size = [here] * parts
        return (tensor, size, dim), {}

    def _dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ) -> Tensor:
        dim = self.dim(input)
        self.drawn += 1
        if not (training and train and self.drops) or p == 0.0:
            # Called all the same, for a block around this one that counts calls.
            kept: Tensor = functional.dropout(input, p, False)
            return kept
        if not dim:
            result: Tensor = functional.dropout(input, p, True, inplace)
            return result
        return dropped(input, p, dim, self.slice_)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        dim = self.dim(query)
        self.drawn += 1
        dropout_p = dropout_p if self.drops else 0.0
        if dropout_p == 0.0 or not dim:
            return ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        return attend(query, key, value, attn_mask, dropout_p, self.slice_, scale)[0]

    def _refuse(self, what: str) -> None:
        raise UsageError(
            f"the layer does {what}, which it did not when its plan was made",
            where=self.slice_.name,
            why="its code takes another way than before, and how to split that is not known",
            remedy=f"leave it whole: --strategy tensor:whole={self.slice_.name}",
        )


class Within(Divided):
    """A block whose forward runs on this rank's share of its heads or features."""

    tutti_local: tuple[int, Sequence[int], Sequence[int]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain block."""
        with Local(self.tutti_slice, *self.tutti_local):
            return super().forward(*args, **kwargs)


def run_within(module: nn.Module, width: int, sizes: Sequence[int], draws: Sequence[int]) -> None:
    """Note how the forward of a block that is a ``Within`` is to be run; see ``Local``."""
    module.tutti_local = (width, sizes, draws)  # type: ignore[assignment]
