"""Show the loss landscapes that ``tutti landscape`` has written into run directories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tutti.report.report_charts import ChartSeries, ReportChart, contour_chart, line_chart
from tutti.report.report_sections import ReportRow, ReportSection, ReportTable, number_text, run_key
from tutti.report.run_record import RunRecord, finite, printable

_DENSITY = ("density", "curve")
_SETS = ("training", "held-out")
_MOST_VALUES = 3
_HEADS = ("run", "step", "training loss", "largest eigenvalue", "trace", "ε-sharpness", "SAM sharpness")


def landscape_section(runs: Sequence[RunRecord]) -> ReportSection | None:
    """Make the HTML report's section on loss landscapes: a table and charts of the results of ``tutti landscape``.

    The table has a row for each run with a ``landscape.json``: loss and metrics, largest Hessian eigenvalue, trace and
    sharpness at a checkpoint. Charts show the spectrum's density; loss and metrics along lines, on training and
    held-out samples; and training loss and metrics in a plane around the checkpoint, as far as they were measured.

    Args:
        runs: all runs of the report, in the order of the report; the position gives each run its letter and colour.

    Returns:
        A ``ReportSection`` with the title ``Loss landscape`` and lists of ``tables`` (one), ``charts`` (SVG) and
        ``notes`` (sentences); None if no run has a ``landscape.json``.
    """
    known = [(number, run) for number, run in enumerate(runs) if run.landscape]
    if not known:
        return None
    section = ReportSection("Loss landscape")
    metrics = [(of, name) for of in _SETS for name in _names([_at(run.landscape, of) for _, run in known])]
    metrics = [each for each in metrics if each != ("training", "loss")]
    heads = [*_HEADS, *(f"{of} {printable(name)}" for of, name in metrics)]
    rows = [_row(number, run.landscape, metrics) for number, run in known]
    section.tables.append(ReportTable("Around the checkpoint", heads, rows))
    # In pairs, so that a metric is drawn beside the loss.
    for number, run in known:
        section.charts += _plane(run_key(number), _at(run.landscape, "plane"))
    for part, x in (("line", "distance in filter norms"), ("between", "from this run (0) to the other (1)")):
        section.charts += _along(known, part, x)
    density = [
        ChartSeries(number, points)
        for number, run in known
        if len(
            points := _points(_at(run.landscape, *_DENSITY, "eigenvalues"), _at(run.landscape, *_DENSITY, "density"))
        )
        > 1
    ]
    if density:
        caption = "density over eigenvalue of the Hessian"
        section.charts.append(line_chart(density, "eigenvalue of the Hessian", "density", caption, scale="log"))
    for number, run in known:
        taken = finite(run.landscape.get("step"))
        last = max((step for line in run.trained if (step := finite(line.get("step"))) is not None), default=None)
        if taken is not None and last is not None and taken != last:
            section.notes.append(f"{run_key(number)}: the checkpoint is of step {number_text(taken)}, not of the end.")
    section.notes.append("Sharpness depends on the scale of the parameters: it compares models of one architecture.")
    return section


def _along(known: Sequence[tuple[int, RunRecord]], part: str, x: str) -> Iterator[ReportChart]:
    """Yield a chart of loss, and of each metric, along a line: in training, and thin on held-out samples."""
    names = _names([_at(run.landscape, part, of) for _, run in known for of in _SETS])
    for name in names[:_MOST_VALUES]:
        series = [
            ChartSeries(number, points, thin=of == "held-out")
            for number, run in known
            for of in _SETS
            if len(points := _points(_at(run.landscape, part, "offsets"), _at(run.landscape, part, of, name))) > 1
        ]
        if series:
            y = printable(name)
            sets = "training" + " and, thin, held-out" * any(each.thin for each in series)
            yield line_chart(series, x, y, f"{sets} {y} over {x}")


def _plane(key: str, found: Any) -> Iterator[ReportChart]:
    """Yield a chart of the loss in the plane, and of each metric, whose lines are at even distances."""
    offsets = _numbers(_at(found, "offsets"))
    for name in _names([_at(found, "training")])[:_MOST_VALUES]:
        rows = _at(found, "training", name)
        values = [_numbers(row) for row in rows] if isinstance(rows, list) else []
        known = [value for row in values for value in row if math.isfinite(value)]
        levels = _numbers(_at(found, "levels")) if name == "loss" else _even(known)
        if len(offsets) > 1 and known and levels and [len(row) for row in values] == [len(offsets)] * len(offsets):
            caption = f"training {printable(name)} of {key} in a plane of two filter-normalised directions"
            yield contour_chart(offsets, values, levels, caption)


def _even(values: Sequence[float]) -> list[float]:
    """Return the heights of contour lines, evenly spaced within the values; none if all are equal.

    >>> _even([0.0, 1.0, 0.5])[:2]
    [0.1, 0.2]
    """
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    return [low + (high - low) * part / 10 for part in range(1, 10)] if high > low else []


def _names(found: Sequence[Any]) -> list[str]:
    """Return the names of the values in tables of the landscape, ``loss`` first."""
    names = dict.fromkeys(name for table in found if isinstance(table, Mapping) for name in table)
    return sorted(names, key=lambda name: name != "loss")


def _row(number: int, found: Mapping[str, Any], metrics: Sequence[tuple[str, str]]) -> ReportRow:
    first = _at(found, "eigenvalues")
    values = (
        found.get("step"),
        _at(found, "training", "loss"),
        first[0].get("value") if isinstance(first, list) and first and isinstance(first[0], dict) else None,
        _at(found, "trace", "value"),
        _at(found, "sharpness", "epsilon_sharpness_percent"),
        _at(found, "sharpness", "sam_sharpness"),
    )
    row: ReportRow = [(run_key(number), run_key(number))]
    units = ["", "", "", "", " %", "", *("" for _ in metrics)]
    for value, unit in zip([*values, *(_at(found, *metric) for metric in metrics)], units, strict=True):
        known = finite(value)
        row.append(("–", float("inf")) if known is None else (f"{number_text(known)}{unit}", known))
    return row


def _at(found: Any, *names: str) -> Any:
    """Return the entry of nested tables; None where a table or a name is missing."""
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _numbers(values: Any) -> list[float]:
    """Return a list of numbers, with NaN for others; an empty one for anything but a list."""
    known = [finite(value) for value in values] if isinstance(values, list) else []
    return [float("nan") if value is None else value for value in known]


def _points(across: Any, up: Any) -> list[tuple[float, float]]:
    """Return the pairs of two lists of numbers, without those where one is missing."""
    return [(x, y) for x, y in zip(_numbers(across), _numbers(up), strict=False) if math.isfinite(x + y)]
