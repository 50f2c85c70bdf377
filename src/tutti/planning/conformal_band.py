"""Bands around predictions, from the errors of earlier ones: split-conformal, by basis and distance of extrapolation.

A prediction has a spread σ from draws of its law's constants. Its score is |log(measured/predicted)| / hypot(σ, 0.03),
and a band is exp(±q·hypot(σ, 0.03)) with q the 90 % quantile of the scores of a cell (Vovk et al. 2005; Lei et al.
2018, arXiv 1604.04173, §5.2, normalised residuals). A cell is a basis, such as one measured row, and a distance
log₂(N/N_measured). Scores of the set that is predicted are never used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources

import numpy as np

NO_BAND = "no band: nothing like this was checked"
LEVEL = 0.9
LEAST_SERIES = 30
"""Independent series of a cell, of all sets, below which nothing in it has a band."""
_LEAST_OTHERS = 9
"""Series of other sets with a finite 90 % quantile of one more: ⌈0.9·(9 + 1)⌉ = 9."""
_LEAST_SETS = 2
"""Other sets: one alone does not say how far sets differ."""
FEW_POINTS = frozenset({"data to the target at smaller batches"})
"""Bases with so few published points that both near distances are one cell."""
_FLOOR = 0.03
_KEPT = 60


@dataclass(frozen=True)
class CheckedPrediction:
    """One prediction beside its measurement.

    Attributes:
        set_name: the set whose scores must not band it.
        basis: what the prediction rests on.
        distance: times more devices, or samples a batch, than were measured.
        series: measurements that share it are not independent.
        predicted: in the measurement's unit.
        sigma: spread of the predicted logarithm over draws of the constants.
        measured: the truth.
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
        """Name of the cell in which the prediction is scored: its basis and distance class, with a comma between.

        Predictions of one cell are alike enough that the errors of some tell how far others may be off.
        """
        near = self.basis in FEW_POINTS and self.distance < 4
        return f"{self.basis}, {distance_class(4.0 if near else self.distance)}"

    @property
    def width(self) -> float:
        """Spread in units of which the error is scored: hypot(σ, 0.03), of the logarithm."""
        return float(np.hypot(self.sigma, _FLOOR))

    @property
    def score(self) -> float:
        """Error |log(measured / predicted)| in units of ``width``."""
        return float(abs(np.log(self.measured / self.predicted)) / self.width)


def distance_class(distance: float) -> str:
    """Return the class of an extrapolation distance, one of three texts.

    Args:
        distance: size that is predicted (devices, samples of a batch) over the largest measured one.

    >>> [distance_class(times) for times in (1, 2, 4, 8)]
    ['at most 2 ×', 'at most 2 ×', 'at most 4 ×', 'more than 4 ×']
    """
    steps = np.log2(max(distance, 1.0))
    return "at most 2 ×" if steps <= 1.001 else "at most 4 ×" if steps <= 2.001 else "more than 4 ×"


@dataclass(frozen=True)
class CellScores:
    """Scores of one set in one cell: quantiles that stand for all of them, and how many series they come from."""

    scores: tuple[float, ...]
    series: int


Residuals = Mapping[str, Mapping[str, CellScores]]
"""Scores by cell, then by set."""


def collect_scores(checked: Iterable[CheckedPrediction]) -> dict[str, dict[str, CellScores]]:
    """Return the scores of predictions, by cell and then by set of measurements.

    Each series (measurements that are not independent) of a set has the same weight in the set's quantiles.
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
    """Return q of the bands exp(±q·width) around a cell's predictions; None where too little was checked.

    q is the 90 % quantile, corrected for few series, of the scores in the cell of all sets but one. Sets weigh
    as the square root of their series, so that one large set does not speak for all. Too little is a cell of fewer than
    30 series, or one with fewer than 9 series or 2 sets beside the named set.

    Args:
        residuals: scores by cell, then by set.
        cell: basis and distance class of the prediction (``CheckedPrediction.cell``).
        set_name: the set that is predicted, whose scores are left out; empty for a prediction of no set.
    """
    others = {name: scores for name, scores in residuals.get(cell, {}).items() if name != set_name}
    count = sum(scores.series for scores in others.values())
    every = sum(scores.series for scores in residuals.get(cell, {}).values())
    if every < LEAST_SERIES or count < _LEAST_OTHERS or len(others) < _LEAST_SETS:
        return None
    values = np.concatenate([np.asarray(scores.scores) for scores in others.values()])
    weights = np.concatenate(
        [np.full(len(each.scores), np.sqrt(each.series) / len(each.scores)) for each in others.values()]
    )
    order = np.argsort(values)
    level = min(1.0, LEVEL * (1 + 1 / count))
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, level)), len(values) - 1)])


def binomial_interval(count: int, share: float = LEVEL) -> tuple[float, float]:
    """Return the central 95 % interval of the fraction of hits among independent trials.

    Args:
        count: number of trials.
        share: probability of a hit; default: the 0.9 of the bands.

    >>> binomial_interval(50)
    (0.82, 0.98)
    """
    from scipy.special import bdtr

    reached = bdtr(np.arange(count + 1), count, share)
    low, high = np.searchsorted(reached, [0.025, 0.975])
    return float(low) / count, float(high) / count


def read_residuals(text: str) -> dict[str, dict[str, CellScores]]:
    """Parse scores from the JSON text that `write_residuals` returns; by cell, then by set."""
    stored = json.loads(text)["cells"]
    return {
        cell: {name: CellScores(tuple(each["scores"]), int(each["series"])) for name, each in sets.items()}
        for cell, sets in stored.items()
    }


def write_residuals(residuals: Residuals) -> str:
    """Return scores by cell and set as JSON text, in the form of the package's ``residuals.json``."""
    cells = {
        cell: {name: {"series": each.series, "scores": list(each.scores)} for name, each in sorted(sets.items())}
        for cell, sets in sorted(residuals.items())
    }
    return json.dumps({"version": 1, "cells": cells}, indent=None, separators=(",", ":")) + "\n"


def shipped_residuals() -> dict[str, dict[str, CellScores]]:
    """Return the scores that ship with the package, by cell and then by set of measurements.

    `make backtest` has made them from published measurements. Empty if the file is missing.
    """
    path = resources.files("tutti.planning") / "residuals.json"
    return read_residuals(path.read_text(encoding="utf-8")) if path.is_file() else {}
