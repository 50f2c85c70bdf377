"""The criterion of the best checkpoint: a held-out metric and its direction. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.config.metric_direction import Direction, Metric
from tutti.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class BestMetric:
    """The held-out metric by which ``--keep-best`` selects the best checkpoint, and its direction.

    Attributes:
        metric: a value of the evaluation: ``loss``, or a metric that the loss function returns.
        more: whether a higher value is better.
    """

    metric: str
    more: bool

    @classmethod
    def parse(
        cls, text: str, option: str = "--keep-best", declared: Mapping[str, Direction] | None = None
    ) -> BestMetric:
        """Parse ``--keep-best``, the metric that selects the best checkpoint: ``NAME``, ``NAME:min`` or ``NAME:max``.

        ``lower`` and ``higher`` are synonyms of ``min`` and ``max``, the better direction.

        >>> BestMetric.parse("accuracy"), BestMetric.parse("distance:min")
        (BestMetric(metric='accuracy', more=True), BestMetric(metric='distance', more=False))

        Args:
            text: the metric, with or without its direction.
            option: name of the option, which a UsageError states.
            declared: name of a metric → ``lower`` or ``higher``, the better values as the task declares them; used if
                ``text`` has no direction. None: the task declares nothing.

        Returns:
            A ``BestMetric``: ``metric``, the name, and ``more``, whether a higher value is better.

        Raises:
            UsageError: ``text`` is malformed, or none of ``text``, ``declared`` and the metric's name gives a
                direction. A name gives one if it ends in a word such as ``loss`` or ``accuracy``
                (``higher_is_better``).
        """
        metric = Metric.parse(text, option, declared)
        return cls(metric.name, metric.higher)

    def check(self, values: Mapping[str, float]) -> None:
        """Check that an evaluation has the metric of ``--keep-best``.

        Args:
            values: the evaluation's loss and metrics by name.

        Raises:
            UsageError: the metric is not among ``values``; the error names the nearest one.
        """
        if self.metric not in values:
            raise UsageError(
                f"the evaluation has no '{self.metric}' to keep the best by",
                where="--keep-best",
                remedy=did_you_mean(self.metric, values),
            )

    def score(self, facts: Mapping[str, Any]) -> float | None:
        """Return a checkpoint's score by the metric of ``--keep-best``: its value, negated where lower is better.

        Args:
            facts: the run's state beside its tensors, as JSON, from the checkpoint's manifest; ``facts["eval"]`` holds
                the held-out values of the checkpoint's step by name, if the step was evaluated.

        Returns:
            The score, higher is better; None if the step was not evaluated, or its evaluation has no number for this
            metric.
        """
        values = facts.get("eval")
        value = values.get(self.metric) if isinstance(values, dict) else None
        if not isinstance(value, int | float):
            return None
        return value if self.more else -value
