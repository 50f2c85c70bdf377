"""What a gradient is divided by, clipped to, and whether it is finite: the same rules for every strategy.

Backward weights each sample by 1 / samples of the global batch and multiplies by the loss scale. The loss may count
something else than samples (tokens), and the number of samples may differ from the contract's. Each strategy therefore
multiplies its gradient by a factor once, after summing; the factors are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tutti.parallel.ddp.buckets import values_of
from tutti.parallel.ddp.gradient_arithmetic import scale_all, squares_of
from tutti.types.micro_batch import LossSums
from tutti.types.step_records import StepContext


def divisor_of_backward(step_context: StepContext) -> float:
    """Return the number by which backward has divided the sum of the samples' losses in this step.

    This is the number of samples of the global batch. Where one micro-batch is the whole batch, the result is 0: its
    backward has divided by the loss's own count (samples, tokens) already, and the gradient needs no further factor.

    Args:
        step_context: the step, of which ``samples`` and ``whole`` are read.
    """
    return 0.0 if step_context.whole else float(step_context.samples)


def mean_factor(divisor: float, counted: float) -> float:
    """Return the factor that scales the summed gradient of a global batch to the mean over its samples or tokens.

    Args:
        divisor: number of samples by which backward has divided the loss; 0 if backward has divided by the count (see
            ``divisor_of_backward``).
        counted: sum of the loss's counts (samples, tokens) over the global batch.

    Returns:
        ``divisor / counted``; 1 if either is 0.

    >>> mean_factor(8, 32), mean_factor(0, 32), mean_factor(8, 0)
    (0.25, 1.0, 1.0)
    """
    return divisor / counted if divisor and counted else 1.0


def own_mean(gradients: Sequence[Tensor], part: LossSums, loss_scale: float) -> float:
    """Scale one logical worker's gradient in place to the mean over its own samples or tokens, without loss scale.

    A logical worker is one of N fixed shares of the global batch. Backward has multiplied the loss by the loss scale,
    and divided it: for a single micro-batch (``part.whole``) by the loss function's count, such as tokens, else by the
    number of samples ``part.samples``.

    Args:
        gradients: the worker's gradients as backward has left them.
        part: the worker's loss sums, with its count.
        loss_scale: factor that the gradients contain, and by which they are divided.

    Returns:
        The L2 norm of the scaled gradient, a Python float. With a count of 0 the gradient is only divided by the loss
        scale.
    """
    factor = mean_factor(0.0 if part.whole else part.samples, float(part.sums[1])) / loss_scale
    if factor != 1.0:
        scale_all(gradients, factor)
    return math.sqrt(sum(squares_of(gradients)))


def own_sum(gradients: Sequence[Tensor], part: LossSums, loss_scale: float) -> None:
    """Turn a logical worker's gradient of the mean of its losses into the gradient of their sum, in place.

    A logical worker is one of N fixed shares of the global batch. Backward has multiplied the loss by the loss scale,
    and divided it: for a single micro-batch (``part.whole``) by the loss function's count, such as tokens, else by the
    number of samples ``part.samples``. This function multiplies by that divisor and divides by ``loss_scale``. The sum
    of all workers' results, divided by the global count, is then the gradient of the mean over the global batch.

    Args:
        gradients: gradient tensors of one worker, changed in place; may be empty.
        part: loss sum, count (such as tokens) and number of samples of this worker's micro-batches.
        loss_scale: factor on the loss in backward (mixed precision), which the gradients still contain.
    """
    size = float(part.sums[1]) or 1.0 if part.whole else part.samples
    scale_all(gradients, size / loss_scale)


def clipped(norm: float, largest: float | None) -> tuple[float, float]:
    """Return the factor that clips a gradient as ``torch.nn.utils.clip_grad_norm_`` does, and the norm afterwards.

    Args:
        norm: L2 norm of the gradient.
        largest: norm to clip to; a norm less than 1e-6 below it is scaled too, as in PyTorch. None for no clipping.

    Returns:
        The factor to multiply the gradient by, 1.0 without clipping, and the norm of the product.

    >>> clipped(0.5, 1.0), clipped(2.0, None)
    ((1.0, 0.5), (1.0, 2.0))
    """
    if largest is None:
        return 1.0, norm
    # A norm of ``largest``, or less than 1e-6 below it, is scaled too, as in PyTorch. NaN stays.
    factor = min(largest / (norm + 1e-6), 1.0)
    return factor, norm * factor


def clip_norm(norm: float, largest: float | None, scale: Callable[[float], None]) -> float:
    """Clip a gradient as ``torch.nn.utils.clip_grad_norm_`` does, and return its norm afterwards.

    Args:
        norm: L2 norm of the gradient.
        largest: largest norm that is not clipped; None for no clipping.
        scale: multiplies the gradient by a factor, in place; called only if the gradient is clipped.
    """
    factor, after = clipped(norm, largest)
    if factor != 1.0:
        scale(factor)
    return after


def finite_by_norm(norm: float, all_finite: Callable[[], bool] | None = None) -> bool:
    """Return whether a gradient is finite, by its norm; if the norm is not finite, the elements decide.

    A norm is also infinite if the squares of finite elements overflow. The elements are then looked at, which takes
    time and may be collective; a finite norm needs no such look.

    Args:
        norm: L2 norm of the gradient, or the sum of its squares or elements: a number that is finite only if all
            elements are.
        all_finite: called without arguments if ``norm`` is not finite; returns whether all elements are finite. None
            if the norm alone decides.

    >>> finite_by_norm(1.0), finite_by_norm(math.inf), finite_by_norm(math.inf, lambda: True)
    (True, False, True)
    """
    return math.isfinite(norm) or (all_finite is not None and all_finite())


def is_finite(gradient: Tensor | None) -> bool:
    """Return whether all elements of a gradient are finite; True if the gradient is None.

    Args:
        gradient: dense or sparse, on any device; of a sparse gradient the stored values count.
    """
    return gradient is None or bool(torch.isfinite(values_of(gradient)).all())


def nonfinite_names(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Return a list of the names of the gradients that have a NaN or an infinity, in the order given.

    Args:
        named: (name, gradient) pairs; a gradient of None counts as finite.
    """
    return [name for name, gradient in named if not is_finite(gradient)]
