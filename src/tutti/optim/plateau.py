"""State of the schedule ``plateau``, which lowers the learning rate once evaluations stop improving. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tutti.config.metric_direction import Metric
from tutti.config.optimizer_config import PlateauSchedule


class Plateau:
    """Factor on the initial learning rates that evaluations lower: the rule of ``ReduceLROnPlateau``.

    An evaluation is better if it improves on the best value by more than the threshold. Each reduction multiplies the
    factor, down to the least one, and is left out if it would lower the factor by no more than ``eps``.

    Args:
        config: options of the schedule.
        metric: the held-out metric that the schedule follows, and its direction; also an attribute.

    Attributes:
        factor: factor on the initial learning rates, 1 before the first reduction.

    >>> plateau = Plateau(PlateauSchedule(patience=1), Metric("loss", higher=False))
    >>> [plateau.evaluated(loss) for loss in (2.0, 1.0, 1.0, 1.5)], plateau.factor
    ([False, False, False, True], 0.1)
    """

    def __init__(self, config: PlateauSchedule, metric: Metric) -> None:
        self.metric, self.factor = metric, 1.0
        self._config = config
        self._best = -math.inf if metric.higher else math.inf
        self._bad = self._cooldown = 0

    def evaluated(self, value: float) -> bool:
        """Take the result of an evaluation, and return whether it lowers the attribute ``factor``.

        Called on every rank after each evaluation during the run. After more than ``patience`` evaluations in a row
        without a better value, ``factor`` is multiplied by the option ``factor``, but not below the option ``min``; the
        ``cooldown`` evaluations after that do not count. Not collective: every rank must pass the same value, so that
        all use the same rates.

        Args:
            value: the metric's held-out value; NaN is never better.
        """
        if self._is_better(value):
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooldown:
            self._cooldown, self._bad = self._cooldown - 1, 0
        if self._bad <= self._config.patience:
            return False
        before, lower = self.factor, max(self.factor * self._config.factor, self._config.min)
        if before - lower > self._config.eps:
            self.factor = lower
        self._cooldown, self._bad = self._config.cooldown, 0
        return self.factor < before

    def _is_better(self, value: float) -> bool:
        config, sign = self._config, 1 if self.metric.higher else -1
        if config.threshold_mode == "rel":
            wanted = self._best * (1 + sign * config.threshold)
        else:
            wanted = self._best + sign * config.threshold
        return value > wanted if self.metric.higher else value < wanted

    def state(self) -> dict[str, Any]:
        """Return the plateau's state as a JSON value for a checkpoint; ``load`` restores it.

        Returns:
            A dict with ``metric`` (a dict: its name and direction), ``factor`` (on the initial learning rates),
            ``best`` (the best value, None before the first), ``bad`` (number of evaluations since without a better
            value) and ``cooldown`` (number of evaluations that are not yet counted).
        """
        best = self._best if math.isfinite(self._best) else None
        metric = asdict(self.metric)
        return {"metric": metric, "factor": self.factor, "best": best, "bad": self._bad, "cooldown": self._cooldown}

    def load(self, saved: Mapping[str, Any]) -> bool:
        """Restore the plateau's state from a checkpoint, if it was saved for the same metric.

        Args:
            saved: the result of ``state``.

        Returns:
            True if the state was loaded; False if it was saved for another metric or direction, and nothing was loaded.
        """
        if saved["metric"] != asdict(self.metric):
            return False
        self.factor, self._bad, self._cooldown = float(saved["factor"]), int(saved["bad"]), int(saved["cooldown"])
        if saved["best"] is not None:
            self._best = float(saved["best"])
        return True
