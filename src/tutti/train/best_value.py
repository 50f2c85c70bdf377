"""The best value of a metric so far, for early stopping and best models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tutti.config.metric_direction import Metric


@dataclass
class BestValue:
    """Follows the values of a metric: the best so far, and how many in a row were not better.

    Attributes:
        metric: the metric and its direction.
        best: the best value; None before the first finite one.
        stale: number of values since the best.
    """

    metric: Metric
    best: float | None = None
    stale: int = 0

    def add(self, value: float) -> bool:
        """Add a value, and return whether it is better than all before; NaN and infinity never are.

        >>> values = BestValue(Metric("loss", higher=False))
        >>> [values.add(value) for value in (2.0, 1.0, 1.0, float("nan"))], values.best, values.stale
        ([True, True, False, False], 1.0, 2)
        """
        better = math.isfinite(value) and (self.best is None or self.metric.gain(self.best, value) > 0)
        if better:
            self.best = value
        self.stale = 0 if better else self.stale + 1
        return better

    def exhausted(self, patience: int) -> bool:
        """Return whether none of the last ``patience`` values was better than the best before them."""
        return self.stale >= patience
