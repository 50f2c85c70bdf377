"""Back-test predictions on a folder of published measurements.

    python benchmarks/backtest.py FOLDER [--json]

With `--json` one line of JSON a table, group and protocol is printed, and nothing is written. Without it the figures
go to `benchmarks/results/DATE-backtest.json`, the page `docs/backtest.md` is written from them, and the scores that
bands rest on go to the package (`planning/residuals.json`).
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

# What is asked, of which table and protocol, of all or near predictions, by which figure, and the bar.
BARS = (
    ("steps of a small cluster at 2–4 × the devices, mean", "small cluster", "extrapolated", "", "mean", 0.08),
    ("iterations on one host at twice the devices, mean", "iteration by grid", "extrapolated", "", "mean", 0.07),
    ("all-reduces over twice the ranks, mean", "all-reduce", "extrapolated", "", "mean", 0.08),
    ("published jobs, scaling from the smallest row, mean", "published jobs", "anchored", "", "mean", 0.05),
    ("published jobs, other sequence lengths, mean", "published jobs", "other sequence lengths", "", "mean", 0.12),
    ("data to a target at 2–4 × the batch, median", "data to target", "batches at most half", "near", "median", 0.06),
    ("at twice the batch and any more, median", "data to target", "batches at most half", "", "median", 0.06),
    ("the same, share within 25 %", "data to target", "batches at most half", "", "within_25", -0.9),
    ("data to a level from noise alone, share within 2 ×", "metric by epoch", "noise alone", "", "within_2x", -0.95),
    ("the same with one measured batch, median", "metric by epoch", "noise and one batch", "", "median", 0.15),
)


def pooled(checked: list[dict[str, float]], figure: str) -> float:
    """A figure over all predictions of a protocol."""
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
    """Each bar with the figure over all groups, and by group; a share must be at least its bar, an error at most."""
    kinds = {(row["group"], row["protocol"]): row["table"] for row in result.rows}
    found = []
    for name, kind, protocol, part, figure, bar in BARS:
        asked = [
            (each, one)
            for each, one in result.checked
            if kinds.get((each.group, each.protocol)) == kind
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
    """Data to a target that is missed by more than a quarter."""
    return [
        {"series": one.series, "predicted": one.predicted, "measured": one.measured}
        for each, one in result.checked
        if each.protocol == "batches at most half" and abs(one.predicted / one.measured - 1) > 0.25
    ]


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def page(stored: dict[str, Any], file: str) -> str:
    """The page, every figure of which is in the result file."""
    lines = [
        "# Predicted against measured",
        "",
        f"Made by `make backtest` from `{file}`; nothing on this page is written by hand. Predictions of step times,",
        "collectives and data to a target are compared with measurements that others published (sources in",
        "`planning/published_hardware.json` and in the data's own columns). Errors are in % of the measurement.",
        "",
        "*Zero-shot*: nothing of the set is seen. *Anchored*: the rows with fewest devices of each series are seen.",
        "*Extrapolated*: at most N/2 devices are fitted, N to 2N are asked; for published jobs the nearest row at half",
        "the devices or fewer is the anchor. A band is 90 %; its residuals never come from the set that is predicted.",
        "*Anchored, other workloads' network* also sees the cluster's other workloads on every number of devices.",
        "",
        "The forms of the laws and the priors of their constants were chosen with this data in sight: the proof is",
        "in sets that are not here.",
        "",
        "## Bars",
        "",
        "| bar | n | found % | limit % | met |",
        "|---|---|---|---|---|",
    ]
    for bar in stored["bars"]:
        met = "yes" if bar["met"] else "**no**"
        lines.append(f"| {bar['bar']} | {bar['asked']} | {share(bar['value'])} | {share(bar['limit'])} | {met} |")
    lines += [
        "",
        "## Bands",
        "",
        "A cell holds where its coverage lies in the binomial 95 % interval of 90 % for its number of",
    ]
    lines += ["independent series. A cell of fewer than 30 says that there is no band.", ""]
    lines += [
        "| cell | series | sets | coverage % | interval % | median width % | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in stored["cells"]:
        covered = cell["coverage90"]
        interval = "–" if covered is None else f"{share(cell['low'])}–{share(cell['high'])}"
        holds = "no band" if covered is None else "yes" if cell["holds"] else "**no**"
        width = share(cell.get("median_band_width"))
        head = f"| {cell['cell']} | {cell['series']} | {cell['sets']} |"
        lines.append(f"{head} {share(covered)} | {interval} | {width} | {holds} |")
    lines += ["", "## Every group", ""]
    lines += ["| table | group | protocol | n | mean % | median % | worst % | coverage % | median width % |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in stored["rows"]:
        figures = (row["mean"], row["median"], row["worst"], row["coverage90"], row["median_band_width"])
        head = f"| {row['table']} | {row['group']} | {row['protocol']} | {row['n']} |"
        lines.append(f"{head} {' | '.join(map(share, figures))} |")
    if stored["outliers"]:
        lines += ["", "## Data to a target that is missed by more than a quarter", ""]
        lines += ["| series and batch | predicted | measured |", "|---|---|---|"]
        lines += [f"| {o['series']} | {o['predicted']:.4g} | {o['measured']:.4g} |" for o in stored["outliers"]]
    lines += ["", "## Not predicted", "", "| table | group | protocol | reason |", "|---|---|---|---|"]
    lines += [f"| {r['table']} | {r['group']} | {r['protocol']} | {r['reason']} |" for r in stored["refused"]]
    return "\n".join(lines) + "\n"


def json_lines(result: BacktestResult) -> list[str]:
    """One line a table, group and protocol; what was not predicted has n = 0 and the reason."""
    nothing = dict.fromkeys(("mean", "median", "worst", "coverage90", "median_band_width"))
    done = {(row["table"], row["group"], row["protocol"]) for row in result.rows}
    refused = [
        {**{key: row[key] for key in ("table", "group", "protocol")}, "n": 0, **nothing, "reason": row["reason"]}
        for row in result.refused
        if (row["table"], row["group"], row["protocol"]) not in done
    ]
    return [json.dumps(row, ensure_ascii=False) for row in (*result.rows, *refused)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print lines of JSON and write nothing")
    options = parser.parse_args()
    if not options.folder.is_dir():
        print(f"{options.folder} is no folder; say make backtest DATA=folder", file=sys.stderr)
        return 2
    began = time.perf_counter()
    result = run_backtest(options.folder)
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
        "rows": result.rows,
        "refused": result.refused,
        "outliers": outliers(result),
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
