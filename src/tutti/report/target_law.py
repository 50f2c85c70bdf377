"""The law E(B) of samples to a target, and that of a plan of ``tutti plan``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti.report.run_record import finite, printable

_POINTS = 49
_WIDER = 4.0
"""The line is drawn from a fourth of the smallest batch to four times the largest."""


@dataclass(frozen=True)
class TargetLaw:
    """The law E(B) = E_min(1 + B/B_crit) of the samples that training with global batch B needs to a target.

    McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11.

    Attributes:
        metric: name of the held-out metric of the target.
        value: value of the metric at the target.
        draws: pairs (E_min, B_crit) in samples, drawn from their posterior; at least one.
        measured: pairs (global batch, samples to the target) of runs.
        origin: the file that states the law, in words.
        basis: the measurements from which the law was fitted, in words; may be empty.
    """

    metric: str
    value: float
    draws: Sequence[tuple[float, float]]
    measured: Sequence[tuple[float, float]]
    origin: str
    basis: str

    @property
    def critical_batch(self) -> float:
        """B_crit, the global batch in samples at which training needs twice the least data: the median of the draws."""
        return statistics.median(critical for _, critical in self.draws)

    def samples_at(self, batch: float, quantile: float = 0.5) -> float:
        """Return the samples that training needs to the target with a global batch: a quantile over the draws of E(B).

        Args:
            batch: B, in samples.
            quantile: 0 to 1; 0.5 is the median.
        """
        return float(np.quantile([least * (1 + batch / critical) for least, critical in self.draws], quantile))

    def line(self, batches: Sequence[float]) -> list[tuple[float, float, float, float]]:
        """Return the law as a line for a chart: (batch, median, quantile 0.05, quantile 0.95) in samples.

        The line goes from a fourth of the smallest to four times the largest of the batches and B_crit.

        Args:
            batches: global batches in samples, each above 0, that the line has to reach; may be empty.
        """
        low = min([*batches, self.critical_batch]) / _WIDER
        high = max([*batches, self.critical_batch]) * _WIDER
        places = [low * (high / low) ** (n / (_POINTS - 1)) for n in range(_POINTS)]
        return [(place, *(self.samples_at(place, part) for part in (0.5, 0.05, 0.95))) for place in places]


def plan_law(plan: Mapping[str, Any], name: str) -> TargetLaw | None:
    """Return the law of samples to the target that a plan of ``tutti plan`` rests on.

    Args:
        plan: the plan, as ``tutti plan --json`` prints it.
        name: name of the plan's file.

    Returns:
        The law; None if the plan states none, such as a plan from runs of a single batch size.
    """
    data = plan.get("data")
    data = data if isinstance(data, Mapping) else {}
    measured = data.get("measured")
    points = [
        (batch, samples)
        for each in (measured if isinstance(measured, list) else ())
        if isinstance(each, Mapping)
        and (batch := finite(each.get("batch"))) is not None
        and (samples := finite(each.get("samples"))) is not None
        and min(batch, samples) > 0
    ]
    return _law(plan.get("target"), data.get("law_draws"), points, name)


def _law(target: Any, pairs: Any, measured: Sequence[tuple[float, float]], name: str) -> TargetLaw | None:
    target = target if isinstance(target, Mapping) else {}
    value, metric = finite(target.get("value")), target.get("metric")
    draws = []
    for pair in pairs if isinstance(pairs, list) else ():
        ends = [finite(each) for each in pair] if isinstance(pair, list) and len(pair) == 2 else [None, None]
        if ends[0] is None or ends[1] is None or not 0 < min(ends[0], ends[1]) <= max(ends[0], ends[1]) < 1e30:
            return None
        draws.append((ends[0], ends[1]))
    if value is None or not isinstance(metric, str) or not draws:
        return None
    return TargetLaw(printable(metric), value, draws, measured, printable(name), "")
