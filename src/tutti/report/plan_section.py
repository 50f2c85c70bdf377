"""Show a plan or a prediction beside what runs measured: TOML of ``tutti train --config``, or JSON of a command."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.errors import UsageError
from tutti.report.report_sections import ReportRow, ReportSection, ReportTable, number_text, run_key, seconds_text
from tutti.report.run_record import RunRecord, finite, printable

_MOST_ROWS = 200


def plan_section(path: Path, runs: Sequence[RunRecord]) -> ReportSection:
    """Make the HTML report's section on a plan: tables of predictions and options, beside values measured in runs.

    A predicted step time is compared with runs of the same number of devices, and of the same batch, strategy and
    options where the plan states them. Options of the plan are compared with those of each run. Other lists of the plan
    become tables, and single values a folded table.

    Args:
        path: TOML of ``tutti plan --out``, or JSON of ``tutti plan`` or ``tutti simulate`` in a file that ends in
            ``.json``.
        runs: all runs of the report, in the order of the report; the position gives each run its letter.

    Returns:
        A ``ReportSection`` with the title ``The plan``: ``tables``, a list of tables (caption, headings and rows), and
        ``folded``, the table of single values, hidden until the reader opens it, or None if the plan has none.

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
    section = ReportSection("The plan")
    section.tables += [table for table in (_predicted(plan, runs), _followed(plan, runs)) if table is not None]
    section.tables += list(_lists(plan))
    facts: list[ReportRow] = [[(name, name), (value, value)] for name, value in _scalars(plan)]
    if facts:
        section.folded = ReportTable(f"All single values of {printable(path.name)}", ["name", "value"], facts)
    return section


def _predicted(plan: Mapping[str, Any], runs: Sequence[RunRecord]) -> ReportTable | None:
    """Return predicted steps beside the measured ones of runs with the same devices, batch and strategy."""
    rows: list[ReportRow] = []
    for row in _entries(plan):
        whole = "step_seconds" in row  # then ``seconds`` and ``band`` are of the time to the target
        predicted = finite(row.get("step_seconds" if whole else "seconds"))
        if predicted is None or predicted <= 0:
            continue
        for number, run in enumerate(runs):
            measured = run.step_seconds
            if measured is None or not _same(row, run):
                continue
            band = row.get("step_band" if whole else "band")
            ends = [finite(end) for end in band] if isinstance(band, list) else []
            low, high = ends if len(ends) == 2 else (None, None)
            within, said = "no band", "no band"
            if low is not None and high is not None:
                said = f"{seconds_text(low)}–{seconds_text(high)}"
                within = "yes" if low <= measured <= high else "no"
            key = run_key(number)
            rows.append(
                [
                    (key, key),
                    (str(run.devices), float(run.devices or 0)),
                    (seconds_text(predicted), predicted),
                    (said, low if low is not None else -1.0),
                    (seconds_text(measured), measured),
                    (f"{measured / predicted:.2f}", measured / predicted),
                    (within, within),
                ]
            )
    heads = ["run", "devices", "predicted step", "band 90 %", "measured step", "measured ÷ predicted", "within"]
    return ReportTable("Predicted beside measured", heads, rows) if rows else None


def _same(row: Mapping[str, Any], run: RunRecord) -> bool:
    """Return whether a predicted step and a run agree in devices, and in all else that the row states."""
    if run.devices is None or finite(row.get("devices")) != run.devices:
        return False
    batch = finite(run.summary.get("global_batch_size", run.config.get("batch_size")))
    asked = finite(row.get("batch", row.get("batch_size")))
    strategy = run.config.get("strategy", run.summary.get("strategy"))
    options = row.get("options")
    stated = options.items() if isinstance(options, Mapping) else ()
    same = all(run.config.get(name) == value for name, value in stated)
    return same and asked in (None, batch) and row.get("strategy") in (None, strategy)


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
    """Yield a table for each list of tables, such as the plans that were ranked."""
    for name, value in plan.items():
        entries = [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
        heads = list(dict.fromkeys(key for entry in entries for key in entry))
        if heads:
            rows = [[_cell(entry.get(key)) for key in heads] for entry in entries[:_MOST_ROWS]]
            left = f", the first {_MOST_ROWS} of {len(entries):,}" if len(entries) > _MOST_ROWS else ""
            yield ReportTable(f"{printable(name)}{left}", [printable(head) for head in heads], rows)


def _cell(value: Any) -> tuple[str, float | str]:
    number = finite(value)
    if number is not None:
        return number_text(number), number
    text = _text(value)
    return text, text


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
