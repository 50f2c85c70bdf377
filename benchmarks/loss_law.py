"""Fit `tutti plan --law`'s law to 245 published language models, and predict the largest tenth from the others.

    python benchmarks/loss_law.py FOLDER          # keeps results/DATE-loss-law.json

FOLDER has `chinchilla_245.csv`: model size, training FLOP and loss, read off Hoffmann et al. 2022 (arXiv 2203.15556),
figure 4, by Besiroglu et al. 2024 (arXiv 2404.10102). Tokens are FLOP / 6N. `refit` leaves out the five models with
the fewest tokens; `published` has Besiroglu et al.'s constants.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

from tutti.distribution import VERSION
from tutti.planning.loss_law import FittedLoss, fit_loss, larger_run_spread, largest_tenth, loss_band, loss_regions

ROOT = Path(__file__).parents[1]
FEWEST = 5
PUBLISHED = {
    "irreducible": 1.8172,
    "size_factor": 482.01,
    "size_exponent": 0.3478,
    "data_factor": 2085.43,
    "data_exponent": 0.3658,
}


def constants(fitted: FittedLoss) -> dict[str, Any]:
    """Return each constant with its 90 % interval, and whether the published one lies within."""
    found = {}
    for name, published in PUBLISHED.items():
        low, high = fitted.interval(name)
        value = getattr(fitted.law, name)
        found[name] = {
            "value": value,
            "low": low,
            "high": high,
            "published": published,
            "within": low <= published <= high,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    with (parser.parse_args().folder / "chinchilla_245.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    size, flop, loss = (
        np.array([float(row[name]) for row in rows]) for name in ("Model Size", "Training FLOP", "loss")
    )
    data = flop / (6 * size)
    whole = fit_loss(size, data, loss)
    regions = loss_regions(whole.law, size, data, loss)
    usual = np.argsort(data)[FEWEST:]
    size, flop, data, loss = size[usual], flop[usual], data[usual], loss[usual]
    refit = fit_loss(size, data, loss)
    rest, last = largest_tenth(size, data)
    fitted = fit_loss(size[rest], data[rest], loss[rest])
    spread = larger_run_spread(fitted, size[rest], data[rest], loss[rest])
    low, high = loss_band(fitted, spread, size[last], data[last])
    errors = np.abs(np.log(fitted.law.loss(size[last], data[last]) / loss[last]))
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"tutti": VERSION, "numpy": np.__version__, "python": platform.python_version()},
        "models": len(rows),
        "all": constants(whole),
        "regions": {name: regions.count(name) for name in ("small data", "power law", "irreducible")},
        "refit": {"models": len(loss), "draws": len(refit.draws), "constants": constants(refit)},
        "held_out": {
            "models": len(last),
            "mean_error": float(errors.mean()),
            "largest_error": float(errors.max()),
            "within_90_percent_band": float(((low <= loss[last]) & (loss[last] <= high)).mean()),
        },
    }
    path = ROOT / "benchmarks" / "results" / f"{found['date']}-loss-law.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
