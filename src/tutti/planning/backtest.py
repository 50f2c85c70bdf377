"""Back-test predictions on published measurements: fit a part of each set, predict the rest, and score the 90 % bands.

Protocols: *zero-shot* (no row of the set is seen), *anchored* (the rows with fewest devices, or the smallest batch, of
each series), *extrapolated* (sizes up to a half of the predicted one; predictions at far larger sizes are a protocol of
their own). The result has, for each group of rows and each protocol, errors or the reason why there are none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from tutti.errors import counted
from tutti.planning.backtest_data import data_to_target, metric_by_epoch
from tutti.planning.backtest_target import time_to_target
from tutti.planning.backtest_time import all_reduce, iteration_by_grid, published_jobs, scaling_law, small_cluster
from tutti.planning.conformal_band import (
    LEAST_SERIES,
    LEVEL,
    NO_BAND,
    CellScores,
    CheckedPrediction,
    Residuals,
    band_factor,
    binomial_interval,
    collect_scores,
    shipped_residuals,
)
from tutti.planning.measurement_table import MeasurementTable, TableRow, read_tables
from tutti.planning.protocol import GroupPredictions

_PROTOCOLS: dict[str, tuple[Callable[[Sequence[TableRow]], Iterator[GroupPredictions]], ...]] = {
    "all-reduce": (all_reduce,),
    "small cluster": (small_cluster,),
    "iteration by grid": (iteration_by_grid,),
    "published jobs": (published_jobs,),
    "data to target": (data_to_target, time_to_target),
    "metric by epoch": (metric_by_epoch,),
    "scaling law": (scaling_law,),
}

_TINY = 1e-30
_WIDEST = 50.0
_IMPLAUSIBLE = 1e9
"""Prediction over measurement beyond which a number of the rows is a mistake of the table, not of the law."""

JsonRow = dict[str, object]


@dataclass
class BacktestResult:
    """Result of predicting published measurements from each other: predictions, measurements, and errors.

    A cell is a class of predictions with the same basis and a similar extrapolation distance, named for example ``one
    measured row, at most 2 ×``. A protocol says which rows of a table a prediction may see: ``zero-shot`` none,
    ``anchored`` those of the smallest size, ``extrapolated`` those of several smaller sizes.

    Attributes:
        rows: one dictionary for each kind of table, group of its rows (such as one hardware) and protocol, with the
            keys ``table``, ``group``, ``protocol``, ``n`` (number of predictions), ``mean``, ``median`` and ``worst``
            relative error, ``coverage90`` (fraction of measurements within the 90 % bands) and ``median_band_width``
            (relative to the prediction), both None where no prediction has a band, ``within_25`` and ``within_2x``
            (fractions of predictions within 25 % and within a factor of 2), ``bias`` (mean signed relative error), and,
            where they apply, ``band`` (text that says that there are no bands) and ``note`` (text of
            ``GroupPredictions.reason``).
        cells: one dictionary for each cell, with the keys ``cell``, ``series`` (number of independent series), ``sets``
            (number of published sources), and ``coverage90``. Where bands of at least 30 series were checked, further
            ``low`` and ``high`` (95 % interval expected for the coverage), ``holds`` (whether the coverage lies in this
            interval) and ``median_band_width``; elsewhere ``coverage90`` is None and ``band`` a text.
        refused: one dictionary for each group and protocol without any prediction, and for each table of which no row
            is used, with the keys ``table``, ``group``, ``protocol`` and ``reason``.
        notes: one dictionary for each group and protocol whose predictions guess something or leave out rows, and for
            each used table with unused rows, with the keys ``table``, ``group``, ``protocol`` and ``note``.
        checked: every prediction with its measurement, and the group and protocol that it belongs to.
        residuals: scores from which the bands are made, of this back-test and of the package, by cell and source.
    """

    rows: list[JsonRow] = field(default_factory=list)
    cells: list[JsonRow] = field(default_factory=list)
    refused: list[JsonRow] = field(default_factory=list)
    notes: list[JsonRow] = field(default_factory=list)
    checked: list[tuple[GroupPredictions, CheckedPrediction]] = field(default_factory=list)
    residuals: Residuals = field(default_factory=dict)

    def left_out(self) -> list[JsonRow]:
        """Compare, for each published source of this back-test, its errors with the bands that other sources give.

        Errors are of predicted times, or amounts of data, against published measurements. Predictions are of one class
        (key ``cell``) if they rest on the same kind of measurement, such as one measured row, and extrapolate similarly
        far. A score is |ln(measured ÷ predicted)| divided by (σ² + 0.1²)^⅜, where σ is the standard deviation that the
        prediction states for its logarithm.

        Returns:
            One dictionary for each source and class, with the keys ``source``, ``cell``, ``n`` (predictions),
            ``series`` (independent ones), ``median`` and ``worst`` relative error, ``score90`` (0.9 quantile of the
            source's scores), ``others90`` (quantile of all other sources' scores, the half width of the 90 % bands that
            they give; None where they are too few), ``coverage`` (share of the source's measurements within these
            bands) and ``interval_score`` (mean width of these bands plus 20 × the distance of each measurement outside
            of them, as natural logarithms; the smaller the better: Gneiting, Raftery 2007), both None without
            ``others90``.
        """
        found: list[JsonRow] = []
        by_source: dict[tuple[str, str], list[CheckedPrediction]] = {}
        for _, one in self.checked:
            by_source.setdefault((one.set_name, one.cell), []).append(one)
        for (source, cell), same in sorted(by_source.items()):
            errors = [abs(one.predicted / one.measured - 1) for one in same]
            others = band_factor(self.residuals, cell, source)
            interval = None
            if others is not None:
                beyond = [max(one.score - others, 0.0) for one in same]
                widths = [2 * one.width * (others + out / (1 - LEVEL)) for one, out in zip(same, beyond, strict=True)]
                interval = statistics.fmean(widths)
            found.append(
                {
                    "source": source,
                    "cell": cell,
                    "n": len(same),
                    "series": len({one.series for one in same}),
                    "median": statistics.median(errors),
                    "worst": max(errors),
                    "score90": float(np.quantile([one.score for one in same], LEVEL)),
                    "others90": others,
                    "coverage": None if others is None else statistics.fmean(one.score <= others for one in same),
                    "interval_score": interval,
                }
            )
        return found

    def scores(self) -> dict[str, dict[str, CellScores]]:
        """Return the scores of all predictions of this back-test, which are errors relative to the stated uncertainty.

        The score is |ln(measured ÷ predicted)| divided by the unit (σ² + 0.1²)^⅜, where σ is the standard deviation
        that the prediction states for its logarithm. Quantiles of these scores are the half
        widths, in such units, of the bands of later predictions (split-conformal prediction); they ship with the
        package (``conformal_band.write_residuals``).

        Returns:
            A dict from the cell (a class of predictions that rest on the same kind of measurement and extrapolate
            similarly far, named for example ``one measured row, at most 2 ×``) to a dict from the published source to
            its scores, each a ``CellScores``: ``scores``, a tuple of at most 60 quantiles, and ``series``, the number
            of independent series.
        """
        return collect_scores(one for _, one in self.checked)


def run_backtest(folder: Path, shipped: Residuals | None = None) -> BacktestResult:
    """Predict one part of each published table of measurements from the rest of it, and score the predictions.

    A protocol says which rows of a table a prediction may see: ``zero-shot`` none, ``anchored`` those of the smallest
    size, ``extrapolated`` those of several smaller sizes.

    Args:
        folder: CSV and TSV files, also in subfolders; the kind of a table is recognised by its columns.
        shipped: scores of earlier predictions (errors over the stated uncertainty), by class of prediction and then by
            source, on which bands may rest besides this back-test's own. Predictions of one class rest on the same kind
            of measurement and extrapolate similarly far. None for the scores that ship with the package.

    Returns:
        The result, with the attributes ``checked`` (every prediction with its measurement), ``rows`` (errors by kind
        of table, group of its rows and protocol, and the fraction of measurements inside the 90 % bands), ``cells``
        (that fraction by class of prediction), ``residuals`` (the scores behind the bands), ``refused`` (why a table is
        not used, or a group and protocol has no predictions) and ``notes`` (which rows are left out, and what
        predictions guess). A folder without tables, or a table that cannot be used, raises nothing.
    """
    result = BacktestResult()
    tables = read_tables(folder)
    by_kind: dict[str, list[MeasurementTable]] = {}
    for table in tables:
        if table.kind:
            by_kind.setdefault(table.kind, []).append(table)
        if table.reason:
            head: JsonRow = {"table": table.name, "group": "", "protocol": ""}
            if table.kind:
                result.notes.append({**head, "note": table.reason})
            else:
                result.refused.append({**head, "reason": table.reason})
    if not tables:
        result.refused.append({"table": str(folder.name), "group": "", "protocol": "", "reason": "no CSV file"})
    asked: list[GroupPredictions] = []
    with np.errstate(all="ignore"):
        for kind, same in by_kind.items():
            rows = [row for table in same for row in table.rows]
            try:
                for each in chain.from_iterable(protocol(rows) for protocol in _PROTOCOLS[kind]):
                    each.table = kind
                    asked.append(each)
            except (ArithmeticError, ValueError, np.linalg.LinAlgError) as error:
                reason = f"cannot be predicted: {error}"
                result.refused.append({"table": same[0].name, "group": "", "protocol": "", "reason": reason})
        _summarise(result, asked, shipped_residuals() if shipped is None else shipped)
    return result


def _merged(ours: Residuals, shipped: Residuals) -> dict[str, dict[str, CellScores]]:
    cells = {cell: dict(sets) for cell, sets in shipped.items()}
    for cell, sets in ours.items():
        cells.setdefault(cell, {}).update(sets)
    return cells


def _finite(one: CheckedPrediction) -> bool:
    sane = _TINY < one.predicted < 1 / _TINY and 1 / _IMPLAUSIBLE < one.predicted / one.measured < _IMPLAUSIBLE
    return bool(np.isfinite(one.sigma)) and sane and one.sigma < _WIDEST


def _drop_overflows(asked: GroupPredictions) -> None:
    """Leave out predictions that are not finite or implausible, and add their number to the reason."""
    kept = [one for one in asked.predictions if _finite(one)]
    if len(kept) < len(asked.predictions):
        lost = f"{counted(len(asked.predictions) - len(kept), 'prediction')} of implausible rows overflow"
        asked.reason = f"{asked.reason}; {lost}" if asked.reason else lost
        asked.predictions = kept


def _summarise(result: BacktestResult, asked: Sequence[GroupPredictions], shipped: Residuals) -> None:
    for each in asked:
        _drop_overflows(each)
        if each.reason:
            head: JsonRow = {"table": each.table, "group": each.group, "protocol": each.protocol}
            if each.predictions:
                result.notes.append({**head, "note": each.reason})
            else:
                result.refused.append({**head, "reason": each.reason})
        result.checked += [(each, one) for one in each.predictions]
    residuals = result.residuals = _merged(result.scores(), shipped)
    bands = _CheckedBands(residuals)
    result.rows += [_table_row(each, bands) for each in asked if each.predictions]
    for cell, sets in sorted(result.scores().items()):
        series = sum(each.series for each in sets.values())
        result.cells.append({"cell": cell, "series": series, "sets": len(sets), **bands.coverage(cell)})


class _CheckedBands:
    """The 90 % bands of checked predictions: how many measurements they hold, and how wide they are.

    Args:
        residuals: scores of checked predictions by class (cell) and source, from which the bands follow.
    """

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals
        self._factors: dict[tuple[str, str], float | None] = {}
        # By cell: whether bands of each series hold their measurements, and the bands' widths.
        self._hits: dict[str, dict[str, list[bool]]] = {}
        self._widths: dict[str, list[float]] = {}

    def check(self, one: CheckedPrediction) -> tuple[bool, float] | None:
        """Return whether a prediction's band holds its measurement, and the band's width; None without a band."""
        key = (one.cell, one.set_name)
        if key not in self._factors:
            self._factors[key] = band_factor(self._residuals, *key)
        factor = self._factors[key]
        if factor is None:
            return None
        hit, width = one.score <= factor, float(2 * np.sinh(min(factor * one.width, 2 * _WIDEST)))
        self._hits.setdefault(one.cell, {}).setdefault(f"{one.set_name}|{one.series}", []).append(hit)
        self._widths.setdefault(one.cell, []).append(width)
        return hit, width

    def coverage(self, cell: str) -> JsonRow:
        """Return the share of a cell's checked bands that hold their measurement, each series counted once."""
        checked = self._hits.get(cell, {})
        if len(checked) < LEAST_SERIES:
            return {"coverage90": None, "band": NO_BAND}
        low, high = binomial_interval(len(checked))
        covered = statistics.fmean(statistics.fmean(each) for each in checked.values())
        return {
            "coverage90": covered,
            "low": low,
            "high": high,
            "holds": low <= covered <= high,
            "median_band_width": statistics.median(self._widths[cell]),
        }


def _table_row(each: GroupPredictions, bands: _CheckedBands) -> JsonRow:
    """Return the errors of a protocol's predictions for one group of a table, and what their bands hold."""
    errors = [abs(one.predicted / one.measured - 1) for one in each.predictions]
    checked = [found for one in each.predictions if (found := bands.check(one)) is not None]
    row: JsonRow = {
        "table": each.table,
        "group": each.group,
        "protocol": each.protocol,
        "n": len(errors),
        "mean": statistics.fmean(errors),
        "median": statistics.median(errors),
        "worst": max(errors),
        "coverage90": statistics.fmean(hit for hit, _ in checked) if checked else None,
        "median_band_width": statistics.median(width for _, width in checked) if checked else None,
        "within_25": statistics.fmean(error <= 0.25 for error in errors),
        "within_2x": statistics.fmean(0.5 <= one.predicted / one.measured <= 2 for one in each.predictions),
        "bias": statistics.fmean(one.predicted / one.measured - 1 for one in each.predictions),
    }
    if not checked:
        row["band"] = NO_BAND
    if each.reason:
        row["note"] = each.reason
    return row
