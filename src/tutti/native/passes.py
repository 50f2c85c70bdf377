"""Passes over lists of tensors, the building blocks of layer-wise optimizers, with PyTorch's own operations.

A pass reads and writes whole lists of tensors, with a few scalar options for each tensor. An optimizer step is two
passes, with the layers' norms known in between. ``compiled_passes.py`` has the same passes as one loop each, with
bitwise the same results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tutti.torch_compat import (
    foreach_add_,
    foreach_div_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
    foreach_sub_,
)

Tensors = list[Tensor] | tuple[Tensor, ...]
Squares = list[tuple[float, float]]

# Constants of kernels.cpp; a piece consists of whole chunks.
_CHUNK, _SHORT, _LANES = 1 << 14, 1 << 10, 32
_PIECE = 1 << 16
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Decayed(NamedTuple):
    """Coefficients of one tensor's decayed gradient d = gradient·g + decay·w, with gradient g and weight w.

    Attributes:
        gradient: factor of g.
        decay: factor of w: L2 regularisation.
    """

    gradient: float
    decay: float


class Momentum(NamedTuple):
    """Coefficients of one tensor's update by SGD with momentum, with gradient g, momentum buffer b and weight w.

    d = gradient·g + decay·w; b ← keep·b + take·d; w ← w − (direct·d + buffered·b + shrink·w).

    Attributes:
        gradient, decay: factors of g and w in the decayed gradient d.
        keep, take: factors of b and d in the new buffer.
        direct, buffered, shrink: factors of d, of the new b and of w in what is subtracted from w.
    """

    gradient: float
    decay: float
    keep: float
    take: float
    direct: float
    buffered: float
    shrink: float


class AdamCoefficients(NamedTuple):
    """Coefficients of one tensor's new Adam moments m and v and update direction u, with gradient g and weight w.

    h = gradient·g; m ← keep1·m + take1·h; v ← keep2·v + take2·h²; u = scale1·m / (scale2·√v + eps) + decay·w.

    Attributes:
        gradient: factor of g.
        keep1, take1: factors of m and h in the new first moment.
        keep2, take2: factors of v and h² in the new second moment.
        scale1, scale2: factors of m and √v in the direction: bias corrections.
        eps: added to the denominator.
        decay: factor of w in the direction.
    """

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
    """Coefficients of one tensor's step by Adam's moments m and v, with weight w.

    u = scale1·m / (scale2·√v + eps) + decay·w; w ← w − (rate·u + shrink·w).

    Attributes:
        scale1, scale2: factors of m and √v in the direction u: bias corrections.
        eps: added to the denominator.
        decay: factor of w in the direction.
        rate, shrink: factors of u and of w in what is subtracted from w; ``shrink`` is decoupled weight decay.
    """

    scale1: float
    scale2: float
    eps: float
    decay: float
    rate: float
    shrink: float


class Passes(Protocol):
    """Protocol of loops over lists of tensors that compute the norms and updates of layer-wise optimizers.

    Implementations are compiled C++ loops and PyTorch's foreach operators. All lists of a call have equal length and
    order; tensors at one index have one shape. Arguments of the methods: ``params`` (w), ``grads`` (g), ``buffers``
    (b), ``firsts`` (m) and ``seconds`` (v), and ``options``, the coefficients of each tensor.
    """

    def squares(self, grads: Tensors) -> list[float]:
        """Compute the sum of squares, ‖g‖², of each tensor of a list.

        Called by optimizers that scale a layer's step by the norm of its gradient, such as NovoGrad.

        Args:
            grads: tensors, such as gradients.

        Returns:
            One Python float for each tensor, in the order of ``grads``.
        """

    def decayed_squares(self, params: Tensors, grads: Tensors, options: Sequence[Decayed]) -> Squares:
        """Return (‖w‖², ‖d‖²), sums of squares, of each tensor, with d = gradient·g + decay·w.

        Called by optimizers that scale a layer's step by norms, such as LARS, before the update. No tensor is written.

        Args:
            params: parameters (w).
            grads: gradients (g).
            options: the coefficients ``gradient`` and ``decay`` of each tensor.

        Returns:
            For each tensor (‖w‖², ‖d‖²) as two Python floats, in the order of ``params``.
        """

    def momentum(self, params: Tensors, grads: Tensors, buffers: Tensors | None, options: Sequence[Momentum]) -> None:
        """Update momentum buffers and parameters of SGD-like optimizers, such as LARS, in place.

        d = gradient·g + decay·w; b ← keep·b + take·d; w ← w − (direct·d + buffered·b + shrink·w).

        Args:
            params: parameters (w), updated in place.
            grads: gradients (g).
            buffers: momentum buffers (b), updated in place; None: as if ``buffered`` were 0.
            options: coefficients of each tensor, named as in the formula.
        """

    def adam_squares(
        self, params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamCoefficients]
    ) -> Squares:
        """Update Adam's moments in place and return (‖w‖², ‖u‖²) of each tensor; the parameters stay.

        The first half of a step of LAMB, which scales the update of a layer by both norms before ``adam_step``.

        h = gradient·g; m ← keep1·m + take1·h; v ← keep2·v + take2·h²; u = scale1·m / (scale2·√v + eps) + decay·w.

        Args:
            params: parameters (w).
            grads: gradients (g).
            firsts: first moments (m), updated in place.
            seconds: second moments (v), updated in place.
            options: coefficients of each tensor, named as in the formula.

        Returns:
            For each tensor the squared L2 norms (‖w‖², ‖u‖²) as two Python floats, in the order of ``params``.
        """

    def adam_step(self, params: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamStep]) -> None:
        """Update parameters in place by Adam's moments.

        The second half of a step of LAMB, after ``adam_squares``, with coefficients from the layers' norms.

        u = scale1·m / (scale2·√v + eps) + decay·w; w ← w − (rate·u + shrink·w).

        Args:
            params: parameters (w), updated in place.
            firsts: first moments (m).
            seconds: second moments (v).
            options: coefficients of each tensor, named as in the formula.
        """


class Foreach:
    """Norms and optimizer updates of lists of tensors by PyTorch's foreach operators, for any device, dtype and layout.

    The methods implement the protocol ``Passes``. Lists must not be empty, and all tensors of a call are on a CPU or
    all on accelerators.

    On an accelerator the norms of a whole list take one host sync. On a CPU the operations run over pieces of memory
    that fit into its cache, and give bitwise the results of ``kernels.cpp``: the same operations in the same order,
    each rounded by itself, and sums in the same order. They avoid operations that PyTorch may fuse, such as
    ``addcmul``.
    """

    def squares(self, grads: Tensors) -> list[float]:
        """Compute the sum of squares, ‖g‖², of each tensor by PyTorch's foreach operators.

        Args:
            grads: tensors, such as gradients; half precision is widened to float32.

        Returns:
            One Python float for each tensor, in the order of ``grads``.
        """
        return _sums(grads, ((rows, pieces) for rows, _, (pieces,) in _batches(grads, grads)))

    def decayed_squares(self, params: Tensors, grads: Tensors, options: Sequence[Decayed]) -> Squares:
        """Return (‖w‖², ‖d‖²), sums of squares, of each tensor, with d = gradient·g + decay·w, with foreach operators.

        Args:
            params: parameters (w).
            grads: gradients (g).
            options: the coefficients ``gradient`` and ``decay`` of each tensor.

        Returns:
            For each tensor (‖w‖², ‖d‖²) as two Python floats, in the order of ``params``.
        """
        decayed = (
            (rows, _added((g, [o.gradient for o in own]), (w, [o.decay for o in own])))
            for rows, own, (w, g) in _batches(options, params, grads)
        )
        return list(zip(self.squares(params), _sums(params, decayed), strict=True))

    def momentum(self, params: Tensors, grads: Tensors, buffers: Tensors | None, options: Sequence[Momentum]) -> None:
        """Update momentum buffers and parameters of SGD-like optimizers in place, with foreach operators.

        d = gradient·g + decay·w; b ← keep·b + take·d; w ← w − (direct·d + buffered·b + shrink·w).

        Args:
            params: parameters (w), updated in place.
            grads: gradients (g).
            buffers: momentum buffers (b), updated in place; None: as if ``buffered`` were 0.
            options: coefficients of each tensor, named as in the formula.
        """
        for _, own, (w, g, *buffer) in _batches(options, params, grads, *(() if buffers is None else (buffers,))):
            decayed = _added((g, [o.gradient for o in own]), (w, [o.decay for o in own]))
            for b in buffer:
                foreach_mul_(b, [o.keep for o in own])
                foreach_add_(b, foreach_mul(decayed, [o.take for o in own]))
            terms: list[tuple[Tensors, list[float]]] = [(decayed, [o.direct for o in own])]
            terms += [(b, [o.buffered for o in own]) for b in buffer]
            foreach_sub_(w, _added(*terms, (w, [o.shrink for o in own])))

    def adam_squares(
        self, params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamCoefficients]
    ) -> Squares:
        """Update Adam's moments in place by foreach operators and return (‖w‖², ‖u‖²) of each tensor; parameters stay.

        h = gradient·g; m ← keep1·m + take1·h; v ← keep2·v + take2·h²; u = scale1·m / (scale2·√v + eps) + decay·w.

        Args:
            params: parameters (w).
            grads: gradients (g).
            firsts: first moments (m), updated in place.
            seconds: second moments (v), updated in place.
            options: coefficients of each tensor, named as in the formula.

        Returns:
            For each tensor the squared L2 norms (‖w‖², ‖u‖²) as two Python floats, in the order of ``params``.
        """

        def directions() -> Iterator[tuple[Sequence[int], Tensors]]:
            for rows, own, (w, g, m, v) in _batches(options, params, grads, firsts, seconds):
                scaled = foreach_mul(g, [o.gradient for o in own])
                foreach_mul_(m, [o.keep1 for o in own])
                foreach_add_(m, foreach_mul(scaled, [o.take1 for o in own]))
                squares = foreach_mul(scaled, scaled)
                foreach_mul_(squares, [o.take2 for o in own])
                foreach_mul_(v, [o.keep2 for o in own])
                foreach_add_(v, squares)
                yield rows, _direction(w, m, v, own)

        found = _sums(params, directions())
        return list(zip(self.squares(params), found, strict=True))

    def adam_step(self, params: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamStep]) -> None:
        """Update parameters in place from Adam's moments, which stay as they are, with foreach operators.

        u = scale1·m / (scale2·√v + eps) + decay·w; w ← w − (rate·u + shrink·w).

        Args:
            params: parameters (w), updated in place.
            firsts: first moments (m).
            seconds: second moments (v).
            options: coefficients of each tensor, named as in the formula.
        """
        for _, own, (w, m, v) in _batches(options, params, firsts, seconds):
            step = (_direction(w, m, v, own), [o.rate for o in own])
            foreach_sub_(w, _added(step, (w, [o.shrink for o in own])))


def dense_format(tensor: Tensor) -> torch.memory_format | None:
    """Return the memory format in which the tensor's elements fill memory without gaps; None if there is none.

    A tensor that has one can be read as one vector.

    Args:
        tensor: a tensor of any number of dimensions.

    Returns:
        ``torch.contiguous_format``, ``torch.channels_last`` (4 dimensions) or ``torch.channels_last_3d`` (5
        dimensions).
    """
    if tensor.is_contiguous():
        return torch.contiguous_format
    other = _FORMATS.get(tensor.dim())
    return other if other is not None and tensor.is_contiguous(memory_format=other) else None


def _batches(options: Sequence[Any], *lists: Tensors) -> Iterator[tuple[Sequence[int], list[Any], list[list[Tensor]]]]:
    """Yield row indices, options and tensors to process at once: on a CPU, pieces of about ``_PIECE`` elements."""
    if lists[0][0].device.type != "cpu":
        yield range(len(options)), list(options), [list(column) for column in lists]
        return
    rows: list[int] = []
    pieces: list[tuple[Tensor, ...]] = []
    size = 0
    for row, tensors in enumerate(zip(*lists, strict=True)):
        for piece in zip(*map(_flat_pieces, tensors), strict=True) if _dense(tensors) else (tensors,):
            rows.append(row)
            pieces.append(piece)
            size += piece[0].numel()
            if size >= _PIECE:
                yield rows, [options[r] for r in rows], [list(column) for column in zip(*pieces, strict=True)]
                rows, pieces, size = [], [], 0
    if rows:
        yield rows, [options[r] for r in rows], [list(column) for column in zip(*pieces, strict=True)]


def _dense(tensors: Tensors) -> bool:
    """Whether all tensors are dense with equal strides, so that they can be read as parallel vectors."""
    return all(dense_format(t) is not None and t.stride() == tensors[0].stride() for t in tensors)


def _flat_pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor's elements in memory order, in pieces of at most ``_PIECE``."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.split(_PIECE) if len(flat) > _PIECE else (flat,)


def _sums(tensors: Tensors, batches: Iterable[tuple[Sequence[int], Tensors]]) -> list[float]:
    """Return the sum of squares of each row, whose pieces come in batches; half precision is widened first."""
    sums = [0.0] * len(tensors)
    shaped = tensors[0].device.type == "cpu"
    for rows, pieces in batches:
        for dtype in dict.fromkeys(_wide(piece) for piece in pieces):
            places = [i for i, piece in enumerate(pieces) if _wide(piece) == dtype]
            chosen = [pieces[i].to(dtype) for i in places]
            for i, squares in zip(places, (_shaped if shaped else _plain)(chosen), strict=True):
                for square in squares:
                    sums[rows[i]] += square
    return sums


def _plain(pieces: Tensors) -> list[list[float]]:
    """Return the sum of squares of each piece, in the device's own order of summation."""
    norms = foreach_norm(pieces, 2)
    at = norms[0].device
    return [[norm**2] for norm in torch.stack([n.to(at) for n in norms]).tolist()]


def _shaped(pieces: Tensors) -> list[list[float]]:
    """Return the sums of squares of each piece's chunks, in the summation order of ``kernels.cpp``.

    ``_LANES`` running sums over ``_SHORT`` elements in their own precision, added up in float64 over a chunk of
    ``_CHUNK``, then over the lanes. Zero padding changes nothing.
    """
    sizes = [piece.numel() for piece in pieces]
    shorts = [-(-size // _SHORT) for size in sizes]
    numbers = pieces[0].new_zeros(sum(shorts) * _SHORT)
    for piece, part in zip(pieces, numbers.split([count * _SHORT for count in shorts]), strict=True):
        part[: piece.numel()] = piece.reshape(-1)
    running = _in_order((numbers * numbers).view(sum(shorts), _SHORT // _LANES, _LANES)).double()
    each = _CHUNK // _SHORT
    chunks = [-(-count // each) for count in shorts]
    table = running.new_zeros(sum(chunks) * each, _LANES)
    for part, own in zip(table.split([n * each for n in chunks]), running.split(shorts), strict=True):
        part[: len(own)] = own
    lanes = _in_order(table.view(sum(chunks), each, _LANES))
    found = _in_order(lanes.unsqueeze(-1)).view(-1).tolist()
    return [found[end - count : end] for count, end in zip(chunks, accumulate(chunks), strict=True)]


def _in_order(numbers: Tensor) -> Tensor:
    """Sum (rows, terms, lanes) → (rows, lanes), term after term; no PyTorch reduction guarantees that order."""
    total = torch.zeros_like(numbers[:, 0])
    for term in numbers.unbind(1):
        total += term
    return total


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _added(*terms: tuple[Tensors, list[float]]) -> tuple[Tensor, ...]:
    """Return Σ factor · tensor, from the left. On a CPU no term is skipped: even 0 · x may set the sign of a zero."""
    tensors, factors = terms[0]
    total: tuple[Tensor, ...] = foreach_mul(tensors, factors)
    for tensors, factors in terms[1:]:
        if total[0].device.type == "cpu" or any(factors):
            foreach_add_(total, foreach_mul(tensors, factors))
    return total


def _roots(tensors: Tensors) -> tuple[Tensor, ...]:
    """Return √ of each tensor; on a CPU by NumPy, correctly rounded, which PyTorch's vectorised sqrt is not."""
    exact = (torch.float32, torch.float64)
    if tensors[0].device.type == "cpu" and all(t.dtype in exact for t in tensors):
        return tuple(torch.from_numpy(np.sqrt(t.numpy())) for t in tensors)
    roots: tuple[Tensor, ...] = foreach_sqrt(tensors)
    return roots


def _direction(
    params: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamCoefficients] | Sequence[AdamStep]
) -> tuple[Tensor, ...]:
    """Return u = scale1·m / (scale2·√v + eps) + decay·w."""
    below = _roots(seconds)
    foreach_mul_(below, [o.scale2 for o in options])
    foreach_add_(below, [o.eps for o in options])
    above: tuple[Tensor, ...] = foreach_mul(firsts, [o.scale1 for o in options])
    foreach_div_(above, below)
    foreach_add_(above, foreach_mul(params, [o.decay for o in options]))
    return above
