"""Show a plan or a prediction beside what runs measured: TOML of ``tutti train --config``, or JSON of a command."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.errors import UsageError
from tutti.report.report_sections import (
    ReportRow,
    ReportSection,
    ReportTable,
    bytes_text,
    number_text,
    run_key,
    run_target,
    seconds_text,
)
from tutti.report.run_record import RunRecord, finite, printable

_MOST_ROWS = 200
_COMMENT = '# {"format": "tutti plan"'
_MEMORY = "memory of a device"

Cell = tuple[str, float | str]


@dataclass(frozen=True)
class ReportedPlan:
    """A plan or a prediction, as read from a file for a report.

    Attributes:
        name: name of the file.
        options: options of ``tutti train`` that the plan sets, by name; of a JSON file all its entries.
        facts: the JSON object of ``tutti plan`` or ``tutti simulate``; empty for a TOML file of options alone.
    """

    name: str
    options: Mapping[str, Any]
    facts: Mapping[str, Any]


def read_plan(path: Path) -> ReportedPlan:
    """Read a plan, or a prediction of step times, from the file that a report is to show beside its runs.

    Args:
        path: TOML of ``tutti plan --out``, which holds the plan's runners-up as JSON in a comment, or another TOML file
            of options of ``tutti train``; or JSON of ``tutti plan`` or ``tutti simulate`` in a file that ends in
            ``.json``.

    Returns:
        A ``ReportedPlan``: ``name`` of the file, ``options`` of ``tutti train`` that it sets, and ``facts``, the JSON
        object of the plan or prediction (empty for a TOML file of options alone).

    Raises:
        UsageError: the file is missing, no TOML or JSON table, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
        plan = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UsageError("there is no plan", where=printable(path), why=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "this is no plan",
            where=printable(path),
            why=printable(error),
            remedy="give plan.toml, or JSON in a file that ends in .json",
        ) from error
    if not isinstance(plan, dict) or not plan:
        raise UsageError("this is no plan", where=printable(path), why="it is not a table with entries")
    return ReportedPlan(printable(path.name), plan, plan if path.suffix == ".json" else _commented(text))


def plan_section(plan: ReportedPlan, runs: Sequence[RunRecord]) -> ReportSection:
    """Make the HTML report's section on a plan, with its runners-up and its predictions beside measured values.

    Runners-up have the reason why they take longer. A prediction is compared with runs of the same number of devices,
    and of the same batch, strategy and options where the plan states them. A table compares the plan's options with
    each run's. Lists in the plan become tables, and its single values one folded table.

    Args:
        plan: the plan.
        runs: all runs of the report, in the order of the report; the position gives each run its letter.

    Returns:
        A ``ReportSection`` with the title ``The plan``: ``texts``, the plan's headline if it has one; ``tables``, a
        list of tables (caption, headings and rows); ``folded``, the table of single values, hidden until the reader
        opens it, or None if the plan has none; and ``notes``, sentences on what the tables compare.
    """
    section = ReportSection("The plan")
    facts = plan.facts
    headline = facts.get("headline")
    if isinstance(headline, str) and headline:
        section.texts.append(f"{printable(headline[:1].upper() + headline[1:])}.")
    predicted = _predicted(plan, runs)
    section.tables += [
        table for table in (_ranked(facts), predicted, _followed(plan.options, runs)) if table is not None
    ]
    if predicted is None:
        section.notes.append("No run has the devices, batch and strategy of a prediction in this plan.")
    elif any(row[1][1] == _MEMORY for row in predicted.rows):
        section.notes.append(
            "Predicted memory is of tensors; on a CPU the measured one is of the whole process, with its libraries."
        )
    section.tables += list(_lists(facts))
    single = {**({} if plan.options is facts else plan.options), **facts}
    rows: list[ReportRow] = [[(name, name), (value, value)] for name, value in _scalars(single)]
    if rows:
        section.folded = ReportTable(f"All single values of {plan.name}", ["name", "value"], rows)
    return section


def _commented(text: str) -> dict[str, Any]:
    """Return the JSON object that a comment of ``plan.toml`` holds; an empty one without such a comment."""
    for line in text.splitlines():
        if line.startswith(_COMMENT):
            try:
                found = json.loads(line.removeprefix("# "))
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                return found
    return {}


def _ranked(facts: Mapping[str, Any]) -> ReportTable | None:
    """Return the plans of ``tutti plan``: the chosen one, those with a mark, then the others, each with its reason."""
    plans = facts.get("plans")
    found = [each for each in plans if isinstance(each, Mapping)] if isinstance(plans, list) else []
    if facts.get("format") != "tutti plan" or not found:
        return None
    place = facts.get("chosen")
    chosen = plans[place] if isinstance(plans, list) and isinstance(place, int) and 0 <= place < len(plans) else None
    found.sort(key=lambda each: (each is not chosen, not each.get("marks")))
    rows: list[ReportRow] = []
    for each in found[:_MOST_ROWS]:
        lost = each.get("lost")
        marks = ["chosen"] * (each is chosen) + (each["marks"] if isinstance(each.get("marks"), list) else [])
        why = printable(lost.get("text", "")) if isinstance(lost, Mapping) else ""
        options, said = _text(each.get("options") or {}), ", ".join(map(printable, marks))
        row: ReportRow = [_cell(each.get("devices")), _cell(each.get("batch")), _cell(each.get("strategy"))]
        row += [(options or "–", options), _duration(each.get("step_seconds")), _cell(each.get("samples"))]
        row += [_duration(each.get("seconds")), _band_cell(each.get("band"), _duration)]
        row += [_cell(each.get("cost")), (said or "–", said), (why or "–", why)]
        rows.append(row)
    heads = ["devices", "batch", "strategy", "options", "step", "samples", "time to target", "band 90 %", "cost"]
    left = f", the first {_MOST_ROWS} of {len(found):,}" if len(found) > _MOST_ROWS else ""
    return ReportTable(f"Plans, and why they lost{left}", [*heads, "is", "why not"], rows)


def _predicted(plan: ReportedPlan, runs: Sequence[RunRecord]) -> ReportTable | None:
    """Return predicted values beside the measured ones of runs with the same devices, batch and strategy."""
    rows: list[ReportRow] = []
    for number, run in enumerate(runs):
        same = [row for row in _entries(plan.facts) if _same(row, run)]
        # Of plans that the run has followed, the plan that states most of its options is meant.
        most = max((len(_options(row)) for row in same), default=0)
        for row in same:
            if len(_options(row)) == most:
                rows += _compared(row, number, run, plan.facts.get("target"))
    heads = ["run", "value", "devices", "predicted", "band 90 %", "measured", "measured ÷ predicted", "within"]
    return ReportTable("Predicted beside measured", heads, rows) if rows else None


def _compared(row: Mapping[str, Any], number: int, run: RunRecord, target: Any) -> Iterator[ReportRow]:
    """Yield a table row for each value of a run that a plan has predicted."""
    of_plan = "step_seconds" in row  # then ``seconds`` and ``band`` are of the time to the target
    values = [("step", row.get("step_seconds"), row.get("step_band"), run.step_seconds, _duration)]
    if not of_plan:
        values = [("step", row.get("seconds"), row.get("band"), run.step_seconds, _duration)]
    aim = run_target(run)
    wanted = (printable(target.get("metric")), finite(target.get("value"))) if isinstance(target, Mapping) else None
    if of_plan and aim is not None and aim.get("reached") is True and (aim["metric"], aim["value"]) == wanted:
        samples, seconds = finite(aim.get("samples")), finite(aim.get("seconds"))
        values.append(("samples to the target", row.get("samples"), row.get("samples_band"), samples, _cell))
        # A run's seconds to its target are those of training alone.
        predicted, band = _training(row)
        values.append(("time to the target", predicted, band, seconds, _duration))
    memory = row.get("memory")
    if isinstance(memory, Mapping):
        values.append((_MEMORY, memory.get("total"), None, run.peak_memory, _bytes_cell))
    key = run_key(number)
    for name, said, band, measured, shown in values:
        predicted = finite(said)
        if predicted is None or predicted <= 0 or measured is None:
            continue
        ends: list[float | None] = [finite(end) for end in band] if isinstance(band, list) else []
        within = "no band"
        if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
            within = "yes" if ends[0] <= measured <= ends[1] else "no"
        yield [
            (key, key),
            (name, name),
            (str(run.devices), float(run.devices or 0)),
            shown(predicted),
            _band_cell(band, shown),
            shown(measured),
            (f"{measured / predicted:.2f}", measured / predicted),
            (within, within),
        ]


def _training(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return seconds and band of training to the target, of a plan whose time may include start and evaluations."""
    whole, training, band = finite(row.get("seconds")), finite(row.get("training_seconds")), row.get("band")
    if whole is None or training is None:
        return row.get("seconds"), band
    ends = [finite(end) for end in band] if isinstance(band, list) else []
    return training, [end - (whole - training) for end in ends if end is not None] or None


def _same(row: Mapping[str, Any], run: RunRecord) -> bool:
    """Return whether a predicted step and a run agree in devices, and in all else that the row states."""
    if run.devices is None or finite(row.get("devices")) != run.devices:
        return False
    batch = finite(run.summary.get("global_batch_size", run.config.get("batch_size")))
    asked = finite(row.get("batch", row.get("batch_size")))
    strategy = run.config.get("strategy", run.summary.get("strategy"))
    same = all(run.config.get(name) == value for name, value in _options(row).items())
    return same and asked in (None, batch) and row.get("strategy") in (None, strategy)


def _options(row: Mapping[str, Any]) -> Mapping[str, Any]:
    found = row.get("options")
    return found if isinstance(found, Mapping) else {}


def _followed(plan: Mapping[str, Any], runs: Sequence[RunRecord]) -> ReportTable | None:
    """Return the plan's options beside those of the runs, if some are options that the runs have."""
    names = [name for name in plan if any(name in run.config for run in runs)]
    if not names:
        return None
    columns = [[str(source.get(name, "–")) for name in names] for source in (plan, *(run.config for run in runs))]
    rows: list[ReportRow] = [
        [(text, text) for text in map(printable, row)] for row in zip(names, *columns, strict=True)
    ]
    return ReportTable("Planned options", ["option", "plan", *(run_key(number) for number in range(len(runs)))], rows)


def _entries(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for value in plan.values():
        if isinstance(value, list):
            yield from (entry for entry in value if isinstance(entry, Mapping))


def _lists(plan: Mapping[str, Any]) -> Iterator[ReportTable]:
    """Yield a table for each list of tables but the plans of ``tutti plan``, which have a table of their own."""
    for name, value in plan.items():
        if name == "plans" and plan.get("format") == "tutti plan":
            continue
        entries = [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
        heads = list(dict.fromkeys(key for entry in entries for key in entry))
        if heads:
            rows = [[_cell(entry.get(key)) for key in heads] for entry in entries[:_MOST_ROWS]]
            left = f", the first {_MOST_ROWS} of {len(entries):,}" if len(entries) > _MOST_ROWS else ""
            yield ReportTable(f"{printable(name)}{left}", [printable(head) for head in heads], rows)


def _cell(value: Any) -> Cell:
    number = finite(value)
    if number is not None:
        return number_text(number), number
    text = _text(value)
    return text, text


def _duration(value: Any) -> Cell:
    number = finite(value)
    return ("–", float("inf")) if number is None else (seconds_text(number), number)


def _bytes_cell(value: Any) -> Cell:
    number = finite(value)
    return ("–", float("inf")) if number is None else (bytes_text(number), number)


def _band_cell(band: Any, shown: Callable[[Any], Cell]) -> Cell:
    """Return a band as text of both ends, sorted by the low one."""
    ends = [finite(end) for end in band] if isinstance(band, list) else []
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return "no band", -1.0
    return f"{shown(ends[0])[0]}–{shown(ends[1])[0]}", ends[0]


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(name)} {_cell(inner)[0]}" for name, inner in value.items())
    return ", ".join(_cell(inner)[0] for inner in value) if isinstance(value, list) else printable(value)


def _scalars(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in plan.items():
        if not (isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value)):
            yield printable(name), _cell(value)[0]
