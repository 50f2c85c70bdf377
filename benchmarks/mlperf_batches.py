"""Fit E(B) = E_min(1 + B/B_crit) to the data that MLPerf submissions trained on until the target, by benchmark.

    python benchmarks/mlperf_batches.py FOLDER          # keeps results/DATE-mlperf-batches.json

FOLDER has a table of submissions: round, benchmark, global batch, data to the target and successful runs. A series is
a benchmark of one round. Data to the target are in a benchmark's unit (epochs or samples), so that only ratios count;
submissions in another unit than the rest, more than 20 times from the median, are left out. At each batch the median
submission counts: submitters tune rate and schedule for each batch, and best efforts are no controlled sweep.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tutti.distribution import VERSION
from tutti.planning.backtest_data import data_to_target
from tutti.planning.law_fit import fit_target
from tutti.planning.measurement_table import TableRow, read_tables
from tutti.planning.protocol import EXTRAPOLATED, grouped

ROOT = Path(__file__).parents[1]
LEAST_BATCHES = 4
OTHER_UNIT = 20.0
FALLS = 0.05


def studied(members: list[TableRow]) -> dict[str, Any] | None:
    """Return the fit of one series; None for fewer than four batches."""
    kept = [row for row in members if row.number("last_eval") > 0 and row.number("ok", 1.0) > 0]
    if not kept:
        return None
    middle = statistics.median(math.log(row.number("last_eval")) for row in kept)
    kept = [row for row in kept if abs(math.log(row.number("last_eval")) - middle) < math.log(OTHER_UNIT)]
    points = {
        batch: [row.number("last_eval") for row in each]
        for batch, each in sorted(grouped(kept, lambda row: row.number("batch")).items())
    }
    if len(points) < LEAST_BATCHES:
        return None
    batches = np.array(list(points))
    data = np.array([statistics.median(each) for each in points.values()])
    fitted = fit_target(batches, data, np.array([float(len(each)) for each in points.values()]))
    order = np.argsort(fitted.log_critical)
    quantiles = np.interp([0.05, 0.5, 0.95], np.cumsum(fitted.weights[order]), fitted.log_critical[order])
    low, critical, high = (float(math.exp(value)) for value in quantiles)
    errors = {batch: abs(fitted.predict(batch)[0] / truth - 1) for batch, truth in zip(points, data, strict=True)}
    pairs = list(pairwise(zip(batches.tolist(), data.tolist(), strict=True)))
    return {
        "batches": len(points),
        "submissions": len(kept),
        "smallest_batch": float(batches[0]),
        "largest_batch": float(batches[-1]),
        "data_largest_over_smallest": float(data[-1] / data[0]),
        "steps_smallest_over_largest": float(data[0] / batches[0] / (data[-1] / batches[-1])),
        "critical_batch": critical,
        "critical_low": low,
        "critical_high": high,
        "largest_over_critical": float(batches[-1] / critical),
        "median_error": statistics.median(errors.values()),
        "worst_error": max(errors.values()),
        "worst_batch": max(errors, key=lambda batch: errors[batch]),
        # The law's data grow with the batch, and its steps fall with it.
        "data_fall": sum(after[1] < (1 - FALLS) * before[1] for before, after in pairs),
        "steps_grow": sum(after[1] / after[0] > before[1] / before[0] for before, after in pairs),
        "distinct_data": len(set(np.round(data, 6).tolist())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    tables = [table for table in read_tables(parser.parse_args().folder) if "last_eval" in table.rows[0].numbers]
    rows = [row for table in tables for row in table.rows]
    series = {
        name.replace(" / ", " "): found
        for name, members in sorted(grouped(rows, lambda row: row.label("bench", "version")).items())
        if (found := studied(members)) is not None
    }
    checked = [p for asked in data_to_target(rows) if asked.protocol == EXTRAPOLATED for p in asked.predictions]
    errors = [abs(p.predicted / p.measured - 1) for p in checked]
    ahead = {
        "predictions": len(errors),
        "median_error": statistics.median(errors),
        "within_25_percent": sum(error <= 0.25 for error in errors) / len(errors),
    }
    held = [name for name, found in series.items() if found["worst_error"] <= 0.25]
    value = {
        "tutti": VERSION,
        "date": datetime.date.today().isoformat(),
        "submissions": len(rows),
        "series": series,
        "number_of_series": len(series),
        "worst_within_25_percent": len(held),
        "median_of_median_errors": statistics.median(found["median_error"] for found in series.values()),
        "from_half_the_batch": ahead,
    }
    path = ROOT / "benchmarks" / "results" / f"{value['date']}-mlperf-batches.json"
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    for name, found in series.items():
        print(name, {key: round(each, 3) for key, each in found.items()})
    print({key: each for key, each in value.items() if key != "series"})


if __name__ == "__main__":
    main()
