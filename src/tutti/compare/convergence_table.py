"""Format the convergence table as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from tutti.compare.ladder import Ladder
from tutti.compare.verdict import ACCURACY, RungResult, format_metric, is_fraction
from tutti.config.metric_direction import Metric

HEADINGS = ("rung", "updates", "samples", "training", "held out", "range", "seeds", "time", "samples/s")


def cells(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric = ACCURACY) -> list[tuple[str, ...]]:
    """Return one tuple of ``HEADINGS`` a rung, in the ladder's order.

    Args:
        ladder: the ladder.
        rows: results by rung; a rung without finished runs is shown as dashes.
        metric: the metric that is compared.
    """
    found = []
    fraction = is_fraction(rows, metric)
    for rung in ladder.rungs:
        row = rows.get(rung.name)
        if row is None:
            found.append((rung.name, *("–" for _ in HEADINGS[1:])))
            continue
        half = format_metric(row.spread / 2, fraction)
        found.append(
            (
                rung.name,
                f"{row.average('updates'):,.0f}",
                f"{row.average('samples'):,.0f}",
                format_metric(row.average("training"), fraction),
                format_metric(row.mean, fraction),
                f"± {half}" if len(row.outcomes) > 1 else "one seed",
                str(len(row.outcomes)),
                f"{row.average('seconds'):,.0f} s",
                f"{row.average('samples_per_second'):,.0f}",
            )
        )
    return found


def plain_table(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric = ACCURACY) -> str:
    """Return the table as columns of text; its range is half the distance between the best and the worst seed."""
    lines = [HEADINGS, *cells(ladder, rows, metric)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            f"{text:<{w}}" if i == 0 else f"{text:>{w}}" for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def markdown(
    ladder: Ladder, rows: Mapping[str, RungResult], sentences: list[str], command: str, metric: Metric = ACCURACY
) -> str:
    """Return table, changes of each rung and verdict as Markdown.

    Args:
        ladder: the ladder.
        rows: results by rung.
        sentences: the verdict.
        command: command line that repeats the comparison.
        metric: the metric that is compared.
    """
    lines = [f"# {ladder.name}", "", ladder.summary, "", f"`{command}`", "", "| " + " | ".join(HEADINGS) + " |"]
    lines.append("|---|" + "---:|" * (len(HEADINGS) - 1))
    lines += ["| " + " | ".join(line) + " |" for line in cells(ladder, rows, metric)]
    lines += ["", "What each rung changes:", ""]
    for rung in ladder.rungs:
        changes = ", ".join(f"`{key} = {value}`" for key, value in rung.changes.items())
        lines.append(f"- **{rung.name}**" + (f" (over {rung.parent})" if rung.parent else "") + f": {changes}")
    lines += ["", "Verdict:", "", *(f"- {sentence}" for sentence in sentences), ""]
    return "\n".join(lines)


def as_csv(ladder: Ladder, rows: Mapping[str, RungResult]) -> str:
    """Return CSV with one line a finished run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("seed", "held_out", "training", "updates", "samples", "seconds", "samples_per_second", "weights_sha256")
    writer.writerow(("rung", "from", *names))
    for rung in ladder.rungs:
        for outcome in rows[rung.name].outcomes if rung.name in rows else ():
            writer.writerow((rung.name, rung.parent or "", *(getattr(outcome, name) for name in names)))
    return text.getvalue()
