"""The passes over many tensors that layer-wise optimizers are made of, written with PyTorch's own operations.

A pass reads and writes whole lists of tensors; what differs between tensors are a few numbers each. An optimizer is
then two passes, with the layers' norms known in between. ``native.py`` has the same passes in one sweep each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]
Squares = list[tuple[float, float]]

_PIECE = 1 << 16
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Decayed(NamedTuple):
    """d = gradient·g + decay·w."""

    gradient: float
    decay: float


class Momentum(NamedTuple):
    """d = gradient·g + decay·w; b ← keep·b + take·d; w ← w − (direct·d + buffered·b + shrink·w)."""

    gradient: float
    decay: float
    keep: float
    take: float
    direct: float
    buffered: float
    shrink: float


class Adam(NamedTuple):
    """h = gradient·g; m ← keep1·m + take1·h; v ← keep2·v + take2·h²; u = scale1·m / (scale2·√v + eps) + decay·w."""

    gradient: float
    keep1: float
    take1: float
    keep2: float
    take2: float
    scale1: float
    scale2: float
    eps: float
    decay: float


class AdamStep(NamedTuple):
    """u = scale1·m / (scale2·√v + eps) + decay·w; w ← w − (rate·u + shrink·w)."""

    scale1: float
    scale2: float
    eps: float
    decay: float
    rate: float
    shrink: float


class Passes(Protocol):
    """One way to compute. Lists are of equal length and order; tensors of one place have one shape."""

    def squares(self, grads: Tensors) -> list[float]:
        """‖g‖² of each tensor."""

    def decayed_squares(self, params: Tensors, grads: Tensors, options: Sequence[Decayed]) -> Squares:
        """(‖w‖², ‖d‖²) of each tensor."""

    def momentum(self, params: Tensors, grads: Tensors, buffers: Tensors | None, options: Sequence[Momentum]) -> None:
        """Write ``buffers`` and ``params``; without buffers as if ``buffered`` were 0."""

    def adam_squares(
        self, params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[Adam]
    ) -> Squares:
        """Write the moments; (‖w‖², ‖u‖²) of each tensor."""

    def adam_step(self, params: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamStep]) -> None:
        """Write ``params``."""


class Foreach:
    """PyTorch's multi-tensor operations: any device, any dtype, any layout. One look at the device for all norms.

    On a CPU they go over pieces of memory that fit its cache, where each operation finds what the one before has left.
    """

    def squares(self, grads: Tensors) -> list[float]:
        return _sums(len(grads), ((rows, pieces) for rows, _, (pieces,) in _batches(grads, grads)))

    def decayed_squares(self, params: Tensors, grads: Tensors, options: Sequence[Decayed]) -> Squares:
        decayed = ((rows, _decayed(w, g, o)) for rows, o, (w, g) in _batches(options, params, grads))
        return list(zip(self.squares(params), _sums(len(params), decayed), strict=True))

    def momentum(self, params: Tensors, grads: Tensors, buffers: Tensors | None, options: Sequence[Momentum]) -> None:
        for _, own, (w, g, *buffer) in _batches(options, params, grads, *(() if buffers is None else (buffers,))):
            decayed = _decayed(w, g, own)
            for b in buffer:
                torch._foreach_mul_(b, [o.keep for o in own])
                torch._foreach_add_(b, torch._foreach_mul(decayed, [o.take for o in own]))
            _times(w, [1 - o.shrink for o in own])
            for b in buffer:
                torch._foreach_sub_(w, torch._foreach_mul(b, [o.buffered for o in own]))
            if any(o.direct for o in own):
                torch._foreach_mul_(decayed, [o.direct for o in own])
                torch._foreach_sub_(w, decayed)

    def adam_squares(
        self, params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[Adam]
    ) -> Squares:
        def directions() -> Iterator[tuple[Sequence[int], Tensors]]:
            for rows, own, (w, g, m, v) in _batches(options, params, grads, firsts, seconds):
                torch._foreach_mul_(m, [o.keep1 for o in own])
                torch._foreach_add_(m, torch._foreach_mul(g, [o.take1 * o.gradient for o in own]))
                torch._foreach_mul_(v, [o.keep2 for o in own])
                torch._foreach_addcmul_(v, g, g, [o.take2 * o.gradient**2 for o in own])
                u = torch._foreach_mul(w, [o.decay for o in own])
                torch._foreach_addcdiv_(u, m, _below(v, own), [o.scale1 for o in own])
                yield rows, u

        found = _sums(len(params), directions())
        return list(zip(self.squares(params), found, strict=True))

    def adam_step(self, params: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamStep]) -> None:
        for _, own, (w, m, v) in _batches(options, params, firsts, seconds):
            _times(w, [1 - o.shrink - o.rate * o.decay for o in own])
            torch._foreach_addcdiv_(w, m, _below(v, own), [-o.rate * o.scale1 for o in own])


def dense_format(tensor: Tensor) -> torch.memory_format | None:
    """The memory format in which this tensor and what belongs to it can be walked as one vector; None: in none."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    other = _FORMATS.get(tensor.dim())
    return other if other is not None and tensor.is_contiguous(memory_format=other) else None


def _batches(options: Sequence[Any], *lists: Tensors) -> Iterator[tuple[Sequence[int], list[Any], list[list[Tensor]]]]:
    """Rows, options and tensors to compute with at once: on a CPU pieces of about ``_PIECE`` elements in all."""
    if lists[0][0].device.type != "cpu":
        yield range(len(options)), list(options), [list(column) for column in lists]
        return
    rows: list[int] = []
    pieces: list[tuple[Tensor, ...]] = []
    size = 0
    for row, tensors in enumerate(zip(*lists, strict=True)):
        for piece in zip(*map(_flat_pieces, tensors), strict=True):
            rows.append(row)
            pieces.append(piece)
            size += piece[0].numel()
            if size >= _PIECE:
                yield rows, [options[r] for r in rows], [list(column) for column in zip(*pieces, strict=True)]
                rows, pieces, size = [], [], 0
    if rows:
        yield rows, [options[r] for r in rows], [list(column) for column in zip(*pieces, strict=True)]


def _flat_pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.numel() <= _PIECE or dense_format(tensor) is None:
        return (tensor,)
    pieces: tuple[Tensor, ...] = tensor.as_strided((tensor.numel(),), (1,)).split(_PIECE)
    return pieces


def _sums(count: int, batches: Iterable[tuple[Sequence[int], Tensors]]) -> list[float]:
    """Sum of squares of each of ``count`` rows, whose pieces come in batches; half precision is widened first."""
    sums = [0.0] * count
    for rows, pieces in batches:
        for dtype in dict.fromkeys(_wide(piece) for piece in pieces):
            places = [i for i, piece in enumerate(pieces) if _wide(piece) == dtype]
            norms = torch._foreach_norm([pieces[i] for i in places], 2, dtype)
            at = norms[0].device
            for i, norm in zip(places, torch.stack([n.to(at) for n in norms]).tolist(), strict=True):
                sums[rows[i]] += norm**2
    return sums


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _decayed(params: Tensors, grads: Tensors, options: Sequence[Decayed] | Sequence[Momentum]) -> tuple[Tensor, ...]:
    """gradient·g + decay·w."""
    decayed: tuple[Tensor, ...] = torch._foreach_mul(grads, [o.gradient for o in options])
    if any(o.decay for o in options):
        torch._foreach_add_(decayed, torch._foreach_mul(params, [o.decay for o in options]))
    return decayed


def _below(seconds: Tensors, options: Sequence[Adam] | Sequence[AdamStep]) -> tuple[Tensor, ...]:
    """scale2·√v + eps."""
    below: tuple[Tensor, ...] = torch._foreach_sqrt(seconds)
    torch._foreach_mul_(below, [o.scale2 for o in options])
    torch._foreach_add_(below, [o.eps for o in options])
    return below


def _times(tensors: Tensors, factors: Sequence[float]) -> None:
    if any(factor != 1 for factor in factors):
        torch._foreach_mul_(tensors, factors)
