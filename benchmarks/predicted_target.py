"""Samples and seconds to a target on CIFAR-10 at 2, 4 and 8 workers: predicted from one worker, then measured.

    python benchmarks/cifar_subset.py data/cifar10 data/cifar10-small --images 10000 --held-out 4000
    python benchmarks/predicted_target.py data/cifar10-small --save

The network is that of ``small_cifar.py``. Predictions are written before a run of several workers begins: from the
gradient noise of the runs of one worker, and from branches of one of their checkpoints. Workers are logical, so that
one device makes the steps of any number of them; finished runs are kept. Seconds are those of this one device, where
micro-batches are the same for all: the seconds of a sample, from the runs of one worker, predict the seconds to the
target. They mean nothing where other work runs beside; the result keeps the load.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BATCH, RATE = 64, 0.003
WORKERS = (2, 4, 8)
SEEDS = 5
TARGET = "accuracy=0.5"
MULTIPLES = ("2", "4", "8")
COMMON = (
    *(
        "--optimizer",
        f"adam:lr={RATE}",
        "--lr-scale",
        f"sqrt:base_batch={BATCH}",
        "--schedule",
        "constant:warmup=5120sa",
    ),
    *("--micro-batch", "32", "--devices", "1", "--threads", "1"),
)


def command(*words: str) -> str:
    """Run ``tutti words…`` and return its standard output."""
    done = subprocess.run([sys.executable, "-m", "tutti", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"tutti {' '.join(words)} failed: {done.stderr}")
    return done.stdout


def train(data: str, workers: int, seed: int, folder: Path, *options: str) -> dict[str, Any]:
    """Train one run, if it has not finished yet, and return its summary."""
    out = folder / f"workers-{workers}-seed-{seed}{'-branched' if '--epochs' in options else ''}"
    if not (out / "summary.json").exists() or "exit_code" not in json.loads((out / "summary.json").read_text()):
        words = ["train", f"{ROOT / 'benchmarks' / 'small_cifar.py'}:task", "--data", data, *COMMON]
        words += ["--workers", str(workers), "--batch-size", str(BATCH * workers), "--seed", str(seed)]
        command(*words, "--out", str(out), "--overwrite", *options)
    return {"path": str(out), **json.loads((out / "summary.json").read_text())}


def to_target(data: str, workers: int, folder: Path) -> list[dict[str, Any]]:
    """Train with each seed until the target."""
    options = ("--until", TARGET, "--duration", "300000sa", "--eval-every", "1024sa", "--checkpoint-every", "none")
    noise = ("--noise-every", "5") if workers == 1 else ()
    return [train(data, workers, seed, folder, *options, *noise) for seed in range(SEEDS)]


def samples(run: dict[str, Any]) -> float:
    """Half-way between the evaluation that reached the target and the one before."""
    target = run["target"]
    return float(target["samples"] + target["samples_before"]) / 2


def seconds(run: dict[str, Any]) -> float:
    """Seconds of training to the samples that ``samples`` counts, without evaluations."""
    return float(run["target"]["seconds"]) * samples(run) / float(run["target"]["samples"])


def predict(runs: list[dict[str, Any]], branched: str, folder: Path) -> dict[str, Any]:
    """Samples to the target at each number of workers, by the posterior from the runs of one worker."""
    found = {}
    paths = [run["path"] for run in runs]
    for name, given in (("noise", paths), ("branches", [branched, *paths])):
        words = [*given, "--recipe", str(folder / f"{name}.json"), "--json"]
        extra = ["--branch", *MULTIPLES, "--seeds", str(SEEDS)] if name == "branches" else []
        said = json.loads(command("noise", *words, *extra))
        recipe = json.loads((folder / f"{name}.json").read_text())
        rows = {}
        for workers in WORKERS:
            draws = sorted(least * (1 + BATCH * workers / critical) for least, critical in recipe["draws"])
            rows[str(workers)] = {
                "samples": recipe["samples_min"] * (1 + BATCH * workers / recipe["critical_batch"]),
                "low": draws[round(0.05 * (len(draws) - 1))],
                "high": draws[round(0.95 * (len(draws) - 1))],
            }
        found[name] = {"critical_batch": said["critical_batch"], "band": said["band"], "ways": said["ways"], "at": rows}
    return found


def main() -> None:
    """Predict, train, compare, print and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--runs", type=Path, default=Path("runs/predicted-target"))
    parser.add_argument("--save", action="store_true", help="keep benchmarks/results/DATE-predicted-target.json")
    given = parser.parse_args()
    folder: Path = given.runs
    folder.mkdir(parents=True, exist_ok=True)
    one = to_target(given.data, 1, folder)
    branched = train(given.data, 1, 0, folder, "--epochs", "1", "--eval-every", "1ep", "--checkpoint-every", "1ep")
    predicted = predict(one, branched["path"], folder)
    (folder / "predicted.json").write_text(json.dumps(predicted, indent=1) + "\n")
    print(json.dumps(predicted, indent=1), flush=True)
    each = statistics.median(run["target"]["seconds"] / run["target"]["samples"] for run in one)
    load, measured, took = [os.getloadavg()[1]], {}, {}
    for workers in (1, *WORKERS):
        runs = one if workers == 1 else to_target(given.data, workers, folder)
        load.append(os.getloadavg()[1])
        took[str(workers)] = [seconds(run) for run in runs]
        found = [samples(run) for run in runs]
        steps = [value / (BATCH * workers) for value in found]
        measured[str(workers)] = {
            "samples": found,
            "median": statistics.median(found),
            "steps": statistics.median(steps),
        }
    errors = {
        name: {
            workers: row["samples"] / measured[workers]["median"] - 1 for workers, row in predicted[name]["at"].items()
        }
        for name in predicted
    }
    result = {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "target": TARGET,
        "batch": BATCH,
        "seeds": SEEDS,
        "predicted": predicted,
        "measured": measured,
        "errors": errors,
        "seconds": {
            "of_a_sample": each,
            "predicted": {
                name: {workers: row["samples"] * each for workers, row in predicted[name]["at"].items()}
                for name in predicted
            },
            "measured": took,
            "load": load,
        },
    }
    print(json.dumps({"measured": measured, "errors": errors}, indent=1))
    if given.save:
        place = ROOT / "benchmarks" / "results" / f"{result['date']}-predicted-target.json"
        place.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
