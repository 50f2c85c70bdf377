"""One task, four workers, trained on 1, then 2, then 4 devices: the time differs, the weights do not by one bit.

Each worker has its own dropout and its own batch-norm statistics, and they are the same wherever it is played. The
handwritten digits come with scikit-learn, so nothing is downloaded. ``--picture PATH`` draws the three runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEVICES = (1, 2, 4)
WORKERS = 4
MODEL = "cnn:batch_norm=true,dropout=0.25"
TRAIN = ["train", "digits", "--workers", str(WORKERS), "--reproducible", "--model", MODEL]
TRAIN += ["--epochs", "60", "--batch-size", "512", "--optimizer", "adam:lr=2e-3", "--schedule", "cosine"]
THRESHOLD_NOT_MET = 9

Run = tuple[dict[str, Any], list[dict[str, Any]]]
"""A run's summary and its metrics, one record a step and an evaluation."""


def train(devices: int, folder: Path) -> Run:
    """One run as a user would start it; the demo ends with its exit code if it fails."""
    out = folder / f"{devices}-devices"
    command = [sys.executable, "-m", "tutti", *TRAIN, "--devices", str(devices), "--out", str(out), "--json"]
    print("$ tutti", *TRAIN, "--devices", devices, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(done.stdout), [json.loads(line) for line in lines]


def show(runs: list[Run]) -> bool:
    """Print the table; True where all weights are equal."""
    print(f"\n{'devices':>7}  {'held-out accuracy':>17}  {'seconds':>7}  weights_sha256")
    for devices, (summary, _) in zip(DEVICES, runs, strict=True):
        accuracy, seconds = summary["eval"]["accuracy"], summary["seconds"]
        print(f"{devices:>7}  {accuracy:>17.2%}  {seconds:>7.1f}  {summary['weights_sha256']}")
    equal = len({summary["weights_sha256"] for summary, _ in runs}) == 1
    print("\nThe weights are equal, bit by bit." if equal else "\nThe weights differ. They must not: please report it.")
    return equal


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def draw(runs: list[Run], path: Path) -> None:
    """Left what must not differ, held-out accuracy over samples; right what does, the speed."""
    import matplotlib

    matplotlib.use("svg")
    # Makes the file the same byte for byte whenever the numbers are.
    matplotlib.rcParams.update({"svg.hashsalt": "tutti", "axes.spines.top": False, "axes.spines.right": False})
    matplotlib.rcParams.update({"axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left"})
    from matplotlib import pyplot

    figure, (accuracy, speed) = pyplot.subplots(
        1, 2, figsize=(9.6, 4.2), width_ratios=(2.1, 1), layout="constrained", facecolor="white"
    )
    draw_accuracy(accuracy, runs)
    draw_speed(speed, runs)
    digest = runs[0][0]["weights_sha256"]
    caption = f"weights_sha256 of all three runs: {digest}"
    figure.supxlabel(caption, fontsize=8.5, family="monospace", color="#444444")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


STYLES = (
    # From wide and pale to narrow and dark, so that each curve shows those under it (colours: Okabe and Ito 2008).
    {"color": "#56B4E9", "linewidth": 7, "marker": "o", "markersize": 13, "markeredgewidth": 0},
    {"color": "#E69F00", "linewidth": 3.5, "marker": "s", "markersize": 7, "markeredgewidth": 0},
    {"color": "#000000", "linewidth": 1, "marker": "x", "markersize": 5, "markeredgewidth": 1.2},
)


def draw_accuracy(axes: Any, runs: list[Run]) -> None:
    for devices, (_, records), style in zip(DEVICES, runs, STYLES, strict=True):
        samples = {r["step"]: r["samples"] / 1000 for r in records if r["group"] == "train"}
        evaluations = [r for r in records if r["group"] == "eval"]
        label = f"{devices} device{'s' * (devices > 1)}"
        places = [samples[r["step"]] for r in evaluations]
        axes.plot(places, [100 * r["accuracy"] for r in evaluations], label=label, **style)
    axes.set_title(f"The same {WORKERS} workers on 1, 2 and 4 devices: one curve")
    axes.set(xlabel="training samples (thousands)", ylabel="held-out accuracy (%)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right", labelspacing=0.9, handlelength=3)


def draw_speed(axes: Any, runs: list[Run]) -> None:
    # More processes than cores only share them.
    shown = [place for place, devices in enumerate(DEVICES) if devices <= max(cores(), 2)]
    speeds = [runs[place][0]["samples_per_second"] / 1000 for place in shown]
    places = [str(DEVICES[place]) for place in shown]
    bars = axes.bar(places, speeds, color=[STYLES[place]["color"] for place in shown], width=0.62)
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.margins(y=0.18)
    axes.set_title("Only the speed differs")
    axes.set(ylabel="thousand samples a second", xlabel=f"devices: processes on {cores()} CPU cores")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, metavar="PATH", help="also draw the three runs as an SVG file")
    picture = parser.parse_args().picture
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(devices, Path(folder)) for devices in DEVICES]
    equal = show(runs)
    if picture is not None:
        if not equal:
            sys.exit("no picture is drawn of runs that differ")
        draw(runs, picture)
        print(f"drawn: {picture}")
    return 0 if equal else THRESHOLD_NOT_MET


if __name__ == "__main__":
    sys.exit(main())
