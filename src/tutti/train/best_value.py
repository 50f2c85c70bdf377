"""The best value of a metric so far, for early stopping and best models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tutti.config.metric_direction import Metric


@dataclass
class BestValue:
    """Tracks the best value of a metric so far, and how many values in a row were not better.

    Attributes:
        metric: name of the metric, and whether higher or lower is better.
        best: the best value; None before the first finite value.
        stale: number of values added since the best value.
    """

    metric: Metric
    best: float | None = None
    stale: int = 0

    def add(self, value: float) -> bool:
        """Record a new value of a metric, and return True if it is better than all values recorded before.

        The first finite value is better; NaN and infinity never are. Updates ``best`` (the best value) and ``stale``
        (number of values since the best one).

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
        """Return True if at least ``patience`` values of the metric in a row have not improved on the best value.

        Args:
            patience: number of values without an improvement.
        """
        return self.stale >= patience
