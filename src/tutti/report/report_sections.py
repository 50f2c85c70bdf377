"""Compose a report's sections from the records of runs: sentences, figures, tables and charts, and what is missing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tutti.config.metric_direction import higher_is_better
from tutti.errors import counted
from tutti.metrics.goodput import CAUSES
from tutti.metrics.timeline import shares, timeline_svg
from tutti.report.report_charts import (
    PARTS,
    ChartSeries,
    ReportChart,
    line_chart,
    scaling_chart,
    stack_chart,
    themed_timeline,
)
from tutti.report.run_record import RunRecord, finite, printable

AXES = {"samples": "samples", "step": "steps", "seconds": "seconds of training"}
_MOST_METRICS = 3
_PATHS = frozenset({"out", "runs", "overwrite", "resume", "log_every"})


ReportRow = list[tuple[str, float | str]]


@dataclass(frozen=True)
class ReportTable:
    """A table of an HTML report; readers of the page can sort it by a column.

    Attributes:
        caption: text above the table.
        heads: headings of the columns.
        rows: cells of each row; a cell is (text that is shown, number or text that it is sorted by).
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[ReportRow]


@dataclass
class ReportSection:
    """A section of an HTML report.

    Attributes:
        title: heading of the section.
        texts: paragraphs above the charts.
        charts, tables: charts and tables in the order in which they are shown.
        folded: a table that is hidden until the reader opens it; None for none.
        notes: sentences of the list at the end of the section.
    """

    title: str
    texts: list[str] = field(default_factory=list)
    charts: list[ReportChart] = field(default_factory=list)
    tables: list[ReportTable] = field(default_factory=list)
    folded: ReportTable | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReportContent:
    """Everything that an HTML report on one or several runs shows.

    Attributes:
        title: title of the page.
        headline: the sentence at the top.
        figures: key figures, each a name and a formatted value, of a report on one run; empty for several.
        legend: letter and name of each run.
        sections: sections with data, in order.
        missing: missing measurements, each a name and a sentence on how to make it.
    """

    title: str
    headline: str
    figures: Sequence[tuple[str, str]]
    legend: Sequence[tuple[str, str]]
    sections: Sequence[ReportSection]
    missing: Sequence[tuple[str, str]]


def compose_report(
    runs: Sequence[RunRecord],
    plan: ReportSection | None = None,
    noise: ReportSection | None = None,
    law: ReportSection | None = None,
    landscape: ReportSection | None = None,
) -> ReportContent:
    """Compose title, headline and sections of an HTML report from the records of one or several runs.

    Sections without data are left out; the report names what is missing, and how to measure it.

    Args:
        runs: content of the run directories, at least one, in the order in which the report names them A, B, ….
        plan: section that compares a plan with the runs.
        noise: section on gradient noise.
        law: section on steps to a target over the batch.
        landscape: section of loss landscapes. For each of these four that is None, the report says that it is missing,
            and how to get it.

    Returns:
        A ``ReportContent``, all texts, charts and tables of the page: ``title``, ``headline``, ``figures`` (pairs of
        name and text, key figures of a single run; empty for several), ``legend`` (pairs of letter and name, one a
        run), ``sections`` (``ReportSection`` objects), and ``missing`` (pairs of name and how to get it).
    """
    composer = _Composer(runs)
    made = [
        composer.troubles(),
        composer.overview(),
        plan,
        composer.convergence(),
        composer.target(),
        composer.step_time(),
        composer.scaling(),
        composer.attempts(),
        composer.goodput(),
        noise,
        law,
        landscape,
        composer.timeline(),
        composer.memory(),
        composer.changes(),
        composer.configuration(),
        composer.environment(),
    ]
    if plan is None:
        composer.missing.append(("a plan", "give the file with --plan: it is shown beside what was measured"))
    if noise is None:
        composer.missing.append(("gradient noise", "no run has recorded it twice: train with --noise-every"))
    if law is None:
        remedy = "give --recipe of tutti noise or --plan of tutti plan, or runs that reached one target at two batches"
        composer.missing.append(("steps to a target over the batch", remedy))
    if landscape is None:
        composer.missing.append(("the loss landscape", "measure it with tutti landscape RUN"))
    tasks = list(dict.fromkeys(run.task for run in runs))
    title = f"{', '.join(tasks)}: {len(runs)} runs" if len(runs) > 1 else f"{tasks[0]}: {runs[0].name}"
    return ReportContent(
        printable(title),
        printable(composer.headline()),
        composer.figures() if len(runs) == 1 else (),
        [(composer.key(number), run.name) for number, run in enumerate(runs)],
        [*(section for section in made if section is not None), composer.basis()],
        composer.missing,
    )


class _Composer:
    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.runs = runs
        self.missing: list[tuple[str, str]] = []
        self.keys = [run_key(number) for number in range(len(runs))]

    def key(self, number: int) -> str:
        return self.keys[number]

    def _numbered(self) -> Iterator[tuple[int, str, RunRecord]]:
        for number, run in enumerate(self.runs):
            yield number, self.keys[number], run

    def headline(self) -> str:
        if len(self.runs) == 1:
            return run_sentence(self.runs[0])
        text = f"{len(self.runs)} runs of {', '.join(dict.fromkeys(run.task for run in self.runs))}"
        ended = sum(run.state == "finished" for run in self.runs)
        text += ", all finished" if ended == len(self.runs) else f", {ended} of them finished"
        aims = {(aim["metric"], aim["value"]) for run in self.runs if (aim := run_target(run)) is not None}
        times = [(seconds, key) for _, key, run in self._numbered() if (seconds := _reached(run)) is not None]
        if len(aims) == 1 and times:
            metric, value = aims.pop()
            seconds, key = min(times)
            said = f"{key} was the first of {len(times)}" if len(times) > 1 else f"only {key} got there"
            return f"{text}. To {metric} {number_text(value)} {said}: {seconds_text(seconds)} of training."
        rates = [(run.rate, key) for _, key, run in self._numbered() if run.rate is not None]
        if rates:
            rate, key = max(rates)
            text += f". {key} trained most samples a second: {number_text(rate)}"
        return f"{text}."

    def figures(self) -> list[tuple[str, str]]:
        return [(name, text) for name, (text, _) in _overview(self.runs[0]).items() if text != "–"]

    def troubles(self) -> ReportSection | None:
        section = ReportSection("What went wrong, or is missing")
        for _, key, run in self._numbered():
            ended = [] if run.state == "finished" else [f"{run.state}"]
            if run.exit_code is None:
                ended = ["no end is recorded: the run is under way, or was killed"]
            said = (*ended, *run.failures, *run.problems, *run.warnings)
            section.notes += [self._of(key, text) for text in said]
        return section if section.notes else None

    def _of(self, key: str, text: str) -> str:
        return f"{key}: {text}" if len(self.runs) > 1 else text

    def overview(self) -> ReportSection | None:
        if len(self.runs) == 1:
            return None
        columns = [_overview(run) for run in self.runs]
        names = [name for name in columns[0] if any(column[name][0] != "–" for column in columns)]
        rows = [
            [(f"{key} {run.name}", key), *(columns[number][name] for name in names)]
            for number, key, run in self._numbered()
        ]
        return ReportSection("Key figures", tables=[ReportTable("Key figures of each run", ["run", *names], rows)])

    def convergence(self) -> ReportSection | None:
        section = ReportSection("Convergence")
        names = list(dict.fromkeys(name for run in self.runs for name in run.held_out))
        drawn = [("loss", "train", "training loss")]
        drawn += [(name, "eval", f"held-out {printable(name)}") for name in names[:_MOST_METRICS]]
        for name, of, label in drawn:
            for axis, axis_label in AXES.items():
                series = [
                    ChartSeries(number, points)
                    for number, _, run in self._numbered()
                    if len(points := run.curve(name, axis, of)) > 1
                ]
                if series:
                    section.charts.append(line_chart(series, axis_label, label, f"{label} over {axis_label}"))
        if not section.charts:
            self.missing.append(("convergence", "it needs two steps or two evaluations in metrics.jsonl"))
            return None
        if not names:
            self.missing.append(("held-out values", "no run has recorded an evaluation: see --eval-every"))
        elif len(names) > _MOST_METRICS:
            self.missing.append((f"charts of {', '.join(map(printable, names[_MOST_METRICS:]))}", "see metrics.jsonl"))
        section.texts.append("Seconds are of training alone, over all starts, without evaluations and saves.")
        return section

    def target(self) -> ReportSection | None:
        section = ReportSection("Time to target")
        rows: list[ReportRow] = []
        for _, key, run in self._numbered():
            aim = run_target(run)
            if aim is None:
                continue
            yes = aim.get("reached") is True
            cells = [(key, key), (f"{aim['metric']} {number_text(aim['value'])}", aim["value"])]
            cells.append(("yes" if yes else "no", "yes" if yes else "no"))
            for name in ("steps", "samples", "seconds", "wall_seconds", "best"):
                value = finite(aim.get(name))
                as_text = seconds_text if "seconds" in name else number_text
                cells.append(("–", float("inf")) if value is None else (as_text(value), value))
            rows.append(cells)
        heads = ["run", "target", "reached", "steps", "samples", "training", "wall clock", "best value"]
        if rows:
            section.tables.append(ReportTable("To the target of --until", heads, rows))
            section.notes.append("A target is reached up to one --eval-every earlier than recorded.")
        else:
            self.missing.append(("time to a target", "train with --until METRIC=VALUE"))
        section.tables += list(self._common())
        return section if section.tables else None

    def _common(self) -> Iterator[ReportTable]:
        """Yield, for each metric of several runs, when each run got to the best value that all of them reached."""
        if len(self.runs) < 2:
            return
        shared = [name for name in self.runs[0].held_out if all(name in run.held_out for run in self.runs)]
        for name in shared[:_MOST_METRICS]:
            higher = higher_is_better(name)
            curves = [run.curve(name, "step", "eval") for run in self.runs]
            if higher is None or not all(curves):
                continue
            sign = 1.0 if higher else -1.0
            value = sign * min(max(sign * y for _, y in curve) for curve in curves)
            rows: list[ReportRow] = []
            for (_, key, run), curve in zip(self._numbered(), curves, strict=True):
                step = next(x for x, y in curve if sign * y >= sign * value)
                cells: list[tuple[str, float | str]] = [(key, key), (number_text(step), step)]
                for axis in ("samples", "seconds"):
                    at = dict(run.curve("step", axis, "eval"))
                    x = next((place for place, found in at.items() if found == step), None)
                    as_text = seconds_text if axis == "seconds" else number_text
                    cells.append(("–", float("inf")) if x is None else (as_text(x), x))
                rows.append(cells)
            caption = f"To held-out {printable(name)} {number_text(value)}, the best value that every run reached"
            yield ReportTable(caption, ["run", "steps", "samples", "training"], rows)

    def step_time(self) -> ReportSection | None:
        section = ReportSection("Time of a step")
        rows: list[ReportRow] = []
        bars, traced = [], []
        for _, key, run in self._numbered():
            if run.timeline:
                found = shares(run.timeline) if any(run.timeline) else []
                parts = {name: 0.0 for each in found for name in each}
                for each in found:
                    for name, value in each.items():
                        parts[name] += value / len(found)
                traced.append((key, _known_parts(parts)))
            if run.step_seconds is None:
                continue
            waited = run.data_seconds
            inner = {"data": 1e3 * (waited or 0.0), "compute": 1e3 * (run.step_seconds - (waited or 0.0))}
            bars.append((key, inner))
            tenth = sorted(step.seconds for step in run.steps)
            low, high = tenth[int(0.1 * len(tenth))], tenth[min(int(0.9 * len(tenth)), len(tenth) - 1)]
            rows.append(
                [
                    (key, key),
                    (seconds_text(run.step_seconds), run.step_seconds),
                    (f"{seconds_text(low)}–{seconds_text(high)}", low),
                    ("–", -1.0) if waited is None else (seconds_text(waited), waited),
                    (f"{len(run.steps):,}", float(len(run.steps))),
                ]
            )
        if bars:
            caption = "median step: waiting for data, and compute with communication"
            section.charts.append(stack_chart(bars, "ms", caption))
            heads = ["run", "median step", "10–90 % of steps", "waited for data", "steps"]
            section.tables.append(ReportTable("Duration of a step, without the first of each start", heads, rows))
            section.notes.append(
                "A run records how long a step took and how long it waited for data; compute and communication are "
                "told apart in traced steps alone (--trace)."
            )
        if traced:
            caption = "share of time by phase in the traced steps, mean over devices"
            section.charts.append(stack_chart(traced, "% of the traced time", caption, share=True))
        else:
            self.missing.append(("compute and communication apart", "train with --trace"))
        if not bars:
            self.missing.append(("the time of a step", "it needs two steps in metrics.jsonl"))
        return section if section.charts else None

    def scaling(self) -> ReportSection | None:
        points = [
            (number, run.devices, run.rate)
            for number, _, run in self._numbered()
            if run.devices is not None and run.rate is not None
        ]
        if len({devices for _, devices, _ in points}) < 2:
            self.missing.append(("scaling over devices", "give runs on different numbers of devices"))
            return None
        least = min(points, key=lambda point: (point[1], -point[2]))
        alone = least[2] / least[1]
        rows: list[ReportRow] = [
            [
                (self.keys[number], self.keys[number]),
                (str(devices), float(devices)),
                (number_text(rate), rate),
                (f"{rate / alone / devices:.0%}", rate / alone / devices),
            ]
            for number, devices, rate in points
        ]
        section = ReportSection("Scaling")
        section.charts.append(scaling_chart(points, "samples/s", "samples a second over devices, with the linear line"))
        heads = ["run", "devices", "samples/s", "of linear"]
        section.tables.append(
            ReportTable(f"Against {self.keys[least[0]]}, the run with the fewest devices", heads, rows)
        )
        differ = [name for name, values in _options(self.runs).items() if _vary(values) and name != "devices"]
        if differ:
            section.notes.append(f"These runs differ in more than devices: {', '.join(differ)}.")
        return section

    def attempts(self) -> ReportSection | None:
        """Return the devices over time of runs on an engine; None without such a run."""
        rows: list[ReportRow] = []
        for _, key, run in self._numbered():
            found = run.summary.get("attempts")
            for number, each in enumerate(map(_mapping, found if isinstance(found, list) else ()), 1):
                devices, first, seconds = (finite(each.get(name)) or 0 for name in ("devices", "first_step", "seconds"))
                nodes = ", ".join(
                    f"{printable(name)}: {_value(count)}" for name, count in _mapping(each.get("nodes")).items()
                )
                ending = printable(each.get("ending", ""))
                row: ReportRow = [(key, key), (str(number), number), (number_text(devices), devices)]
                row += [(nodes, nodes), (number_text(first), first), (seconds_text(seconds), seconds), (ending, ending)]
                rows.append(row)
        if not rows:
            return None
        heads = ["run", "attempt", "devices", "ranks on each node", "from step", "time", "ended by"]
        return ReportSection("Devices over time", tables=[ReportTable("Attempts of each run", heads, rows)])

    def goodput(self) -> ReportSection | None:
        found = [(key, run, run.goodput) for _, key, run in self._numbered() if run.goodput is not None]
        if not found:
            self.missing.append(("goodput", "it needs env.json and the times in metrics.jsonl"))
            return None
        section = ReportSection("Goodput: productive share of the elapsed time")
        bars = [(key, {"productive": each.productive, **each.lost}) for key, _, each in found]
        caption = "elapsed time of each run: productive, and lost by cause"
        section.charts.append(stack_chart(bars, "% of the elapsed time", caption, share=True))
        rows: list[ReportRow] = []
        for key, _, each in found:
            for name, seconds in (("productive", each.productive), *each.lost.items()):
                share = seconds / each.elapsed if each.elapsed > 0 else 0.0
                meaning = CAUSES.get(name, "steps that count, without waiting for data")
                text = (seconds_text(seconds), seconds)
                rows.append([(key, key), (name, name), text, (f"{share:.1%}", share), (meaning, meaning)])
        section.tables.append(ReportTable("Where the time went", ["run", "part", "time", "share", "what counts"], rows))
        section.notes += dict.fromkeys(note for _, _, each in found for note in each.notes)
        return section

    def timeline(self) -> ReportSection | None:
        section = ReportSection("Timeline")
        for _, key, run in self._numbered():
            if any(run.timeline):
                caption = self._of(key, "traced steps, one row a device")
                section.charts.append(themed_timeline(timeline_svg(run.timeline, caption), caption))
        if not section.charts:
            self.missing.append(("a timeline", "train with --trace"))
            return None
        section.notes.append("trace/trace.json in the run directory opens in ui.perfetto.dev.")
        return section

    def memory(self) -> ReportSection | None:
        rows: list[ReportRow] = []
        for _, key, run in self._numbered():
            for rank, *sizes in run.peaks:
                row: ReportRow = [(key, key), (str(rank), rank)]
                row += [("–", -1.0) if size is None else (bytes_text(size), size) for size in sizes]
                rows.append(row)
        if not rows:
            self.missing.append(("memory of a device", "a run records it at its end; --dry-run predicts it"))
            return None
        heads = ["run", "rank", "process, resident", "tensors on the accelerator"]
        section = ReportSection("Memory", tables=[ReportTable("Peak memory of each rank", heads, rows)])
        section.notes.append("The resident set of a process includes Python and all libraries.")
        return section

    def changes(self) -> ReportSection | None:
        if len(self.runs) < 2:
            return None
        section = ReportSection("What changed between the runs")
        rows: list[ReportRow] = []
        for kind, table in (("option", _options(self.runs)), ("environment", _environments(self.runs))):
            for name, values in table.items():
                if _vary(values):
                    rows.append([(name, name), (kind, kind), *((value, value) for value in values)])
        if rows:
            section.tables.append(ReportTable("Only what differs", ["name", "of", *self.keys], rows))
        else:
            section.texts.append("Nothing that they recorded: configuration and environment are the same.")
        return section

    def configuration(self) -> ReportSection | None:
        return self._settings("Configuration", "All options, as in config.toml", _options(self.runs))

    def environment(self) -> ReportSection | None:
        return self._settings("Environment", "As in env.json", _environments(self.runs))

    def _settings(self, title: str, caption: str, table: Mapping[str, Sequence[str]]) -> ReportSection | None:
        if not table:
            self.missing.append((title.lower(), "its file is missing"))
            return None
        rows: list[ReportRow] = [
            [(name, name), *((value, value) for value in values)] for name, values in table.items()
        ]
        heads = ["name", *(self.keys if len(self.runs) > 1 else ["value"])]
        return ReportSection(title, folded=ReportTable(caption, heads, rows))

    def basis(self) -> ReportSection:
        section = ReportSection("What this rests on")
        for _, key, run in self._numbered():
            version = _mapping(run.environment.get("versions")).get("tutti", "an unknown version")
            host = run.environment.get("host", "an unknown host")
            found = f"{counted(run.lines, 'record')} in metrics.jsonl, {len(run.trained):,} of them steps"
            starts = f", {run.resumed + 1} starts" if run.resumed else ""
            text = f"{found}{starts}, written by rank 0 with tutti {version} on {host}"
            section.notes.append(printable(self._of(key, text)))
        section.notes.append("Each figure is of one run: it has no error band, and another seed gives other values.")
        section.notes.append(
            "Times of steps are medians without the first step of each start; seconds are of training alone, "
            "wall clock and goodput count everything."
        )
        return section


def run_key(number: int) -> str:
    """Return the letter, or letters, by which a report names a run; ``number`` counts the report's runs from 0.

    >>> run_key(0), run_key(25), run_key(26)
    ('A', 'Z', 'AA')
    """
    letters = ""
    number += 1
    while number:
        number, place = divmod(number - 1, 26)
        letters = chr(ord("A") + place) + letters
    return letters


def run_sentence(run: RunRecord) -> str:
    """Return a report's headline on one run as text: task, devices, steps, training time, throughput, and how it ended.

    The text names the target if the run has reached it, and the goodput if known. Values that the run has not recorded
    are left out. If no step is recorded, the text says so after task and devices, and nothing else.

    Args:
        run: content of the run directory.
    """
    where = f" on {counted(run.devices, 'device')}" if run.devices else ""
    last = run.trained[-1] if run.trained else {}
    steps, samples = (finite(run.summary.get(name, last.get(of))) for name, of in (("steps", "step"), ("samples",) * 2))
    aim = run_target(run)
    reached = f" to {aim['metric']} {number_text(aim['value'])}" if aim and aim.get("reached") is True else ""
    if steps is None:
        return f"{run.task}{where} has recorded no step."
    trained = f"{number_text(steps)} step{'s' * (steps != 1)}"
    trained += f" ({number_text(samples)} samples)" if samples is not None else ""
    seconds = finite(run.summary.get("seconds", last.get("seconds")))
    trained += f" in {seconds_text(seconds)} of training" if seconds is not None else ""
    text = f"{run.task} trained{reached}{where} for {trained}"
    if run.rate is not None:
        text += f", at {'a median of ' * bool(run.steps)}{number_text(run.rate)} samples a second"
    if run.goodput is not None:
        text += f"; {run.goodput.fraction:.0%} of the elapsed time was productive training (goodput)"
    if run.exit_code is None:
        return f"{text}. No end is recorded."
    return f"{text}." if run.state == "finished" else f"{text}. It ended with {run.state}."


def number_text(value: float) -> str:
    """Format a number for reading: whole numbers with thousands separators, others with four significant digits.

    Numbers from 100 on are rounded to whole ones. From 1e15 on all numbers have four significant digits.

    >>> number_text(12345.0), number_text(0.123456), number_text(461.99), number_text(2.0e-7)
    ('12,345', '0.1235', '462', '2e-07')
    """
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e15 else f"{value:.4g}"


def seconds_text(seconds: float) -> str:
    """Format a duration in ms (below 1 s, rounded to three digits), s (below 600 s), min (below 2 h) or h.

    >>> seconds_text(0.0123), seconds_text(0.9996), seconds_text(6.23), seconds_text(750), seconds_text(9000)
    ('12.3 ms', '1 s', '6.23 s', '12.5 min', '2.5 h')
    """
    if abs(seconds) < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if abs(seconds) < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if abs(seconds) < 7200 else f"{seconds / 3600:,.1f} h"


def bytes_text(size: float) -> str:
    """Format an amount of memory in MiB, with one decimal.

    >>> bytes_text(3 * 2**30)
    '3,072.0 MiB'
    """
    return f"{size / 2**20:,.1f} MiB"


def run_target(run: RunRecord) -> Mapping[str, Any] | None:
    """Return a run's result for the target of ``--until`` from its summary; None if metric or value are missing there.

    Args:
        run: content of the run directory.

    Returns:
        The entry ``target`` of ``summary.json`` by key, such as ``reached`` (bool), ``steps``, ``samples`` and
        ``seconds``, unchecked; ``metric`` is made a printable text and ``value`` a float.
    """
    found = _mapping(run.summary.get("target"))
    value = finite(found.get("value"))
    if value is None or not isinstance(found.get("metric"), str):
        return None
    return {**found, "value": value, "metric": printable(found["metric"])}


def _reached(run: RunRecord) -> float | None:
    aim = run_target(run)
    return finite(aim.get("seconds")) if aim is not None and aim.get("reached") is True else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _overview(run: RunRecord) -> dict[str, tuple[str, float | str]]:
    """Return the key figures of a run by name, each as text and value; a dash where one is unknown."""
    last = run.trained[-1] if run.trained else {}
    aim, summary = run_target(run), run.summary
    unknown: tuple[str, float | str] = ("–", float("inf"))

    def number(value: Any) -> tuple[str, float | str]:
        found = finite(value)
        return unknown if found is None else (number_text(found), found)

    def duration(value: Any) -> tuple[str, float | str]:
        found = finite(value)
        return unknown if found is None else (seconds_text(found), found)

    final = _mapping(summary.get("eval")) or (run.evaluated[-1] if run.evaluated else {})
    strategy = printable(summary.get("strategy", run.config.get("strategy", "–")))
    goodput = run.goodput
    return {
        "end": (run.state, run.state),
        "strategy": (strategy, strategy),
        "devices": number(run.devices),
        "global batch": number(summary.get("global_batch_size", run.config.get("batch_size"))),
        "steps": number(summary.get("steps", last.get("step"))),
        "samples": number(summary.get("samples", last.get("samples"))),
        "training": duration(summary.get("seconds", last.get("seconds"))),
        "step, median": duration(run.step_seconds),
        "samples/s": number(run.rate),
        **{f"held-out {printable(name)}": number(final.get(name)) for name in run.held_out[:_MOST_METRICS]},
        "to the target": unknown
        if aim is None
        else duration(_reached(run))
        if _reached(run)
        else ("not reached", 1e99),
        "goodput": unknown if goodput is None else (f"{goodput.fraction:.1%}", goodput.fraction),
        "parameters": number(summary.get("parameters")),
        "MFU": number(statistics.median(mfu)) if (mfu := _mfu(run)) else unknown,
    }


def _mfu(run: RunRecord) -> list[float]:
    return [y for _, y in run.curve("throughput/device/mfu", "step")]


def _known_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Return shares by the names that have a colour; all others are ``other``."""
    found: dict[str, float] = {}
    for name, value in parts.items():
        known = name if name in PARTS else "other"
        found[known] = found.get(known, 0.0) + value
    return found


def _options(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for run in runs for name in run.config if name not in _PATHS)
    return {printable(name): [_value(run.config.get(name)) for run in runs] for name in names}


def _environments(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    flat = []
    for run in runs:
        versions = _mapping(run.environment.get("versions"))
        rest = {
            name: value for name, value in run.environment.items() if name not in ("versions", "launched", "started")
        }
        flat.append({**{f"version of {name}": value for name, value in versions.items()}, **rest})
    names = dict.fromkeys(name for each in flat for name in each)
    return {printable(name): [_value(each.get(name)) for each in flat] for name in names}


def _value(value: Any) -> str:
    """Return a setting as text.

    >>> _value(None), _value([]), _value(["a", 1]), _value(True), _value({"a": 1})
    ('–', 'none', 'a, 1', 'yes', 'a=1')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(name)}={_value(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    number = finite(value)
    return printable(value) if number is None else f"{number:g}" if abs(number) < 1e6 else f"{number:,.0f}"


def _vary(values: Sequence[str]) -> bool:
    return len(set(values)) > 1
