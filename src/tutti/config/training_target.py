"""The held-out value at which ``--until`` ends a run, and the metric that ``--patience`` watches. No torch."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tutti.config.metric_direction import RAW, Direction, Metric, higher_is_better
from tutti.errors import UsageError, did_you_mean

_FORM = "write NAME=VALUE, NAME<=VALUE or NAME>=VALUE, such as accuracy=0.93 or loss<=0.2"


@dataclass(frozen=True)
class TrainingTarget:
    """A held-out metric and the value that a run trains to.

    Attributes:
        metric: the metric and its direction.
        value: the value that must be reached or passed.
    """

    metric: Metric
    value: float

    @classmethod
    def parse(
        cls, text: str, option: str = "--until", declared: Mapping[str, Direction] | None = None
    ) -> TrainingTarget:
        """Parse ``--until``, the held-out value of a metric at which training ends: ``NAME=VALUE``.

        ``NAME<=VALUE`` or ``NAME>=VALUE`` states the better direction of a metric whose name does not decide it.

        Args:
            text: the target, such as ``accuracy=0.93`` or ``distance<=2``.
            option: name of the option, which a UsageError states.
            declared: name of a metric → ``lower`` or ``higher``, the better values as the task declares them; None: the
                task declares nothing.

        Returns:
            A ``TrainingTarget``: ``metric``, which has a ``name`` and ``higher``, whether a higher value is better; and
            ``value``, the float to reach.

        Raises:
            UsageError: the text is malformed; ``=`` is used with a metric whose better direction is neither declared
                nor known by its name; or ``<=`` or ``>=`` contradicts the known direction.

        >>> print(TrainingTarget.parse("accuracy=0.93"), TrainingTarget.parse("distance<=2"))
        accuracy >= 0.93 distance <= 2
        """
        name, sign, value = split_target(text, option)
        known = higher_is_better(name, declared)
        asked = {"<=": False, ">=": True}.get(sign, known)
        if asked is None:
            raise UsageError(
                f"it is not declared whether a lower or a higher '{name}' is better",
                where=option,
                remedy=f"write {name}<={value:g} or {name}>={value:g}",
            )
        if known is not None and asked != known:
            better = "higher" if known else "lower"
            raise UsageError(
                f"'{text}' is reached by worse values: a {better} {name} is better",
                where=option,
                remedy=f"write {name}={value:g}",
            )
        return cls(Metric(name, asked), value)

    def reached(self, value: float) -> bool:
        """Return whether a held-out value of the metric is as good as the target's or better.

        Args:
            value: the held-out value; NaN and ±∞ never reach the target.
        """
        return math.isfinite(value) and (value >= self.value if self.metric.higher else value <= self.value)

    def __str__(self) -> str:
        return f"{self.metric.name} {'>=' if self.metric.higher else '<='} {self.value:g}"


def split_target(text: str, option: str = "--until") -> tuple[str, str, float]:
    """Split the text of ``--until`` into its metric's name, its sign (``=``, ``<=`` or ``>=``) and its value.

    Args:
        text: ``NAME=VALUE``, ``NAME<=VALUE`` or ``NAME>=VALUE``.
        option: name of the option, which a UsageError states.

    Returns:
        (name of the metric, sign, value): ``=``, ``<=`` or ``>=`` as text, and a finite float.

    Raises:
        UsageError: the text is malformed, or the value is no finite number.

    >>> split_target("loss<=0.2")
    ('loss', '<=', 0.2)
    """
    found = re.fullmatch(r"\s*([^<>=:\s]+)\s*(=|<=|>=)\s*(\S+)\s*", text)
    if found is not None:
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(found[3])):
                return found[1], found[2], value
    raise UsageError(f"cannot read '{text}'", where=option, remedy=_FORM)


def check_metric(name: str, option: str, reported: Sequence[str], averaged: bool) -> None:
    """Raise UsageError, naming the nearest metric, if the run's evaluations do not report the metric ``name``.

    Args:
        name: the metric.
        option: the option that names it, which the UsageError states.
        reported: names of all held-out values of the task, ``loss`` included.
        averaged: whether the run keeps an average of its weights. Its evaluations then also report each value of the
            weights in training, by its name with the prefix ``raw_``.
    """
    known = [*reported, *(f"{RAW}{other}" for other in reported if averaged)]
    if name not in known:
        raise UsageError(f"the task reports no held-out '{name}'", where=option, remedy=did_you_mean(name, known))
