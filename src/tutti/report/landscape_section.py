"""Show the loss landscapes that ``tutti landscape`` has written into run directories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tutti.report.report_charts import ChartSeries, contour_chart, line_chart
from tutti.report.report_sections import ReportRow, ReportSection, ReportTable, number_text, run_key
from tutti.report.run_record import RunRecord, finite, printable

_HEADS = ("run", "step", "training loss", "largest eigenvalue", "trace", "ε-sharpness", "SAM sharpness")


def landscape_section(runs: Sequence[RunRecord]) -> ReportSection | None:
    """Make the HTML report's section on loss landscapes: a table and charts of what ``tutti landscape`` measured.

    The table has a row for each run with a ``landscape.json``: training loss, largest Hessian eigenvalue, trace and
    sharpness at a checkpoint. Charts show the spectrum's density, and the loss along lines and in a plane around the
    checkpoint, as far as they were measured.

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
    section.tables.append(ReportTable("Around the checkpoint", _HEADS, [_row(n, run.landscape) for n, run in known]))
    curves = (
        ("eigenvalue of the Hessian", "density", ("density", "curve", "eigenvalues"), ("density", "curve", "density")),
        ("distance in filter norms", "training loss", ("line", "offsets"), ("line", "training", "loss")),
        (
            "from this run (0) to the other (1)",
            "training loss",
            ("between", "offsets"),
            ("between", "training", "loss"),
        ),
    )
    for x, y, across, up in curves:
        series = [
            ChartSeries(number, points)
            for number, run in known
            if len(points := _points(_at(run.landscape, *across), _at(run.landscape, *up))) > 1
        ]
        if series:
            scale = "log" if y == "density" else "linear"
            section.charts.append(line_chart(series, x, y, f"{y} over {x}", scale=scale))
    for number, run in known:
        offsets, levels = (_numbers(_at(run.landscape, "plane", name)) for name in ("offsets", "levels"))
        rows = _at(run.landscape, "plane", "training", "loss")
        values = [_numbers(row) for row in rows] if isinstance(rows, list) else []
        if len(offsets) > 1 and levels and [len(row) for row in values] == [len(offsets)] * len(offsets):
            caption = f"training loss of {run_key(number)} in a plane of two filter-normalised directions"
            section.charts.append(contour_chart(offsets, values, levels, caption))
    for number, run in known:
        taken = finite(run.landscape.get("step"))
        last = max((step for line in run.trained if (step := finite(line.get("step"))) is not None), default=None)
        if taken is not None and last is not None and taken != last:
            section.notes.append(f"{run_key(number)}: the checkpoint is of step {number_text(taken)}, not of the end.")
    section.notes.append("Sharpness depends on the scale of the parameters: it compares models of one architecture.")
    return section


def _row(number: int, found: Mapping[str, Any]) -> ReportRow:
    first = _at(found, "eigenvalues")
    values = (
        *(found.get("step"), _at(found, "training", "loss")),
        first[0].get("value") if isinstance(first, list) and first and isinstance(first[0], dict) else None,
        *(_at(found, "trace", "value"), _at(found, "sharpness", "epsilon_sharpness_percent")),
        _at(found, "sharpness", "sam_sharpness"),
    )
    row: ReportRow = [(run_key(number), run_key(number))]
    for head, value in zip(_HEADS[1:], values, strict=True):
        known = finite(value)
        unit = " %" * (head == "ε-sharpness")
        row.append(("–", float("inf")) if known is None else (f"{printable(number_text(known))}{unit}", known))
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
