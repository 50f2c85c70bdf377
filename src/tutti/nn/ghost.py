"""Ghost batch normalisation: statistics over few samples, whatever the batch.

Hoffer, Hubara, Soudry 2017, arXiv 1705.08741, Alg. 1. A batch is cut into ghosts of ``size`` consecutive samples, each
of which is normalised with its own mean and variance. Running statistics are the moving average over the ghosts in
order, (1 - η)ⁿ μ_run + Σ (1 - η)ⁿ⁻ⁱ η μᵢ for n of them: the result of normalising one after the other (the published
weights do not add up to one). Evaluation uses them, as plain batch norm does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tutti.device import widest_float
from tutti.errors import UsageError
from tutti.native import native_library
from tutti.native.ghost_sums import ghost_backward, ghost_forward
from tutti.nn.norms import BatchNormReplacement, replace_norms
from tutti.torch_compat import BatchNormBase

_NAMES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16"}
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def ghosts(samples: int, size: int, points: int) -> list[int]:
    """Cut a batch into ghost batches of consecutive samples, each normalised with its own statistics.

    The last ghost batch holds the samples that remain, at most ``size``. If that is a single sample with one point,
    whose channels have no variance, it joins the ghost batch before.

    Args:
        samples: samples in the batch.
        size: samples in a ghost batch.
        points: numbers a channel of one sample, such as height × width.

    Returns:
        Index of the first sample of each ghost batch, and ``samples`` at the end.

    >>> ghosts(10, 4, 9), ghosts(9, 4, 1), ghosts(3, 4, 1)
    ([0, 4, 8, 10], [0, 4, 9], [0, 3])
    """
    starts = list(range(0, samples, size))
    if len(starts) > 1 and (samples - starts[-1]) * points < 2:
        starts.pop()
    return [*starts, samples]


class GhostBatchNorm(BatchNormReplacement):
    """A batch norm that normalises each ghost batch, a run of ``size`` consecutive samples, by its own statistics.

    Parameters, buffers and names are those of the plain batch norm. Hoffer et al. 2017, arXiv 1705.08741, Algorithm 1.

    Args:
        plain: the batch norm to replace.
        size: samples in a ghost batch.

    Raises:
        UsageError: ``size`` is below 1.
    """

    def __init__(self, plain: BatchNormBase, size: int) -> None:
        if size < 1:
            raise UsageError(f"a ghost batch has {size} samples", remedy="give at least 1")
        super().__init__(plain)
        self.size = size

    def normalised(self, input: Tensor) -> Tensor:
        """Normalise each ghost batch (a run of ``size`` samples) by its own statistics; update the running statistics.

        Args:
            input: (samples, channels, …).

        Returns:
            The normalised input, in the same shape. In evaluation it is plain batch norm's result, by the running
            statistics or, without these, by those of the whole batch; for an input of one ghost batch it is plain batch
            norm's result, too.

        Raises:
            ValueError: ``input`` has fewer than two dimensions, or in training the whole batch has a single number a
                channel.
            UsageError: in training every ghost batch has a single number a channel, which has no variance.
        """
        self._check_input_dim(input)
        points = input[0, 0].numel() if len(input) else 0
        first = ghosts(len(input), self.size, points)
        if not self.training or len(first) <= 2:
            return BatchNormBase.forward(self, input)
        if self.size * points == 1:
            raise UsageError(
                "a ghost batch has 1 sample with a single number a channel",
                where=f"an input of shape {tuple(input.shape)}",
                why="a single number has no variance, so that every output would be the bias",
                remedy="give ghost batches at least 2 samples",
            )
        result, means, scales = normalise(input, self.weight, self.bias, first, self.eps)
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._track(means, scales, first, points)
        return result

    @torch.no_grad()
    def _track(self, means: Tensor, scales: Tensor, first: Sequence[int], points: int) -> None:
        """Update the running statistics with each ghost's, in order. ``means``, ``scales``: (ghosts, channels)."""
        dtype = widest_float(means.device)
        counts = torch.tensor([b - a for a, b in pairwise(first)], dtype=dtype) * points
        wide = means.to(dtype)
        variances = (scales.to(dtype) ** -2 - self.eps) * (counts / (counts - 1)).to(means.device)[:, None]
        number = len(counts)
        if self.momentum is None:
            # The mean over all ghosts so far; reading the counter on the host would break a compiled graph.
            seen = self.num_batches_tracked.to(dtype)  # type: ignore[union-attr]
            keep, share = seen / (seen + number), (1 / (seen + number)).expand(number)
        else:
            rate = self.momentum
            keep = (1 - rate) ** number
            weights = [rate * (1 - rate) ** later for later in reversed(range(number))]
            share = torch.tensor(weights, dtype=dtype, device=means.device)
        for running, values in ((self.running_mean, wide), (self.running_var, variances)):
            running.copy_(keep * running.to(dtype) + share @ values)  # type: ignore[union-attr]
        self.num_batches_tracked.add_(number)  # type: ignore[union-attr]

    def extra_repr(self) -> str:
        """Return the text that ``print(model)`` shows for this layer: batch norm's own options, and ``ghost=N``.

        N is the number of samples in a ghost batch, which is normalised by its own statistics.
        """
        return f"{super().extra_repr()}, ghost={self.size}"  # type: ignore[no-untyped-call]


def convert_ghost_batch_norm(model: nn.Module, size: int) -> nn.Module:
    """Replace every batch norm of ``model`` by a ``GhostBatchNorm``, in place; parameters and names are kept.

    A ``GhostBatchNorm`` normalises each run of ``size`` consecutive samples of a batch by the statistics of that run.

    Args:
        model: the model, converted in place.
        size: samples in a ghost batch, at least 1.

    Returns:
        ``model``, or its replacement where ``model`` is itself a batch norm.

    Raises:
        UsageError: the model has no batch norm, or ``size`` is below 1.
    """
    return replace_norms(model, lambda norm: GhostBatchNorm(norm, size))


def normalise(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, first: Sequence[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each ghost batch, a run of consecutive samples, by its own mean and biased variance.

    Gradients flow to input, weight and bias. For a contiguous or channels-last input on a CPU, of float32, float64 or
    bfloat16, the function runs compiled loops, or the same operations by PyTorch where there is no C++ compiler; for
    other inputs, and under ``torch.compile``, one PyTorch batch norm for each ghost batch.

    Args:
        input: (samples, channels, …).
        weight, bias: (channels,), factor and summand of the normalised values; None for 1 and 0.
        first: index of the first sample of each ghost batch, and the number of samples, as ``ghosts`` returns.
        eps: added to the variance.

    Returns:
        A tuple of three tensors: the normalised input in its shape; the means; and 1/√(variance + eps), both of shape
        (ghost batches, channels) and without gradient.
    """
    last = _channels_last(input)
    if last is None or torch.compiler.is_compiling():
        return _one_by_one(input, weight, bias, first, eps)
    result: tuple[Tensor, Tensor, Tensor] = _Ghosts.apply(input, weight, bias, tuple(first), eps, last)  # type: ignore[no-untyped-call]
    return result


def _one_by_one(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, first: Sequence[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``normalise`` by PyTorch's own kernels, a ghost at a time."""
    # split, not slices: the gradient of a slice is as large as the whole.
    pieces = input.split([high - low for low, high in pairwise(first)])
    parts = [torch.native_batch_norm(piece, weight, bias, None, None, True, 0.0, eps) for piece in pieces]
    means, scales = (torch.stack([part[i].detach() for part in parts]) for i in (1, 2))
    return torch.cat([part[0] for part in parts]), means, scales


class _Ghosts(torch.autograd.Function):
    """Run the compiled loops of ``ghost.cpp``, or ``ghost_sums.py`` without a compiler: bitwise the same result."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        first: tuple[int, ...],
        eps: float,
        last: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        scale, offset = (None if t is None else t.to(wide).contiguous() for t in (weight, bias))
        result = torch.empty_like(input)
        means = torch.empty(len(first) - 1, input.shape[1], dtype=wide)
        scales = torch.empty_like(means)
        shape = _shape(input, first, last)
        if kernels := _kernels(input.dtype):
            kernels[0](*map(_at, (input, result, scale, offset, means, scales)), eps, *shape)
        else:
            ghost_forward(_rows(input, last), _rows(result, last), scale, offset, means, scales, first, eps, last)
        ctx.save_for_backward(input, weight, means, scales)
        ctx.first, ctx.last = first, last
        ctx.mark_non_differentiable(means, scales)
        return result, means, scales

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, weight, means, scales = ctx.saved_tensors
        above = gradients[0]
        if torch.is_grad_enabled():
            # Double backward: PyTorch's own operations are differentiable again.
            return *_differentiable(input, weight, means, scales, above, ctx.first), None, None, None
        if above.stride() != input.stride() or above.dtype != input.dtype:
            above = torch.empty_like(input).copy_(above)
        below, by_weight, by_bias = torch.empty_like(input), torch.empty_like(means), torch.empty_like(means)
        scale = None if weight is None else weight.to(means.dtype).contiguous()
        tensors = (input, above, below, scale, means, scales, by_weight, by_bias)
        if kernels := _kernels(input.dtype):
            kernels[1](*map(_at, tensors), *_shape(input, ctx.first, ctx.last))
        else:
            x, dy, dx = (_rows(t, ctx.last) for t in (input, above, below))
            ghost_backward(x, dy, dx, scale, means, scales, by_weight, by_bias, ctx.first, ctx.last)
        if weight is None:
            return below, None, None, None, None, None
        return below, by_weight.sum(0).to(weight.dtype), by_bias.sum(0).to(weight.dtype), None, None, None


def _differentiable(
    input: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor, above: Tensor, first: Sequence[int]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return gradients of input, weight and bias that autograd can differentiate again, a ghost at a time."""
    sizes = [high - low for low, high in pairwise(first)]
    columns: tuple[list[Tensor], ...] = ([], [], [])
    for piece, slope, mean, scale in zip(input.split(sizes), above.split(sizes), means, scales, strict=True):
        given = (slope, piece, weight, None, None, mean, scale, True, 0.0, [True, weight is not None, True])
        for found, part in zip(columns, torch.ops.aten.native_batch_norm_backward(*given), strict=True):
            found.append(part)
    below, by_weight, by_bias = columns
    if weight is None:
        return torch.cat(below), None, None
    return torch.cat(below), torch.stack(by_weight).sum(0), torch.stack(by_bias).sum(0)


def _rows(tensor: Tensor, last: bool) -> Tensor:
    """View (samples, channels, …) as (samples, points, channels) if ``last``, else as (samples, channels, points)."""
    if tensor.dim() == 2:
        return tensor.unsqueeze(1 if last else 2)
    return tensor.movedim(1, -1).flatten(1, -2) if last else tensor.flatten(2)


def _shape(input: Tensor, first: Sequence[int], last: bool) -> tuple[Any, ...]:
    starts = (ctypes.c_int64 * len(first))(*first)
    points = input[0, 0].numel()
    return input.shape[1], points, len(first) - 1, starts, int(last), torch.get_num_threads()


def _channels_last(input: Tensor) -> bool | None:
    """Return whether the channel dimension has stride 1 (channels-last).

    None if the compiled loops do not take the tensor: not on the CPU, another dtype, empty, or neither contiguous nor
    channels-last.
    """
    if input.device.type != "cpu" or input.dtype not in _NAMES or not input.numel():
        return None
    if input.is_contiguous():
        return False
    moved = input.movedim(1, -1)
    return True if moved.is_contiguous() else None


@cache
def _kernels(dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the compiled forward and backward for ``dtype``; an empty tuple where they cannot be compiled."""
    library = native_library.library(Path(native_library.__file__).with_name("ghost.cpp"))
    if library is None:
        return ()
    forward, backward = (library[f"ghost_{way}_{_NAMES[dtype]}"] for way in ("forward", "backward"))
    shape: list[Any] = [_SIZE, _SIZE, _SIZE, _POINTER, _INT, _INT]
    forward.argtypes = [*[_POINTER] * 6, ctypes.c_double, *shape]
    backward.argtypes = [*[_POINTER] * 8, *shape]
    forward.restype = backward.restype = None
    return forward, backward


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
