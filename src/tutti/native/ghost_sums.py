"""Fallback of ``ghost.cpp`` by PyTorch's operations, with bitwise the same results, for machines without a compiler.

Sums have the same order (stretches in the elements' own precision, added up in float64), products are not fused into
sums, and all other operations run one at a time, in the same order. Tensors are (samples, points, channels) if
channels come ``last``, else (samples, channels, points); ``first``: first sample of each ghost, and end of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# The constants SHORT and LANES of ghost.cpp.
_SHORT, _LANES = 256, 16


def ghost_forward(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor, scales: Tensor,
    first: Sequence[int], eps: float, last: bool,
) -> None:  # fmt: skip
    """Compute the forward of ghost batch norm: normalise each ghost batch by its own mean and variance.

    A ghost batch is a run of consecutive samples of the batch. By channel, y = (x - mean) / √(variance + eps) · weight
    + bias. The function uses PyTorch's operations on the CPU, and writes into ``y``, ``means`` and ``scales``.

    Args:
        x: input, (samples, points, channels) if ``last``, else (samples, channels, points); points are the numbers that
            a sample has in a channel, such as height × width.
        y: output, written; of the shape of ``x``.
        weight, bias: (channels,), or None for 1 and 0.
        means, scales: (ghost batches, channels), written: means and 1/√(variance + eps), with the biased variance;
            float64 if ``x`` is, else float32.
        first: number of ghost batches + 1 integers: the index of each ghost batch's first sample, then the number of
            samples.
        eps: added to the variance.
        last: whether channels are the last dimension.
    """
    for ghost, (low, high) in enumerate(pairwise(first)):
        here = x[low:high].to(means.dtype)
        # Shifted by one of the elements, so that the sums do not cancel.
        shift = (here[0, 0] if last else here[0, :, 0]).clone()
        moved = here - _wide(shift, last)
        a, b = _sums(moved, last), _sums(moved * moved, last)
        count = float(here.numel() // len(shift))
        variance = (b - a * a / count) / count
        variance = torch.where(variance > 0, variance, torch.zeros_like(variance)) + eps
        # PyTorch's own square root is not always rounded correctly.
        scale = (1 / torch.from_numpy(np.sqrt(variance.numpy()))).to(means.dtype)
        mean = (shift.double() + a / count).to(means.dtype)
        means[ghost], scales[ghost] = mean, scale
        factor = scale if weight is None else scale * weight
        offset = torch.zeros_like(scale) if bias is None else bias
        y[low:high] = (here - _wide(mean, last)) * _wide(factor, last) + _wide(offset, last)


def ghost_backward(
    x: Tensor, dy: Tensor, dx: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor, dweight: Tensor,
    dbias: Tensor, first: Sequence[int], last: bool,
) -> None:  # fmt: skip
    """Compute the gradients of ghost batch norm's input, weight and bias, with PyTorch's operations on the CPU.

    A ghost batch is a run of consecutive samples that is normalised by its own mean and variance. The function writes
    into ``dx``, ``dweight`` and ``dbias``.

    Args:
        x: the forward's input: (samples, points, channels) if ``last``, else (samples, channels, points); points are
            the numbers that a sample has in a channel, such as height × width.
        dy: gradient of the output, of the shape of ``x``.
        dx: gradient of the input, written; of the shape of ``x``.
        weight: (channels,), or None for 1.
        means, scales: (ghost batches, channels), means and 1/√(variance + eps), as the forward wrote them.
        dweight, dbias: (ghost batches, channels), written: each ghost batch's part of the gradients of weight and bias,
            which the caller sums over the ghost batches.
        first: number of ghost batches + 1 integers: the index of each ghost batch's first sample, then the number of
            samples.
        last: whether channels are the last dimension.
    """
    for ghost, (low, high) in enumerate(pairwise(first)):
        here, above = x[low:high].to(means.dtype), dy[low:high].to(means.dtype)
        mean, scale = means[ghost], scales[ghost]
        moved = here - _wide(mean, last)
        a, b = _sums(above, last), _sums(above * moved, last)
        count = float(here.numel() // len(mean))
        dbias[ghost] = a.to(means.dtype)
        dweight[ghost] = (b * scale.double()).to(means.dtype)
        factor = scale if weight is None else scale * weight
        plain, along = (a / count).to(means.dtype), (b / count).to(means.dtype) * scale * scale
        dx[low:high] = (above - _wide(plain, last) - moved * _wide(along, last)) * _wide(factor, last)


def _wide(channels: Tensor, last: bool) -> Tensor:
    return channels if last else channels[:, None]


def _sums(terms: Tensor, last: bool) -> Tensor:
    """Return the sum of one ghost's terms by channel, in float64."""
    return _sums_last(terms.reshape(-1, terms.shape[-1])) if last else _sums_first(terms)


def _sums_last(rows: Tensor) -> Tensor:
    """Sum (rows, channels) → (channels,): stretches of ``_SHORT`` rows, one row after the other."""
    stretches = -(-len(rows) // _SHORT)
    padded = rows.new_zeros(stretches * _SHORT, rows.shape[1])
    padded[: len(rows)] = rows
    # (terms, stretches, channels)
    return _in_order(_in_order(padded.view(stretches, _SHORT, -1).transpose(0, 1)).double())


def _sums_first(terms: Tensor) -> Tensor:
    """Sum (samples, channels, points) → (channels,): ``_LANES`` running sums, over whole samples or parts of one.

    Lanes are added up, one after the other, as soon as each has had ``_SHORT`` terms or more, and at the end.
    """
    samples, channels, points = terms.shape
    width = -(-points // _LANES)
    padded = terms.new_zeros(samples, channels, width * _LANES)
    padded[:, :, :points] = terms
    # (terms of a lane, channels, lanes) of all samples
    table = padded.view(samples, channels, width, _LANES).permute(0, 2, 1, 3).reshape(samples * width, channels, _LANES)
    ends, had, seen = [0], 0, 0
    for part in [min(_SHORT, width - begin) for begin in range(0, width, _SHORT)] * samples:
        had, seen = had + part, seen + part
        if had >= _SHORT:
            ends.append(seen)
            had = 0
    if had:
        ends.append(seen)
    longest = max(high - low for low, high in pairwise(ends))
    groups = table.new_zeros(longest, len(ends) - 1, channels, _LANES)
    for number, (low, high) in enumerate(pairwise(ends)):
        groups[: high - low, number] = table[low:high]
    # (groups, channels, lanes) → a group's lanes, one group after the other
    sums = _in_order(groups).double()
    return _in_order(sums.permute(0, 2, 1).reshape(-1, channels))


def _in_order(terms: Tensor) -> Tensor:
    """Sum over the first dimension, one term after the other; no PyTorch reduction guarantees that order."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    return total
