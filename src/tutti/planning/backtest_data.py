"""Protocols of the back-test for data to a target: from smaller batches, and from gradient noise alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tutti.errors import counted
from tutti.planning.conformal_band import CheckedPrediction
from tutti.planning.law_fit import fit_target
from tutti.planning.measurement_table import TableRow
from tutti.planning.protocol import ANCHORED, EXTRAPOLATED, NOT_STATED, ZERO_SHOT, GroupPredictions, grouped
from tutti.planning.scaling_laws import Array

_FAR = f"{EXTRAPOLATED}, at least 8 ×"
SMALLER_BATCHES = "data to the target at smaller batches"
ONE_BATCH = "data to the target at one batch"
_OTHER_TARGET = "data to another target says nothing about this one"
_UNIT_CHANGES = 20.0
_LEVELS = (0.5, 0.75, 0.95)


def data_to_target(rows: Sequence[TableRow]) -> Iterator[GroupPredictions]:
    """Predict how much data training with a larger batch needs to a target metric, from runs with smaller batches.

    The law E(B) = E_min(1 + B/B_crit), with the data E_min that small batches need and the critical batch size B_crit,
    is fitted to the smallest batch of a benchmark round (*anchored*), or (*extrapolated*) to all batches of at most
    half the predicted one, and once more to batches of at most an eighth. Rounds are separate series, because target
    and unit change between them. Runs whose column ``ok`` is not above 0 are left out, and so are values more than 20
    times above or below a round's median, which are in another unit (epochs, samples).

    Args:
        rows: one row for each training run, with benchmark, round, global batch, and data until the target was reached
            (``last_eval``), as tables of the kind ``data to target`` have them.

    Yields:
        For each benchmark and protocol (zero-shot: from no row of the table; anchored; extrapolated at least 2 × and at
        least 8 ×) one record with ``group`` (the benchmark), ``protocol``, ``predictions`` (a list of
        ``CheckedPrediction``, with ``predicted`` and ``measured`` in the unit of ``last_eval``) and ``reason``: why the
        list is empty, as always for zero-shot, or how many rows were left out of it, else an empty text.
    """
    for group, same in grouped(rows, lambda row: row.label("bench", "seq") or NOT_STATED.format("benchmark")).items():
        anchored, half, eighth = (
            GroupPredictions(group, ANCHORED),
            GroupPredictions(group, EXTRAPOLATED),
            GroupPredictions(group, _FAR),
        )
        left = 0
        for series, members in grouped(same, lambda row: row.label("bench", "seq", "version")).items():
            kept = [row for row in members if row.number("last_eval") > 0 and row.number("ok", 1.0) > 0]
            logs = [math.log(row.number("last_eval")) for row in kept]
            middle = statistics.median(logs) if logs else 0.0
            kept = [row for row, log in zip(kept, logs, strict=True) if abs(log - middle) < math.log(_UNIT_CHANGES)]
            left += len(members) - len(kept)
            by_batch = grouped(kept, lambda row: row.number("batch"))
            points = {batch: [row.number("last_eval") for row in each] for batch, each in sorted(by_batch.items())}
            name = f"target {same[0].label('bench')}"
            if points:
                smallest = min(points)
                anchored.predictions += _from_smaller(points, 0.5, name, series, (smallest, ONE_BATCH))
            half.predictions += _from_smaller(points, 0.5, name, series)
            eighth.predictions += _from_smaller(points, 0.125, name, series)
        note = f"{counted(left, 'row')} without data to the target, or in another unit than the rest" if left else ""
        yield GroupPredictions(group, ZERO_SHOT, reason=_OTHER_TARGET)
        for asked in (anchored, half, eighth):
            asked.reason = note if asked.predictions else "no batch so much smaller than another"
            yield asked


def _from_smaller(
    points: dict[float, list[float]], share: float, name: str, series: str, only: tuple[float, str] | None = None
) -> list[CheckedPrediction]:
    """Predict each batch from the batches of at most a share of it.

    Args:
        points: data to the target in each submission, by batch.
        share: largest fitted batch over the predicted one.
        name: set of the predictions.
        series: their series.
        only: the one batch to fit, and the basis of such predictions; None: all.
    """
    found = []
    for batch, values in points.items():
        below = {each: data for each, data in points.items() if each <= share * batch}
        if only is not None:
            below = {each: data for each, data in below.items() if each == only[0]}
        if not below:
            continue
        batches = np.array(list(below))
        data = np.array([statistics.median(each) for each in below.values()])
        runs = np.array([float(len(each)) for each in below.values()])
        predicted, sigma = fit_target(batches, data, runs).predict(batch)
        basis = SMALLER_BATCHES if only is None else only[1]
        distance = batch / float(batches.max())
        truth = statistics.median(values)
        found.append(CheckedPrediction(name, basis, distance, f"{series} {batch:g}", predicted, sigma, truth))
    return found


class _Curve:
    """A metric over a run at one batch size, with the gradient's noise at each epoch.

    Args:
        batch: samples of a global batch.
        rows: one for each epoch.
        counted: role that says where in the run a row is: ``iteration`` or ``epoch``.
    """

    def __init__(self, batch: float, rows: Sequence[TableRow], counted: str) -> None:
        ordered = sorted(rows, key=lambda row: row.number(counted))
        self.batch = batch
        unit = batch if counted == "iteration" else 1.0
        self.samples = np.array([row.number(counted) * unit for row in ordered])
        self.metric = np.array([row.number("metric") for row in ordered])
        self.ratio = np.array([row.number("grad_var") / row.number("grad_sqr") for row in ordered])

    def best(self) -> Array:
        """Return the best metric of a training run until each epoch, where two of three neighbours must be as good.

        The metric of an epoch is replaced by the median of it and of its neighbours; that of the first by the worst of
        the first three, that of the last by the worse of it and the better one of the two before. So a single epoch,
        whose number may be a mistake, reaches no level.
        """
        values = self.metric
        if len(values) < 3:
            return np.maximum.accumulate(values)
        middle = np.median(np.array([values[:-2], values[1:-1], values[2:]]), axis=0)
        first, last = values[:3].min(), min(values[-1], values[-3:-1].max())
        return np.maximum.accumulate(np.array([first, *middle, last]))

    def reached(self, level: float) -> float:
        """Return after how many training samples (or epochs, as the run counts) the best metric so far reaches a level.

        The number is interpolated linearly between two epochs. It is NaN where the run never reaches the level, and
        where the first epoch is already above it.
        """
        best = self.best()
        place = int(np.searchsorted(best, level))
        if place >= len(best):
            return math.nan
        if place == 0:
            return float(self.samples[0]) if best[0] == level else math.nan
        share = (level - best[place - 1]) / (best[place] - best[place - 1])
        return float(self.samples[place - 1] + share * (self.samples[place] - self.samples[place - 1]))

    def noise(self, samples: float, factor: float) -> tuple[Array, Array]:
        """Return the samples of each epoch up to a point of training, and the gradient noise scale B_simple of each.

        Args:
            samples: training samples (or epochs, as the run counts) after which the last epoch is cut off.
            factor: batch size, by which the measured ratio of gradient variance to squared norm is multiplied.

        Returns:
            Two arrays with one number for each epoch that starts before ``samples``: its length, and ``factor`` times
            its ratio. An epoch without a measured ratio has the median of the others; all are NaN where there is none.
        """
        ends = np.minimum(self.samples, samples)
        spent = np.diff(ends, prepend=0.0)
        known = self.ratio[np.isfinite(self.ratio)]
        ratio = np.where(np.isfinite(self.ratio), self.ratio, np.median(known) if len(known) else np.nan)
        return spent[spent > 0], factor * ratio[spent > 0]


def metric_by_epoch(rows: Sequence[TableRow]) -> Iterator[GroupPredictions]:
    """Predict the samples that runs with larger batches need to levels of a metric, from the smallest batch's noise.

    One sample at batch B advances training as far as (φ + B_0)/(φ + B) samples at the smallest batch B_0, with φ the
    gradient noise scale at that time (McCandlish et al. 2018, arXiv 1812.06162; Qiao et al., OSDI 2021, arXiv
    2008.12260, eq. 7). The column ``grad_var`` is the variance of the gradient at B_0, so φ = B_0 · grad_var /
    grad_sqr. *Anchored* predictions see the run at B_0 alone. *Extrapolated* ones also see the run of one other batch:
    of at most half the predicted batch, and in a second protocol of at most an eighth. The levels are 50, 75 and 95 %
    of the way from start to end of the metric that every run covers. A run has reached a level where two of three
    neighbouring epochs have, so that a single outlier does not count.

    Args:
        rows: one row for each epoch of a training run, with workload, batch, metric, ``grad_var`` and ``grad_sqr``, as
            tables of the kind ``metric by epoch`` have them.

    Yields:
        For each workload and protocol (zero-shot: from no row of the table; anchored; extrapolated at least 2 × and at
        least 8 ×) one record with ``group`` (the workload), ``protocol``, ``predictions`` (in samples or epochs, a list
        of ``CheckedPrediction``, with ``predicted`` and ``measured``) and ``reason``: why the list is empty, as always
        for zero-shot.
    """
    for group, same in grouped(rows, lambda row: row.label("workload") or NOT_STATED.format("workload")).items():
        yield GroupPredictions(group, ZERO_SHOT, reason=_OTHER_TARGET)
        alone, more, far = (
            GroupPredictions(group, ANCHORED),
            GroupPredictions(group, EXTRAPOLATED),
            GroupPredictions(group, _FAR),
        )
        # Epochs are a unit of data too, and all batches of a workload must have one unit.
        counted = "iteration" if 2 * sum("iteration" in row.numbers for row in same) >= len(same) else "epoch"
        named = grouped((row for row in same if counted in row.numbers), lambda row: row.number("batch"))
        curves = [_Curve(batch, each, counted) for batch, each in sorted(named.items()) if len(each) > 1]
        if len(curves) < 2:
            alone.reason = more.reason = far.reason = "fewer than two batches with two epochs"
            yield from (alone, more, far)
            continue
        if _falls(curves[0]):
            for curve in curves:
                curve.metric = -curve.metric
        start = max(float(curve.best()[0]) for curve in curves)
        end = min(float(curve.best()[-1]) for curve in curves)
        for share in _LEVELS if end > start else ():
            level = start + share * (end - start)
            _ask_level(alone, {0.5: more, 0.125: far}, curves, level)
        missing = "no level of the metric that every batch reaches"
        if not np.isfinite(curves[0].ratio).any():
            alone.reason = "the table does not say the noise of the gradient at the smallest batch"
        if more.predictions:
            far.reason = "no batch so much smaller than another"
        for asked in (alone, more, far):
            asked.reason = "" if asked.predictions else asked.reason or missing
            yield asked


def _falls(curve: _Curve) -> bool:
    return bool(np.median(curve.metric[-3:]) < np.median(curve.metric[:3]))


def _ask_level(
    alone: GroupPredictions, with_one: Mapping[float, GroupPredictions], curves: Sequence[_Curve], level: float
) -> None:
    """Predict the data to a level of the metric at each batch, and append the predictions.

    Args:
        alone: receives those from the gradient noise of the smallest batch.
        with_one: by largest share of the predicted batch, receives those from one other batch besides.
        curves: by rising batch size.
        level: of the metric.
    """
    first = curves[0]
    base = first.reached(level)
    if not math.isfinite(base):
        return
    name = f"progress {alone.group}"
    spent, noise = first.noise(base, first.batch)
    average = float((spent * noise).sum() / spent.sum())
    known = math.isfinite(average)
    for curve in curves[1:]:
        truth = curve.reached(level)
        if not math.isfinite(truth):
            continue
        label = f"{alone.group} {curve.batch:g}"
        if known:
            predicted = float((spent * (noise + curve.batch) / (noise + first.batch)).sum())
            far = curve.batch / first.batch
            # How far the noise scale is from the critical batch size: a factor of two either way.
            sigma = math.log(2) * float(curve.batch / (curve.batch + average)) + 0.05
            alone.predictions.append(CheckedPrediction(name, "gradient noise", far, label, predicted, sigma, truth))
        middle = math.sqrt(first.batch * curve.batch)
        for share, more in with_one.items():
            others = [each for each in curves[1:] if each.batch <= share * curve.batch]
            if not others:
                continue
            one = min(others, key=lambda each: abs(math.log(each.batch / middle)))
            measured = np.array([base, one.reached(level)])
            batches = np.array([first.batch, one.batch])
            posterior = fit_target(batches, measured, np.ones(2), noise=average if known else None)
            guess, spread = posterior.predict(curve.batch)
            basis = "gradient noise and one batch" if known else SMALLER_BATCHES
            far = curve.batch / one.batch
            more.predictions.append(CheckedPrediction(name, basis, far, label, guess, spread, truth))
