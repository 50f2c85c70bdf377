"""Loss sums of a rank, and step statistics of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tutti.errors import UsageError
from tutti.parallel.ddp.buckets import METRICS, ReducedSums
from tutti.types import GradientVariance, LossSums, StepStats


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
