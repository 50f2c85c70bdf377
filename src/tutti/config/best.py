"""The criterion of the best checkpoint: a held-out metric and its direction. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.config.metric_direction import Direction, Metric
from tutti.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Best:
    """The criterion that ``--keep-best`` names.

    Attributes:
        metric: a value of the evaluation: ``loss``, or a metric that the loss function returns.
        more: whether a higher value is better.
    """

    metric: str
    more: bool

    @classmethod
    def parse(cls, text: str, option: str = "--keep-best", declared: Mapping[str, Direction] | None = None) -> Best:
        """Parse ``NAME``, ``NAME:min`` or ``NAME:max``; ``lower`` and ``higher`` are synonyms of ``min`` and ``max``.

        >>> Best.parse("accuracy"), Best.parse("distance:min")
        (Best(metric='accuracy', more=True), Best(metric='distance', more=False))

        Args:
            text: the criterion.
            option: its option, for the error.
            declared: directions of metrics by name, for a criterion without one.

        Raises:
            UsageError: ``text`` is malformed, or neither it nor ``declared`` nor the metric's name gives a direction.
        """
        metric = Metric.parse(text, option, declared)
        return cls(metric.name, metric.higher)

    def check(self, values: Mapping[str, float]) -> None:
        """Raise UsageError, naming the nearest metric, if evaluations do not report that of ``--keep-best``.

        Args:
            values: the evaluation's loss and metrics by name.
        """
        if self.metric not in values:
            raise UsageError(
                f"the evaluation has no '{self.metric}' to keep the best by",
                where="--keep-best",
                remedy=did_you_mean(self.metric, values),
            )

    def score(self, facts: Mapping[str, Any]) -> float | None:
        """Return a checkpoint's score by the metric of ``--keep-best``, negated where lower is better.

        Args:
            facts: facts of the checkpoint's manifest; ``facts["eval"]`` has the held-out values of its step by name.

        Returns:
            The score, higher is better; None if the step was not evaluated, or without this metric as a number.
        """
        values = facts.get("eval")
        value = values.get(self.metric) if isinstance(values, dict) else None
        if not isinstance(value, int | float):
            return None
        return value if self.more else -value
