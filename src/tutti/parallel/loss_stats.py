"""Loss sums of a rank, step statistics of all ranks, gradient normalisation, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tutti.errors import UsageError
from tutti.parallel.ddp.buckets import METRICS, ReducedSums
from tutti.parallel.ddp.reducers import scale_all, squares_of
from tutti.types import GradientVariance, LossSums, StepContext, StepStats


class LossCounter:
    """Accumulates the loss sums of this rank's logical workers in the current step."""

    def __init__(self) -> None:
        self._totals: LossSums | None = None
        self._names: tuple[str, ...] = ()

    def add(self, part: LossSums | None) -> None:
        """Add a worker's loss sums; None: it had no samples. Raises UsageError as ``note``."""
        if part is not None:
            self.note(part)
            self._totals = self.together(part)

    def note(self, part: LossSums) -> None:
        """Keep the metrics' names. Raises UsageError for more than ``METRICS`` metrics."""
        if len(part.names) > METRICS:
            raise UsageError(f"the loss function reports {len(part.names)} metrics", remedy=f"at most {METRICS}")
        self._names = part.names

    def together(self, part: LossSums | None) -> LossSums | None:
        """Return the loss sums so far plus ``part``, without adding it; None where ``part`` is None."""
        return part if self._totals is None or part is None else self._totals + part

    def take(self) -> Tensor | None:
        """Return ``LossSums.sums`` of all workers, None where no worker had samples, and reset for the next step."""
        totals, self._totals = self._totals, None
        return None if totals is None else totals.sums

    def means(self, metrics: Sequence[float], count: float) -> dict[str, float]:
        """Return the mean of each metric by name, from its sum over ``count``."""
        return {name: value / count for name, value in zip(self._names, metrics, strict=False)}

    def stats(
        self, sums: ReducedSums, norm: float, finite: bool, stop: bool, spread: GradientVariance | None = None
    ) -> StepStats:
        """Return the step statistics from sums over all ranks.

        Args:
            sums: loss sums over all ranks.
            norm: of the whole gradient, before clipping.
            finite: whether the whole gradient is finite.
            stop: whether any rank asks to stop.
            spread: sizes of the workers' own gradients; None where they are not measured.
        """
        count = sums.samples or math.nan
        return StepStats(sums.loss / count, sums.samples, self.means(sums.metrics, count), norm, finite, stop, spread)


def share_of_batch(sums: ReducedSums, step_context: StepContext) -> float:
    """Return the factor that turns the summed gradient into the mean over the loss's own count.

    Backward weights a sample by 1 / samples of the global batch. The loss may count something else (tokens), or the
    caller may use a batch of another size. With one micro-batch as the whole batch the factor is 1, because its
    backward starts at the final scale.
    """
    if step_context.whole:
        return 1.0
    return step_context.samples / sums.samples if sums.samples else 1.0


def own_mean(gradients: Sequence[Tensor], part: LossSums, loss_scale: float) -> float:
    """Scale a worker's own gradient in place to the mean over its loss's count (samples, tokens).

    Args:
        gradients: the worker's gradients.
        part: the worker's loss sums.
        loss_scale: divisor for the loss scale that the gradients contain.

    Returns:
        The norm of the scaled gradient.
    """
    count = float(part.sums[1])
    factor = (part.samples / count if count and not part.whole else 1.0) / loss_scale
    if factor != 1.0:
        scale_all(gradients, factor)
    return math.sqrt(sum(squares_of(gradients)))


def clipped(norm: float, largest: float | None) -> tuple[float, float]:
    """Return the factor that clips a gradient as ``torch.nn.utils.clip_grad_norm_`` does, and the norm afterwards.

    >>> clipped(0.5, 1.0), clipped(2.0, None)
    ((1.0, 0.5), (1.0, 2.0))
    """
    if largest is None or norm <= largest:
        return 1.0, norm
    factor = largest / (norm + 1e-6)
    return factor, norm * factor
