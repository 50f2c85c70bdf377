"""Loss sums of a rank, and step statistics of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tutti.errors import UsageError
from tutti.parallel.ddp.buckets import METRICS, ReducedSums
from tutti.types.micro_batch import LossSums
from tutti.types.step_records import GradientVariance, StepStats


class LossCounter:
    """Adds up the loss sums of this rank's logical workers in one step: sums of the loss, of its count and of metrics.

    A logical worker is a share of the global batch. The count is of samples or tokens, as the loss function returns it.
    """

    def __init__(self) -> None:
        self._totals: LossSums | None = None
        self._names: tuple[str, ...] = ()

    def add(self, part: LossSums | None) -> None:
        """Add a logical worker's loss sums to this rank's total of the step.

        A logical worker is one of N fixed shares of the global batch; a rank computes one or more.

        Args:
            part: sums of loss, count and metrics; None if the worker had no samples: then the total stays.

        Raises:
            UsageError: the loss function reports more than ``METRICS`` (6) metrics.
        """
        if part is not None:
            self.note(part)
            self._totals = part if self._totals is None else self._totals + part

    def note(self, part: LossSums) -> None:
        """Record the names of the loss function's metrics from one logical worker's loss sums; nothing is added up.

        ``means`` and ``stats`` return the metrics under these names.

        Args:
            part: loss sums of a logical worker (share of the global batch), with the metrics' names.

        Raises:
            UsageError: the loss function reports more than ``METRICS`` (6) metrics, for which the messages have no
                room.
        """
        if len(part.names) > METRICS:
            raise UsageError(f"the loss function reports {len(part.names)} metrics", remedy=f"return at most {METRICS}")
        self._names = part.names

    def take(self) -> Tensor | None:
        """Return this rank's loss sums of the step, added up over its logical workers, and reset them. Not collective.

        Returns:
            Float tensor ``[loss_sum, count, *metric_sums]``; None where none of this rank's logical workers (shares of
            the global batch) had samples.
        """
        totals, self._totals = self._totals, None
        return None if totals is None else totals.sums

    def means(self, metrics: Sequence[float], count: float) -> dict[str, float]:
        """Return the mean of each metric of the loss function: its sum divided by the count.

        The names of the metrics are those of the last call of ``add`` or ``note``.

        Args:
            metrics: sums of the metrics, in the order of the loss function's dict; further entries are ignored.
            count: number of samples or tokens in the sums, not 0.

        Returns:
            The mean of each metric, a Python float, by the name that the loss function gives it.
        """
        return {name: value / count for name, value in zip(self._names, metrics, strict=False)}

    def stats(
        self, sums: ReducedSums, norm: float, finite: bool, stop: bool, variance: GradientVariance | None = None
    ) -> StepStats:
        """Build the statistics of a step from sums over all ranks: means of loss and metrics over the global count.

        Args:
            sums: loss, count (samples or tokens) and metrics, summed over all ranks; with a count of 0 the loss is NaN.
            norm: L2 norm of the whole gradient, before clipping.
            finite: whether the whole gradient is finite.
            stop: whether any rank asks to stop.
            variance: mean of the squared L2 norms of the gradients of the logical workers (fixed shares of the global
                batch), each over its own samples, and their number; None where it is not measured.

        Returns:
            A ``StepStats``: ``loss``, the mean over ``count``; ``metrics``, means by name; and the arguments ``norm``
            (as ``grad_norm``), ``finite``, ``stop`` and ``variance`` (as ``gradient_variance``) as they are.
        """
        count = sums.samples or math.nan
        return StepStats(sums.loss / count, sums.samples, self.means(sums.metrics, count), norm, finite, stop, variance)
