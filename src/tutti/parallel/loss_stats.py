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
        """Add a worker's loss sums to the total of this step.

        Args:
            part: None if the worker had no samples; nothing is added then.

        Raises:
            UsageError: the loss function reports more than ``METRICS`` metrics.
        """
        if part is not None:
            self.note(part)
            self._totals = self.together(part)

    def note(self, part: LossSums) -> None:
        """Record the metrics' names of ``part`` for ``means``; its sums are not added.

        Raises:
            UsageError: the loss function reports more than ``METRICS`` metrics, for which the messages have no room.
        """
        if len(part.names) > METRICS:
            raise UsageError(f"the loss function reports {len(part.names)} metrics", remedy=f"at most {METRICS}")
        self._names = part.names

    def together(self, part: LossSums | None) -> LossSums | None:
        """Return the step's loss sums so far plus ``part``, without adding it to them; None where ``part`` is None."""
        return part if self._totals is None or part is None else self._totals + part

    def take(self) -> Tensor | None:
        """Return the total of this step, and reset it for the next one.

        Returns:
            Float tensor ``[loss_sum, count, *metric_sums]``; None where no worker had samples.
        """
        totals, self._totals = self._totals, None
        return None if totals is None else totals.sums

    def means(self, metrics: Sequence[float], count: float) -> dict[str, float]:
        """Return the mean of each metric, by its name from the loss function.

        Args:
            metrics: sums in the order of the names; further entries are ignored.
            count: number of samples or tokens in the sums.
        """
        return {name: value / count for name, value in zip(self._names, metrics, strict=False)}

    def stats(
        self, sums: ReducedSums, norm: float, finite: bool, stop: bool, spread: GradientVariance | None = None
    ) -> StepStats:
        """Build the statistics of a step from sums over all ranks: means of loss and metrics over the global count.

        Without any count the loss is NaN.

        Args:
            sums: loss sums over all ranks.
            norm: of the whole gradient, before clipping.
            finite: whether the whole gradient is finite.
            stop: whether any rank asks to stop.
            spread: mean square of the workers' own gradients; None where it is not measured.
        """
        count = sums.samples or math.nan
        return StepStats(sums.loss / count, sums.samples, self.means(sums.metrics, count), norm, finite, stop, spread)
