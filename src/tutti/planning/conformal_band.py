"""Bands around predictions, from the errors of earlier ones: split-conformal, by basis and distance of extrapolation.

A prediction has a spread σ from draws of its law's constants and from what the law leaves of the rows that it is fitted
to. Its score is |log(measured/predicted)| / w(σ), and a band is exp(±q·w(σ)) with q a quantile of the scores of a cell
(Vovk et al. 2005; Lei et al. 2018, arXiv 1604.04173, §5.2, normalised residuals). Any w gives bands that hold; w =
(σ² + 0.1²)^⅜ gives narrow ones: errors grow with σ, but less than in proportion, because a wide prior of constants is
mostly caution. A cell is a basis, such as one measured row, and a distance log₂(N/N_measured). Scores of the set that
is predicted are never used.

Predictions of one set resemble each other more than those of another set, so that a 90 % quantile of pooled scores
covers less than 90 % of a new set (Dunn, Wasserman, Ramdas 2022; Lee, Barber, Willett 2023). Their corrected
quantiles need more sets than are published; the level is calibrated by leaving out each set in turn instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

NO_BAND = "no band: nothing like this was checked"
LEVEL = 0.9
"""Fraction of measurements that bands are made to hold."""
LEAST_SERIES = 30
"""Independent series of a cell, of all sets, below which nothing in it has a band."""
_LEAST_OTHERS = 9
"""Fewest series of other sets that bound a further one: from n = 9 on, ⌈0.9·(n + 1)⌉ is at most n."""
_LEAST_SETS = 2
"""Fewest other sets: a single one does not tell how far sets differ."""
FEW_POINTS = frozenset({"data to the target at smaller batches"})
"""Bases with so few published points that both near distances are one cell."""
_FLOOR = 0.1
"""Error of a law with known constants at a source never seen: predictions that state σ below 8 % are off by 10 %, root
mean square in the median source of the back-test."""
_KEPT = 60
_LEVELS = (0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)


def band_unit(sigma: float) -> float:
    """Return the unit by which the error |ln(measured ÷ predicted)| of a prediction is divided: (σ² + 0.1²)^⅜.

    An uncertain prediction has a large unit, so that errors of all predictions become comparable (scores).

    Args:
        sigma: standard deviation σ of the predicted value's natural logarithm, over draws of the law's constants.

    >>> round(band_unit(0.0), 3), round(band_unit(0.8), 3)
    (0.178, 0.851)
    """
    return float(np.hypot(sigma, _FLOOR) ** 0.75)


@dataclass(frozen=True)
class CheckedPrediction:
    """One prediction of a back-test, with the uncertainty that it states, beside the published measurement.

    Attributes:
        set_name: published source of the measurement; errors of the same source are not used for this prediction's
            band.
        basis: kind of measurement from which the prediction was made, such as ``one measured row``.
        distance: size that is predicted (devices, or samples of a batch) over the largest measured one.
        series: name of a series of measurements; measurements of the same series are not independent.
        predicted: the predicted value, in the measurement's unit.
        sigma: standard deviation of the predicted value's natural logarithm, over random draws of the law's constants.
        measured: the measured value.
    """

    set_name: str
    basis: str
    distance: float
    series: str
    predicted: float
    sigma: float
    measured: float

    @property
    def cell(self) -> str:
        """Name of the class of similar predictions with which this prediction is scored.

        For example ``one measured row, at most 2 ×``. The name joins the basis of the prediction (its kind of
        measurement) and the class of its extrapolation distance (``distance_class``: ``at most 2 ×``, ``at most 4 ×``
        or ``more than 4 ×``) with a comma. For data to a target, of which few points are published, ``at most 4 ×``
        includes distances of at most 2. The errors of the predictions in a class give the bands of later ones.
        """
        near = self.basis in FEW_POINTS and self.distance < 4
        return f"{self.basis}, {distance_class(4.0 if near else self.distance)}"

    @property
    def width(self) -> float:
        """Unit by which the error |ln(measured ÷ predicted)| of this prediction is divided: (σ² + 0.1²)^⅜.

        σ is the standard deviation of the predicted value's natural logarithm. So a prediction that states a large
        uncertainty has a large unit.
        """
        return band_unit(self.sigma)

    @property
    def score(self) -> float:
        """Error |ln(measured ÷ predicted)| of this prediction, divided by its unit (σ² + 0.1²)^⅜ (``width``).

        σ is the standard deviation of the predicted value's natural logarithm.
        """
        return float(abs(np.log(self.measured / self.predicted)) / self.width)


def distance_class(distance: float) -> str:
    """Return the class of an extrapolation distance: ``at most 2 ×``, ``at most 4 ×`` or ``more than 4 ×``.

    Args:
        distance: size that is predicted (devices, samples of a batch) over the largest measured one.

    >>> [distance_class(times) for times in (1, 2, 4, 8)]
    ['at most 2 ×', 'at most 2 ×', 'at most 4 ×', 'more than 4 ×']
    """
    steps = np.log2(max(distance, 1.0))
    return "at most 2 ×" if steps <= 1.001 else "at most 4 ×" if steps <= 2.001 else "more than 4 ×"


@dataclass(frozen=True)
class CellScores:
    """Scores of checked predictions of one published source, summarised as quantiles.

    A score is the error |ln(measured ÷ predicted)| over its unit, ``band_unit``. The widths of the 90 % bands of later
    predictions are derived from scores.

    Attributes:
        scores: at most 60 quantiles, which stand for all scores.
        series: number of independent series of measurements that the scores come from.
    """

    scores: tuple[float, ...]
    series: int


Residuals = Mapping[str, Mapping[str, CellScores]]
"""Scores by cell, then by set."""


def collect_scores(checked: Iterable[CheckedPrediction]) -> dict[str, dict[str, CellScores]]:
    """Summarise the scores of predictions, errors relative to the stated uncertainty, as quantiles.

    A score is |ln(measured ÷ predicted)| divided by (σ² + 0.1²)^⅜, where σ is the standard deviation that the
    prediction states for its logarithm. Each series (measurements that are not independent) of a source has the same
    weight in the source's quantiles.

    Args:
        checked: predictions with their measurements.

    Returns:
        A dict from the class of prediction (``CheckedPrediction.cell``: kind of measurement and distance of
        extrapolation) to a dict from the published source to its ``CellScores``: ``scores``, a tuple of at most 60
        quantiles of the scores, and ``series``, the number of series.
    """
    by: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in checked:
        by.setdefault((one.cell, one.set_name), {}).setdefault(one.series, []).append(one.score)
    found: dict[str, dict[str, CellScores]] = {}
    for (cell, name), series in by.items():
        values = np.concatenate([np.sort(each) for each in series.values()])
        weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in series.values()])
        order = np.argsort(values)
        count = min(_KEPT, len(values))
        points = (np.arange(count) + 0.5) / count
        places = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
        kept = np.interp(points, places, values[order])
        found.setdefault(cell, {})[name] = CellScores(tuple(round(float(x), 4) for x in kept), len(series))
    return found


def band_factor(residuals: Residuals, cell: str, set_name: str) -> float | None:
    """Return the factor q of 90 % bands, predicted · exp(±q·u), from the errors of earlier, similar predictions.

    u is the unit (σ² + 0.1²)^⅜ for the standard deviation σ that a prediction states for its logarithm (``band_unit``).
    A cell is a class of predictions that rest on the same kind of measurement and extrapolate similarly far. q is a
    quantile of the scores in the cell, without the scores of the source ``set_name``. The weight of a source is the
    square root of its number of series, so that one large source does not dominate. The level of the quantile is at
    least 90 %, corrected for few series. With three or more other sources it is raised until bands made from all of
    them but one cover 90 % of this one, on average, because a new source may differ from all others.

    Args:
        residuals: scores, |ln(measured ÷ predicted)| ÷ u, by cell and then by published source.
        cell: name of the prediction's cell (``CheckedPrediction.cell``).
        set_name: source that is predicted, whose scores are left out; empty for a prediction of no source.

    Returns:
        q; None where the cell has fewer than 30 series, or fewer than 9 series or 2 sources besides the named one.
    """
    others = [scores for name, scores in residuals.get(cell, {}).items() if name != set_name]
    count = sum(scores.series for scores in others)
    every = sum(scores.series for scores in residuals.get(cell, {}).values())
    if every < LEAST_SERIES or count < _LEAST_OTHERS or len(others) < _LEAST_SETS:
        return None
    level = min(1.0, LEVEL * (1 + 1 / count))
    if len(others) > _LEAST_SETS:
        higher = [level, *(each for each in _LEVELS if each > level)]
        level = next((each for each in higher if _left_out_coverage(others, each) >= LEVEL), 1.0)
    return _pooled_quantile(others, level)


def _pooled_quantile(sources: Sequence[CellScores], level: float) -> float:
    """Return a quantile of the scores of several sources."""
    values = np.concatenate([np.asarray(each.scores) for each in sources])
    weights = np.concatenate([np.full(len(e.scores), np.sqrt(e.series) / len(e.scores)) for e in sources])
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, level)), len(values) - 1)])


def _left_out_coverage(sources: Sequence[CellScores], level: float) -> float:
    """Return the share of a source's scores below the others' quantile, on average over the sources."""
    shares = []
    for place, each in enumerate(sources):
        quantile = _pooled_quantile([*sources[:place], *sources[place + 1 :]], level)
        shares.append(np.mean(np.asarray(each.scores) <= quantile))
    return float(np.mean(shares))


def binomial_interval(count: int) -> tuple[float, float]:
    """Return the central 95 % interval of the fraction of measurements that lie within their 90 % bands.

    The interval is that of a binomial distribution, in which each band holds its measurement with probability 0.9.

    Args:
        count: number of measurements, which count as independent.

    Returns:
        A pair of Python floats: low and high end of the interval, as fractions of ``count`` in [0, 1].

    >>> binomial_interval(50)
    (0.82, 0.98)
    """
    from scipy.special import bdtr

    reached = bdtr(np.arange(count + 1), count, LEVEL)
    low, high = np.searchsorted(reached, [0.025, 0.975])
    return float(low) / count, float(high) / count


def read_residuals(text: str) -> dict[str, dict[str, CellScores]]:
    """Parse scores of checked predictions from the JSON text that `write_residuals` returns.

    A score is the error |ln(measured ÷ predicted)| of a prediction, divided by (σ² + 0.1²)^⅜, where σ is the standard
    deviation that the prediction states for its logarithm (``band_unit``).

    Args:
        text: JSON object with the key ``cells``.

    Returns:
        A dict from the class of prediction (kind of measurement and distance of extrapolation) to a dict from the
        published source to its ``CellScores``: ``scores``, a tuple of at most 60 quantiles of the scores, and
        ``series``, the number of independent series.

    Raises:
        ValueError: ``text`` is no JSON.
        KeyError: the object, or the entry of a source, lacks a key.
    """
    stored = json.loads(text)["cells"]
    return {
        cell: {name: CellScores(tuple(each["scores"]), int(each["series"])) for name, each in sets.items()}
        for cell, sets in stored.items()
    }


def write_residuals(residuals: Residuals) -> str:
    """Return scores of checked predictions as one line of JSON, the content of the package's ``residuals.json``.

    The object has the keys ``version`` (1) and ``cells``: class of predictions → published source → ``series`` (number
    of independent series) and ``scores`` (list of quantiles).

    Args:
        residuals: scores (errors divided by ``band_unit`` of the stated uncertainty), by class of prediction (kind of
            measurement and distance of extrapolation), then by published source.
    """
    cells = {
        cell: {name: {"series": each.series, "scores": list(each.scores)} for name, each in sorted(sets.items())}
        for cell, sets in sorted(residuals.items())
    }
    return json.dumps({"version": 1, "cells": cells}, indent=None, separators=(",", ":")) + "\n"


def shipped_residuals() -> dict[str, dict[str, CellScores]]:
    """Return the scores of checked predictions that ship with the package, from which 90 % bands are derived.

    A score is the error |ln(measured ÷ predicted)| of a prediction, divided by (σ² + 0.1²)^⅜, where σ is the standard
    deviation that the prediction states for its logarithm (``band_unit``). ``make backtest`` has computed the scores
    from published measurements; those of steps that ``tutti simulate`` predicts are from steps that the project has
    measured (``benchmarks/step_residuals.py``).

    Returns:
        A dict from the class of prediction (kind of measurement and distance of extrapolation) to a dict from the
        source, such as a published set or a kind of model, to its ``CellScores``: ``scores``, a tuple of at most 60
        quantiles, and ``series``, the number of independent series. Empty if the files are missing.
    """
    paths = [resources.files("tutti.planning") / name for name in ("residuals.json", "step_residuals.json")]
    found = [read_residuals(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    return {cell: sets for each in found for cell, sets in each.items()}
