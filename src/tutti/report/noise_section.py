"""Show the gradient noise scale of runs beside their batches, and steps to a target over the batch by E(B)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tutti.report.report_charts import ChartSeries, band_chart, law_chart
from tutti.report.report_sections import ReportRow, ReportSection, ReportTable, number_text, run_key, run_target
from tutti.report.run_record import RunRecord, finite
from tutti.report.target_law import TargetLaw

_KINDS = (
    ("noise/scale", "noise/low", "noise/high", "noise scale"),
    ("noise/adam/scale", "noise/adam/low", "noise/adam/high", "noise scale by Adam's preconditioner"),
    ("noise_scale", "", "", "noise scale of AdaScale"),
)
"""Names in ``metrics.jsonl`` of each kind of noise scale and the ends of its band, and what it is called."""


def noise_section(runs: Sequence[RunRecord]) -> ReportSection | None:
    """Make the HTML report's section on gradient noise: the noise scale of each run with its band, beside the batch.

    Each kind of noise scale that the runs have recorded gets a chart: of the gradient, of the gradient scaled by Adam's
    preconditioner (both from ``--noise-every``), and from ``--lr-scale adascale``, which has no band.

    Args:
        runs: all runs of the report, in the order of the report; the position gives each run its letter and colour.

    Returns:
        A ``ReportSection`` with the title ``Gradient noise``, ``charts`` (SVG) and ``tables`` (one: the last noise
        scale of each run, its 90 % band and the batch); None if no run has recorded a noise scale above 0 twice.
    """
    section = ReportSection("Gradient noise")
    rows: list[ReportRow] = []
    for name, low, high, label in _KINDS:
        series = []
        for number, run in enumerate(runs):
            points = run.curve(name, "samples")
            if sum(scale > 0 for _, scale in points) < 2:
                continue
            band = _band(run, name, low, high)
            series.append(ChartSeries(number, points, band))
            rows.append(_row(number, run, label, points[-1][1], band[-1][1:] if band else None))
        if series:
            drawn = {each.number for each in series}
            caption = f"{label} over samples" + ", with its 90 % band" * any(each.band for each in series)
            levels = _batches([(n, run) for n, run in enumerate(runs) if n in drawn])
            section.charts.append(band_chart(series, "samples trained", "noise scale, samples", caption, levels))
    if not section.charts:
        return None
    heads = ["run", "of", "noise scale", "band 90 %", "batch", "batch ÷ noise scale"]
    section.tables.append(ReportTable("At the last measured step, in samples", heads, rows))
    section.notes.append(
        "Where the noise scale is well above the batch, a larger batch takes fewer steps; well below it, about as many "
        "steps, each of more samples."
    )
    return section


def target_law_section(runs: Sequence[RunRecord], law: TargetLaw | None) -> ReportSection | None:
    """Make the HTML report's section on steps and samples to a target over the batch: measured, and by the law E(B).

    The law is E(B) = E_min(1 + B/B_crit) samples, so E(B) ÷ B steps. Measured points are the report's runs that reached
    the target, and the runs in the law's file. Without a law, the runs must have reached one target with two batch
    sizes.

    Args:
        runs: all runs of the report, in the order of the report; the position gives each run its letter and colour.
        law: the law, of a recipe or a plan; None for none.

    Returns:
        A ``ReportSection`` with the title ``Steps to the target over the batch``, ``charts`` (two: steps, and samples),
        ``tables`` (one: measured beside the law) and ``notes`` (sentences on what is left out); None without a law if
        fewer than two batches are measured.
    """
    section = ReportSection("Steps to the target over the batch")
    measured: list[tuple[int | None, float, float, float]] = []  # run, batch, steps, samples
    aims = []
    for number, run in enumerate(runs):
        aim, batch = run_target(run), finite(run.summary.get("global_batch_size"))
        samples = finite((aim or {}).get("samples"))
        if aim is None or aim.get("reached") is not True or batch is None or batch < 1 or not samples or samples < 1:
            continue
        if run.summary.get("batch_growth") is not None:
            section.notes.append(f"{run_key(number)} is not shown: its batch grows.")
        elif law is not None and (aim["metric"], aim["value"]) != (law.metric, law.value):
            section.notes.append(
                f"{run_key(number)} is not shown: it was trained to {_aim(aim['metric'], aim['value'])}."
            )
        else:
            measured.append((number, batch, finite(aim.get("steps")) or samples / batch, samples))
            aims.append((aim["metric"], aim["value"]))
    if law is None and (len(set(aims)) != 1 or len({batch for _, batch, *_ in measured}) < 2):
        return None
    metric, value = (law.metric, law.value) if law is not None else aims[0]
    if law is not None:
        known = {batch for _, batch, *_ in measured}
        measured += [(None, batch, samples / batch, samples) for batch, samples in law.measured if batch not in known]
        text = f"The line is E(B) = E_min(1 + B/B_crit) of {law.origin}, with draws of its posterior from 5 to 95 %."
        others = any(place is None for place, *_ in measured)
        section.texts.append(text + " Open circles are runs that this report does not show." * others)
        section.notes.append(
            "A run is shown at the evaluation that met the target; the law counts to the middle between this "
            "evaluation and its predecessor."
        )
        if law.basis:
            section.notes.append(f"The law rests on: {law.basis}.")
    else:
        section.notes.append("No law is drawn: give --recipe of tutti noise, or --plan of tutti plan.")
    curve = [] if law is None else law.line([batch for _, batch, *_ in measured])
    level = None if law is None else ("B_crit", law.critical_batch)
    aim_text = _aim(metric, value)
    for unit, by in (("steps", 1), ("samples", 0)):
        line = [(b, middle / b**by, low / b**by, high / b**by) for b, middle, low, high in curve]
        points = [(place, b, steps if by else samples) for place, b, steps, samples in measured]
        caption = f"{unit} to {aim_text} over the batch"
        section.charts.append(law_chart(line, points, unit, caption, level))
    rows: list[ReportRow] = []
    for place, batch, steps, samples in measured:
        key = "–" if place is None else run_key(place)
        row: ReportRow = [(key, key), (number_text(batch), batch), (number_text(steps), steps)]
        row.append((number_text(samples), samples))
        if law is not None:
            said = law.samples_at(batch)
            row += [(number_text(said), said), (f"{samples / said:.2f}", samples / said)]
        rows.append(row)
    if rows:
        heads = [
            "run",
            "batch",
            "steps",
            "samples",
            *(["samples by E(B)", "measured ÷ E(B)"] if law is not None else []),
        ]
        section.tables.append(ReportTable(f"To {aim_text}", heads, rows))
    return section


def _aim(metric: str, value: float) -> str:
    return f"{metric} {number_text(value)}"


def _band(run: RunRecord, name: str, low: str, high: str) -> list[tuple[float, float, float]]:
    """Return (samples, low, high) of each record with a noise scale and its band; null is an unbounded high end."""
    found = []
    for line in run.trained:
        samples, scale, least, most = (finite(line.get(key)) for key in ("samples", name, low, high))
        if samples is not None and scale is not None and least is not None:
            found.append((samples, least, math.inf if most is None else most))
    return found


def _row(number: int, run: RunRecord, label: str, scale: float, band: tuple[float, float] | None) -> ReportRow:
    key, batch = run_key(number), finite(run.summary.get("global_batch_size"))
    row: ReportRow = [(key, key), (label, label), (number_text(scale), scale)]
    if band is None:
        row.append(("no band", -1.0))
    else:
        high = number_text(band[1]) if math.isfinite(band[1]) else "∞"
        row.append((f"{number_text(band[0])}–{high}", band[0]))
    ratio = None if batch is None or scale <= 0 else batch / scale
    row.append(("–", -1.0) if batch is None else (number_text(batch), batch))
    row.append(("–", -1.0) if ratio is None else (f"{ratio:.3g}", ratio))
    return row


def _batches(runs: Sequence[tuple[int, RunRecord]]) -> list[tuple[str, float]]:
    """Return label and size of each batch of the runs; runs whose batch grows have none."""
    found: dict[float, list[str]] = {}
    for number, run in runs:
        batch = finite(run.summary.get("global_batch_size", run.config.get("batch_size")))
        if batch is not None and batch > 0 and run.summary.get("batch_growth") is None:
            found.setdefault(batch, []).append(run_key(number))
    several = len(found) > 1
    return [(f"batch of {', '.join(keys)}" if several else "batch", batch) for batch, keys in found.items()]
