"""Loss landscapes on CIFAR-10: of a small and a large batch, and of a deep network with and without skip connections.

    python benchmarks/cifar_subset.py data/cifar10 data/cifar10-small --images 10000 --held-out 4000
    python benchmarks/landscapes.py data/cifar10-small --save

Trains each model once, unless its run is there, and measures ``tutti landscape`` at its end. With ``--save`` keeps
``results/DATE-landscapes.json`` and draws ``docs/studies/landscapes-batch.svg`` and ``landscapes-skips.svg``. Needs the
extras ``data``, ``planning`` and ``plot``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figure import begin, keep
from small_cifar import CLASSES, small_network
from torch import Tensor, nn

from tutti.config.task_config import CourseConfig
from tutti.tasks.cifar10 import cifar10_task
from tutti.tasks.task import Task

ROOT = Path(__file__).parents[1]
WIDTH, BLOCKS = 16, 27
MODELS = {
    "small batch": ("small", ("--batch-size", "64", "--epochs", "15")),
    "large batch": ("small", ("--batch-size", "1024", "--epochs", "30")),
    "with skips": ("skips", ("--batch-size", "128", "--epochs", "6")),
    "without skips": ("plain", ("--batch-size", "128", "--epochs", "6")),
}
TRAIN = ("--optimizer", "adam:lr=0.001", "--schedule", "constant", "--devices", "1", "--threads", "1")
MEASURE = ("--parts", "sharpness,line,plane", "--samples", "256", "--points", "21", "--grid", "9")


class Block(nn.Module):
    """Two 3×3 convolutions with batch norm; ``skip`` adds the block's input to their output, without parameters."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        layers = [nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)]
        self.inner = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False))
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.inner(x))
        return torch.relu(x + y if self.skip else y)


def deep_network(skip: bool) -> nn.Sequential:
    """Return a network of 56 layers on maps of 8×8 pixels, with the same parameters with and without skips."""
    stem = [nn.Conv2d(3, WIDTH, 4, stride=4, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*stem, *(Block(skip) for _ in range(BLOCKS)), *head)


def task(data: str, model: str = "small") -> Task:
    """Return the built-in task with the model ``small`` (that of ``small_cifar.py``), ``skips`` or ``plain``."""
    made = small_network if model == "small" else partial(deep_network, model == "skips")
    return dataclasses.replace(cifar10_task(CourseConfig(), data, False), name=f"cifar-{model}", model=made)


def tutti(*words: str) -> None:
    """Run ``tutti words…``; end with its exit code if it fails."""
    if code := subprocess.run([sys.executable, "-m", "tutti", *words], check=False).returncode:
        raise SystemExit(code)


def trained(data: str, name: str, folder: Path) -> Path:
    """Train a model, unless its run has finished, and return the run directory."""
    out = folder / name.replace(" ", "-")
    if not (out / "summary.json").exists():
        model, options = MODELS[name]
        words = [f"{Path(__file__).resolve()}:task", "--data", data, "--model", model, *TRAIN, *options]
        last = ("--eval-every", "3ep", "--checkpoint-every", "3ep")
        tutti("train", *words, *last, "--out", str(out), "--overwrite")
    return out


def measured(run: Path, to: Path | None = None) -> dict[str, Any]:
    """Measure the landscape of a run, unless that was done, and return it."""
    file = run / "landscape.json"
    if not file.exists():
        other = () if to is None else ("--to", str(to))
        tutti("landscape", str(run), *MEASURE, *other)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def numbers(values: Sequence[float | None]) -> np.ndarray:
    """Return losses as an array; those that were not finite are NaN."""
    return np.array([np.nan if value is None else value for value in values])


def draw_lines(panel: Any, found: dict[str, Any], names: Sequence[str]) -> None:
    """Draw training and held-out loss of two models along one filter-normalised direction each."""
    for place, name in enumerate(names):
        line = found[name]["line"]
        for of, dashes in (("training", "-"), ("held-out", "--")):
            panel.plot(line["offsets"], numbers(line[of]["loss"]), dashes, color=f"C{place}", label=f"{name}, {of}")
    panel.set(xlabel="distance along a filter-normalised direction", ylabel="loss", yscale="log")
    panel.legend(fontsize="small")


def draw_planes(panels: Sequence[Any], found: dict[str, Any], names: Sequence[str]) -> None:
    """Draw the training loss of two models in planes of two directions, with the same lines of equal loss."""
    planes = [found[name]["plane"] for name in names]
    losses = [np.array([numbers(row) for row in plane["training"]["loss"]]) for plane in planes]
    least = min(map(np.nanmin, losses))
    levels = np.geomspace(least * 1.1, min(max(map(np.nanmax, losses)), 1000 * least), 14)
    for panel, name, plane, loss in zip(panels, names, planes, losses, strict=True):
        lines = panel.contour(plane["offsets"], plane["offsets"], loss, levels=levels, cmap="viridis", linewidths=1)
        panel.clabel(lines, fontsize=6, fmt="%.2g")
        panel.plot([0], [0], "+", color="#888888")
        panel.set(xlabel="first direction", ylabel="second direction", title=name, aspect="equal")


def draw_between(panel: Any, found: dict[str, Any]) -> None:
    """Draw loss and accuracy on the line from the small batch's weights to the large batch's."""
    line = found["small batch"]["between"]
    right = panel.twinx()
    for of, dashes in (("training", "-"), ("held-out", "--")):
        panel.plot(line["offsets"], numbers(line[of]["loss"]), dashes, color="C0", label=of)
        right.plot(line["offsets"], numbers(line[of]["accuracy"]), dashes, color="C1")
    panel.set(xlabel="from the small batch (0) to the large one (1)", ylabel="loss", yscale="log")
    right.set_ylabel("accuracy")
    panel.yaxis.label.set_color("C0")
    right.yaxis.label.set_color("C1")
    panel.legend(fontsize="small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw(found: dict[str, Any], caption: str, folder: Path) -> None:
    """Draw both figures: lines and planes of each pair, and the line between the batches."""
    pyplot = begin()
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 8))
    draw_between(panels[0, 0], found)
    draw_lines(panels[0, 1], found, ("small batch", "large batch"))
    draw_planes(panels[1], found, ("small batch", "large batch"))
    keep(figure, caption, folder / "landscapes-batch.svg")
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4.2))
    draw_lines(panels[0], found, ("with skips", "without skips"))
    draw_planes(panels[1:], found, ("with skips", "without skips"))
    keep(figure, caption, folder / "landscapes-skips.svg")


def main() -> None:
    """Train, measure, print, keep and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--runs", type=Path, default=Path("runs/landscapes"))
    parser.add_argument("--save", action="store_true", help="keep the result and both figures")
    given = parser.parse_args()
    runs = {name: trained(given.data, name, given.runs) for name in MODELS}
    found = {}
    for name, run in runs.items():
        found[name] = measured(run, runs["large batch"] if name == "small batch" else None)
        kept = {key: found[name][key] for key in ("training", "held-out", "sharpness")}
        print(f"{name}: {json.dumps(kept)}", flush=True)
    if given.save:
        date = datetime.date.today().isoformat()
        machine = {"date": date, "cores": os.cpu_count(), "torch": torch.__version__}
        settings = {"train": TRAIN, "models": MODELS, "measure": MEASURE}
        place = ROOT / "benchmarks" / "results" / f"{date}-landscapes.json"
        text = json.dumps({**machine, **settings, "found": found}).replace(f"{ROOT.resolve()}/", "")
        place.write_text(text + "\n", encoding="utf-8")
        draw(found, f"10,000 images of CIFAR-10 · torch {torch.__version__} · {date}", ROOT / "docs" / "studies")


if __name__ == "__main__":
    main()
