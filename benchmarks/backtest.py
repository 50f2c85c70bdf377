"""Back-test predictions on a folder of published measurements.

    python benchmarks/backtest.py FOLDER [--json] [--leave-out source]

Write the figures to `benchmarks/results/DATE-backtest.json`, the page `docs/backtest.md`, and the scores that give
bands their widths to the package (`planning/residuals.json`). With `--json` print one line of JSON for each table,
group and protocol, and write nothing. With `--leave-out source` print for each source how far off it is when bands rest
on all other sources: a table, or with `--json` lines of JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from tutti.planning.backtest import BacktestResult, run_backtest
from tutti.planning.conformal_band import write_residuals

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "backtest.md"
RESIDUALS = ROOT / "src" / "tutti" / "planning" / "residuals.json"

# Title, table, protocol, all or near predictions, figure over their errors, and limit; a negative limit is the least
# share, a positive one the largest error.
BARS = (
    (
        "small cluster: mean error of step times on 2–4 × the fitted devices",
        "small cluster",
        "extrapolated",
        "",
        "mean",
        0.08,
    ),
    (
        "GPTs on one host: mean error of iteration times on 2–4 × the fitted devices",
        "iteration by grid",
        "extrapolated",
        "",
        "mean",
        0.07,
    ),
    (
        "all-reduce: mean error of times over 2–4 × the fitted ranks",
        "all-reduce",
        "extrapolated",
        "",
        "mean",
        0.08,
    ),
    (
        "published jobs: mean error of the time per sample, predicted from the job with the fewest devices",
        "published jobs",
        "anchored",
        "",
        "mean",
        0.05,
    ),
    (
        "published jobs: mean error of the time per sample, predicted from a job of another sequence length",
        "published jobs",
        "other sequence lengths",
        "",
        "mean",
        0.12,
    ),
    (
        "data to a target: median error at 2–4 × the largest fitted batch size",
        "data to target",
        "extrapolated",
        "near",
        "median",
        0.06,
    ),
    (
        "data to a target: median error at 2 × the largest fitted batch size and more",
        "data to target",
        "extrapolated",
        "",
        "median",
        0.06,
    ),
    (
        "data to a target: share of predictions within 25 % at 2 × the largest fitted batch size and more",
        "data to target",
        "extrapolated",
        "",
        "within_25",
        -0.9,
    ),
    (
        "time to a target: median error on 4 × the largest fitted number of devices",
        "data to target",
        "time, from at most 1/4 of the devices",
        "near",
        "median",
        0.12,
    ),
    (
        "data to a level of a metric: share of predictions within a factor of 2, from gradient noise alone",
        "metric by epoch",
        "anchored",
        "",
        "within_2x",
        -0.95,
    ),
    (
        "data to a level of a metric: median error, from gradient noise and one measured batch size",
        "metric by epoch",
        "extrapolated",
        "",
        "median",
        0.15,
    ),
)


PAGE_HEAD = """\
# Predictions against published measurements

This page says how far predictions of step times, collectives, throughput, and data and time to a target are from
published measurements. `make backtest` writes it, from the measurements in a folder of CSV or TSV files, which may be
gzipped:

```console
make backtest DATA=path/to/folder
```

`LEAVE_OUT=source` prints a table of the residuals of each source, whose bands rest on all other sources.

A table is recognised by its columns, never by its name. A column that is missing is derived where other columns
determine it; a guess is printed as `note` of the group (`JSON=1`), and a group or protocol that cannot be predicted is
printed with the `reason`. A row that is left out is named by its line in the file, in a note on its table.

Every figure comes from `{file}`. The sources of the measurements are in the
`source` entries of `src/tutti/planning/published_hardware.json` and in the tables' own columns.

A back-test splits each published set, fits the constants of a law to one part and predicts the other part. An error is
|predicted − measured| in % of the measurement. The forms of the laws and the priors of their constants were chosen with
these measurements in sight. Only measurements that are not in these sets can confirm the predictions.

| table | predicted quantity |
|---|---|
| all-reduce | seconds of an all-reduce, by ranks and bytes |
| small cluster | seconds of a training step, by replicas, nodes and samples per replica |
| iteration by grid | seconds of a GPT iteration on one host, by tensor, data and pipeline ranks |
| published jobs | device-seconds per sample of training jobs: the inverse of throughput |
| data to target | samples or epochs to a benchmark's target, by batch size; time, by batch size and devices |
| metric by epoch | samples until two of three neighbouring epochs reach a level of a metric, by batch size |
| scaling law | loss, by parameters and FLOP |

| protocol | the fit uses | predicted rows |
|---|---|---|
| zero-shot | rates of other sets alone, on the same chip; where there is none, on other chips | all rows of the set |
| zero-shot, other hardware | rates of other sets on other chips, like ones first | all rows of the set |
| anchored | rows with the fewest devices of a group, or of a series of published jobs | rows on more devices |
| anchored, other sequence lengths | one job with a sequence length near the middle | jobs with other sequence lengths |
| anchored, other workloads' network | as anchored, and all rows of the other workloads | rows on more devices |
| extrapolated | rows on at most N devices | rows on 2N to 4N devices |
| extrapolated, more than 4 × | rows on at most N devices | rows on more than 4N devices |

| protocol of data to a target | the fit uses | predicted rows |
|---|---|---|
| anchored | the smallest batch size of a round; for a metric, with the gradient noise at it | larger batch sizes |
| extrapolated | batch sizes of at most 1/2 of the predicted one; for a metric one, and the noise | each batch size |
| extrapolated, at least 8 × | as extrapolated, of at most 1/8 of the predicted batch size | each batch size |
| time, from at most 1/4 of the devices | a round's trainings on at most N/4 devices of the kind | time on N devices |

*Extrapolated* predicts a published job from the nearest job of its series on at most half as many devices, with
constants fitted to other sets and to the set's own jobs on at most half as many, and the tenth of the scaling law's
runs with most FLOP from all other runs. A series of published jobs has one set, model, hardware, precision, framework
and sequence length. The nearest job is one with the same split into tensor and pipeline ranks where there is one; a
prediction from another split has a cell of its own."""

BANDS_TEXT = """\
A band is an interval around a prediction that should contain 90 % of the measurements. Its width comes from the errors
of other published sets in the same cell, never of the predicted set. A cell is a *basis*, the measurements on which
the prediction rests, and a *distance*, the number of devices or the batch size divided by the largest measured one.
A prediction's own uncertainty scales the width: the spread of the law's constants, and the errors that the law leaves
on the rows that it is fitted to, once more for each doubling beyond the largest of them. The width is chosen so that,
on average over the other sets of the cell, 90 % of a set lies in bands that rest on the rest of them.

Rows of one series are not independent, so each series counts once. A cell has bands only if it has at least 30 series,
and a prediction only if at least 9 of them, of at least 2 sets, are not of its set: fewer have no 90 % quantile, and
one set does not say how far sets differ. Other cells say `no band`. *Coverage* is the share of measurements inside
their bands. A cell *holds* if its coverage lies within the expected coverage: the binomial 95 % interval of 90 % for
its number of series. *Width* is the upper end less the lower end, in % of the prediction."""


EPOCHS_TEXT = """\
Some submissions evaluate at the ends of whole epochs, or of every few epochs: their target was met at some time between
two evaluations, and the measurement is a whole number of epochs. These are the *extrapolated* predictions of such
measurements. They count in all figures of this page. The last column is an epoch in % of the measurement, the least by
which the measurement itself is uncertain."""


def pooled(checked: list[dict[str, float]], figure: str) -> float:
    """Return a figure over all predictions of a protocol: a mean or median error, or a share."""
    ratios = [one["predicted"] / one["measured"] for one in checked]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    if figure == "mean":
        return sum(errors) / len(errors)
    if figure == "median":
        middle = len(errors) // 2
        return errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2
    if figure == "within_25":
        return sum(error <= 0.25 for error in errors) / len(errors)
    return sum(0.5 <= ratio <= 2 for ratio in ratios) / len(errors)


def against_bars(result: BacktestResult) -> list[dict[str, Any]]:
    """Return each bar with its figure over all groups; a share must be at least its limit, an error at most."""
    found = []
    for name, kind, protocol, part, figure, bar in BARS:
        asked = [
            (each, one)
            for each, one in result.checked
            if each.table == kind
            and (part != "near" or one.distance <= 4)
            and (each.protocol == protocol or (protocol.startswith("other") and each.protocol.endswith(protocol)))
        ]
        if not asked:
            continue
        plain = [{"predicted": one.predicted, "measured": one.measured} for _, one in asked]
        value = pooled(plain, figure)
        met = value >= -bar if bar < 0 else value <= bar
        found.append({"bar": name, "asked": len(plain), "value": value, "limit": abs(bar), "met": met})
    return found


def outliers(result: BacktestResult) -> list[dict[str, Any]]:
    """Return the predictions of data to a target with an error above 25 %."""
    return [
        {"series": one.series, "predicted": one.predicted, "measured": one.measured}
        for each, one in result.checked
        if (each.table, each.protocol) == ("data to target", "extrapolated")
        and abs(one.predicted / one.measured - 1) > 0.25
    ]


_MOST_EPOCHS = 1000.0
"""Data to a target below this number are epochs; others are samples."""


def whole_epochs(result: BacktestResult) -> list[dict[str, Any]]:
    """Return the predictions of data to a target that was met at an evaluation at the end of a whole epoch.

    The target fell between this evaluation and the one before, of which the table says nothing. Such a measurement is a
    whole number of epochs.
    """
    return [
        {"series": one.series, "predicted": one.predicted, "measured": one.measured}
        for each, one in result.checked
        if (each.table, each.protocol) == ("data to target", "extrapolated")
        and one.measured < _MOST_EPOCHS
        and one.measured == int(one.measured)
    ]


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def page(stored: dict[str, Any], file: str) -> str:
    """Return the text of the page; every figure is in the result file."""
    lines = [
        *PAGE_HEAD.format(file=file).splitlines(),
        "",
        "## Bars",
        "",
        "A bar limits a figure over all predictions of a table under one protocol. A mean or median error meets its",
        "bar if it is at most the limit, a share of predictions if it is at least the limit.",
        "",
        "| bar | predictions | found % | limit % | met |",
        "|---|---|---|---|---|",
    ]
    for bar in stored["bars"]:
        met = "yes" if bar["met"] else "**no**"
        lines.append(f"| {bar['bar']} | {bar['asked']} | {share(bar['value'])} | {share(bar['limit'])} | {met} |")
    lines += [
        "",
        "## Bands",
        "",
        *BANDS_TEXT.splitlines(),
        "",
        "| cell | series | sets | coverage % | expected coverage % | median width % | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in stored["cells"]:
        covered = cell["coverage90"]
        interval = "–" if covered is None else f"{share(cell['low'])}–{share(cell['high'])}"
        holds = "no band" if covered is None else "yes" if cell["holds"] else "**no**"
        width = share(cell.get("median_band_width"))
        head = f"| {cell['cell']} | {cell['series']} | {cell['sets']} |"
        lines.append(f"{head} {share(covered)} | {interval} | {width} | {holds} |")
    lines += source_text(stored["sources"])
    lines += ["", "## Errors by group", ""]
    lines += [
        "A group is a workload or a published set, and its hardware. Coverage and width are those of its bands.",
        "",
    ]
    lines += [
        "| table | group | protocol | predictions "
        "| mean error % | median error % | worst error % | coverage % | median width % |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in stored["rows"]:
        figures = (row["mean"], row["median"], row["worst"], row["coverage90"], row["median_band_width"])
        head = f"| {row['table']} | {row['group']} | {row['protocol']} | {row['n']} |"
        lines.append(f"{head} {' | '.join(map(share, figures))} |")
    if stored["outliers"]:
        lines += ["", "## Data to a target with an error above 25 %", ""]
        lines += ["| benchmark, round and batch size | predicted samples or epochs | measured |", "|---|---|---|"]
        lines += [f"| {o['series']} | {o['predicted']:.4g} | {o['measured']:.4g} |" for o in stored["outliers"]]
    if stored["whole_epochs"]:
        lines += ["", "## Targets between two whole-epoch evaluations", "", *EPOCHS_TEXT.splitlines(), ""]
        lines += [
            "| benchmark, round and batch size | predicted epochs | measured | an epoch is % |",
            "|---|---|---|---|",
        ]
        for row in stored["whole_epochs"]:
            epoch = f"{100 / row['measured']:.1f}"
            lines.append(f"| {row['series']} | {row['predicted']:.4g} | {row['measured']:.4g} | {epoch} |")
    lines += [
        "",
        "## Tables and groups without a prediction",
        "",
        "| table | group | protocol | reason |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r['table']} | {r['group']} | {r['protocol']} | {r['reason']} |" for r in stored["refused"]]
    lines += [
        "",
        "## Guesses and rows that are left out",
        "",
        "These tables and groups have predictions.",
        "",
        "| table | group | protocol | note |",
        "|---|---|---|---|",
    ]
    lines += [f"| {n['table']} | {n['group']} | {n['protocol']} | {n['note']} |" for n in stored["notes"]]
    return "\n".join(lines) + "\n"


def source_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst coverage and the mean interval score over sources and cells with bands, each source left out."""
    banded = [row for row in rows if row["others90"] is not None]
    if not banded:
        return {}
    worst = min(banded, key=lambda row: float(row["coverage"]))
    return {
        "number": len(banded),
        "below_75": sum(row["coverage"] < 0.75 for row in banded),
        "lowest_coverage": worst["coverage"],
        "lowest": f"{worst['source']}, {worst['cell']}",
        "interval_score": sum(row["interval_score"] for row in banded) / len(banded),
    }


def source_text(summary: dict[str, Any]) -> list[str]:
    """Return the lines of the page on sources that are left out in turn."""
    if not summary:
        return []
    score = f"{summary['interval_score']:.3f}"
    return [
        "",
        f"Of {summary['number']} pairs of a source and a cell with bands, {summary['below_75']} have a coverage below "
        f"75 %. The lowest is {share(summary['lowest_coverage'])} % ({summary['lowest']}).",
        "The *interval score* of a band is its width plus 20 times the distance of a measurement outside of it, both",
        f"as natural logarithms (Gneiting, Raftery 2007): {score} in the mean over these pairs.",
        "The narrower the bands are that hold, the smaller it is: by it, changes of the bands are judged.",
    ]


def source_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table of the residuals of each source that was left out."""
    lines = [
        "| source left out | cell | predictions | series | median error % | worst error % "
        "| 90 % score | of other sources | coverage % | interval score |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        others = "no band" if row["others90"] is None else f"{row['others90']:.2f}"
        head = f"| {row['source']} | {row['cell']} | {row['n']} | {row['series']} |"
        figures = f"{share(row['median'])} | {share(row['worst'])} | {row['score90']:.2f} | {others}"
        interval = "–" if row["interval_score"] is None else f"{row['interval_score']:.2f}"
        lines.append(f"{head} {figures} | {share(row['coverage'])} | {interval} |")
    return lines


def json_lines(result: BacktestResult) -> list[str]:
    """Return one line of JSON for each table, group and protocol; without predictions it has n = 0 and the reason.

    A table of which some rows are left out has a line without group and protocol, with a note.
    """
    nothing = dict.fromkeys(("mean", "median", "worst", "coverage90", "median_band_width"))

    def bare(row: dict[str, Any], key: str) -> dict[str, Any]:
        return {**{name: row[name] for name in ("table", "group", "protocol")}, "n": 0, **nothing, key: row[key]}

    refused = [bare(row, "reason") for row in result.refused]
    tables = [bare(row, "note") for row in result.notes if not row["group"]]
    return [json.dumps(row, ensure_ascii=False) for row in (*result.rows, *refused, *tables)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print lines of JSON and write nothing")
    parser.add_argument("--leave-out", choices=["source"], help="print residuals of each source that is left out")
    options = parser.parse_args()
    if not options.folder.is_dir():
        print(f"{options.folder} is no folder; say make backtest DATA=folder", file=sys.stderr)
        return 2
    began = time.perf_counter()
    result = run_backtest(options.folder)
    if options.leave_out:
        rows = result.left_out()
        lines = [json.dumps(row, ensure_ascii=False) for row in rows] if options.json else source_table(rows)
        print("\n".join(lines))
        return 0
    if options.json:
        print("\n".join(json_lines(result)))
        return 0
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    file = f"benchmarks/results/{date}-backtest.json"
    stored: dict[str, Any] = {
        "date": date,
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - began, 1),
        "bars": against_bars(result),
        "cells": result.cells,
        "sources": source_summary(result.left_out()),
        "rows": result.rows,
        "refused": result.refused,
        "notes": result.notes,
        "outliers": outliers(result),
        "whole_epochs": whole_epochs(result),
    }
    (ROOT / file).write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(stored, file), encoding="utf-8")
    RESIDUALS.write_text(write_residuals(result.scores()), encoding="utf-8")
    for bar in stored["bars"]:
        print(
            f"{bar['bar']}: {share(bar['value'])} %, bar {share(bar['limit'])} %, {'met' if bar['met'] else 'missed'}"
        )
    for cell in result.cells:
        print(cell)
    print(f"{len(result.checked)} predictions in {stored['seconds']} s; wrote {file} and {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
