"""Format the convergence table as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping

from tutti.compare.ladder import Ladder
from tutti.compare.verdict import ACCURACY, RungResult, format_metric, is_fraction
from tutti.config.metric_direction import Metric

HEADINGS = ("rung", "updates", "samples", "training", "held out", "range", "seeds", "time", "samples/s")
TO_TARGET = ("to target", "steps to it", "samples to it", "time to it")
"""Further headings of a ladder whose runs have a target: seeds that reached it, and medians until then."""


def headings(ladder: Ladder) -> tuple[str, ...]:
    """Return the column headings of the table that compares training configurations (rungs).

    Args:
        ladder: the ladder, a series of rungs.

    Returns:
        ``rung``, ``updates``, ``samples``, ``training``, ``held out``, ``range``, ``seeds``, ``time`` and
        ``samples/s``. If a rung has a target (``--until``), four more: ``to target``, ``steps to it``, ``samples to
        it``, ``time to it``.
    """
    return HEADINGS + TO_TARGET if any(rung.config.target_text for rung in ladder.rungs) else HEADINGS


def cells(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric = ACCURACY) -> list[tuple[str, ...]]:
    """Return the rows of the table that compares training configurations (rungs), as formatted texts.

    Numbers are means over the seeds, except these: ``range`` is half the difference between the largest and the
    smallest held-out value (``± …``, or ``one seed``), and ``seeds`` the number of runs. Of the columns about a target
    (``--until``), ``to target`` says how many seeds reached it (``2 of 3``), and the others are medians, with a dash
    where half of the seeds or more missed it.

    Args:
        ladder: the ladder, a series of rungs.
        rows: results by rung name; a rung without finished runs is shown as dashes.
        metric: the metric that is compared.

    Returns:
        One tuple for each rung, in the ladder's order, with a text for each column of ``headings``; no heading row.
    """
    found = []
    fraction = is_fraction(rows, metric)
    names = headings(ladder)
    for rung in ladder.rungs:
        row = rows.get(rung.name)
        if row is None:
            found.append((rung.name, *("–" for _ in names[1:])))
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
                *(_to_target(row) if names != HEADINGS else ()),
            )
        )
    return found


def _to_target(row: RungResult) -> tuple[str, ...]:
    """Return the cells of ``TO_TARGET``; dashes for a rung without a target."""
    if row.reached is None:
        return ("–",) * len(TO_TARGET)
    values = [row.to_target(name) for name in ("steps", "samples", "seconds")]
    forms = (",.0f", ",.0f", ",.1f")
    texts = [f"{value:{form}}" if math.isfinite(value) else "–" for value, form in zip(values, forms, strict=True)]
    return (f"{row.reached} of {len(row.outcomes)}", *texts[:2], texts[2] + " s" * math.isfinite(values[2]))


def plain_table(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric = ACCURACY) -> str:
    """Return the results of a ladder as a text table, a line for each of its configurations (rungs).

    ``headings`` are the columns, and ``cells`` the texts: mostly means over the seeds.

    Args:
        ladder: the ladder, a series of training configurations.
        rows: results by rung name; a rung without finished runs is shown as dashes.
        metric: the metric that is compared.

    Returns:
        A line of headings and one line a rung, aligned by spaces.
    """
    lines = [headings(ladder), *cells(ladder, rows, metric)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            f"{text:<{w}}" if i == 0 else f"{text:>{w}}" for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def markdown(
    ladder: Ladder, rows: Mapping[str, RungResult], sentences: list[str], command: str, metric: Metric = ACCURACY
) -> str:
    """Return a ladder's table, the options that each rung changes, and the verdict as a Markdown document.

    Args:
        ladder: the ladder, a series of training configurations (rungs).
        rows: results by rung name; a rung without finished runs is shown as dashes.
        sentences: sentences that judge the results, from ``tutti.compare.verdict.verdict``; shown as a list.
        command: command line that repeats the comparison.
        metric: the metric that is compared.
    """
    lines = [f"# {ladder.name}", "", ladder.summary, "", f"`{command}`", "", "| " + " | ".join(headings(ladder)) + " |"]
    lines.append("|---|" + "---:|" * (len(headings(ladder)) - 1))
    lines += ["| " + " | ".join(line) + " |" for line in cells(ladder, rows, metric)]
    lines += ["", "What each rung changes:", ""]
    for rung in ladder.rungs:
        changes = ", ".join(f"`{key} = {value}`" for key, value in rung.changes.items())
        lines.append(f"- **{rung.name}**" + (f" (over {rung.parent})" if rung.parent else "") + f": {changes}")
    lines += ["", "Verdict:", "", *(f"- {sentence}" for sentence in sentences), ""]
    return "\n".join(lines)


def as_csv(ladder: Ladder, rows: Mapping[str, RungResult]) -> str:
    """Return the results of a ladder as CSV: a heading, and a line for each finished run.

    Columns: ``rung`` (configuration), ``from`` (rung whose configuration it changes), ``seed``, ``held_out`` (the
    compared metric on held-out samples, after the last evaluation), ``training`` (the same metric on training samples,
    over the last epoch), ``updates``, ``samples``, ``seconds``, ``samples_per_second`` and ``weights_sha256``. If a
    rung has a target (``--until``), four more: ``reached``, ``steps_to_target``, ``samples_to_target`` and
    ``seconds_to_target``; they are empty for a rung without a target, and the last three for a run that did not reach
    it.

    Args:
        ladder: the ladder, a series of training configurations (rungs).
        rows: results by rung name; a rung without finished runs has no line.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names: tuple[str, ...] = ("seed", "held_out", "training", "updates", "samples", "seconds", "samples_per_second")
    names += ("weights_sha256",)
    if headings(ladder) != HEADINGS:
        names += ("reached", "steps_to_target", "samples_to_target", "seconds_to_target")
    writer.writerow(("rung", "from", *names))
    for rung in ladder.rungs:
        for outcome in rows[rung.name].outcomes if rung.name in rows else ():
            writer.writerow((rung.name, rung.parent or "", *(getattr(outcome, name) for name in names)))
    return text.getvalue()
