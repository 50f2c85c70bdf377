"""``--schedule plateau``: rates are those of PyTorch, on any number of devices and over a resume; early refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.faults.commands import tutti

TASK = """
import torch
from torch import nn
from tutti import Task

inputs = torch.arange(48.0).view(24, 2) / 48
samples = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

def loss(model, batch):
    value = nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")
    return value, len(batch[0]), {"distance": value.detach(), "accuracy": -value.detach()}

def task(held_out=samples):
    return Task(name="own", model=lambda: nn.Linear(2, 1), loss=loss, train=samples, eval=held_out,
                directions={"distance": "lower"})

def blind(): return task(None)
"""
SCHEDULE = "plateau:metric=distance,factor=0.5,patience=0,threshold=0.3,cooldown=1"
OPTIONS = ("--batch-size", "6", "--workers", "6", "--optimizer", "sgd:lr=0.1", "--device", "cpu")


def train(folder: Path, *words: str, task: str = "task", out: str = "run", code: int = 0) -> str:
    (folder / "own.py").write_text(TASK, encoding="utf-8")
    often = () if "--eval-every" in words else ("--eval-every", "3st")
    done = tutti(folder, "train", f"own.py:{task}", *OPTIONS, *often, "--out", out, *words)
    assert done.code == code, done.err
    return done.err


def records(folder: Path, out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def weights(folder: Path, out: str) -> str:
    return str(json.loads((folder / out / "summary.json").read_text(encoding="utf-8"))["weights_sha256"])


def test_rates_are_those_of_pytorch_on_any_number_of_devices(tmp_path: Path) -> None:
    for devices in ("1", "3"):
        words = ("--schedule", SCHEDULE, "--epochs", "6", "--reproducible", "--devices", devices)
        train(tmp_path, *words, out=devices)
    assert weights(tmp_path, "1") == weights(tmp_path, "3")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3, cooldown=1)
    rates = []
    for record in records(tmp_path, "3"):
        if record["group"] == "eval":
            scheduler.step(record["distance"])
        elif record["group"] == "train":
            rates.append(record["lr"])
            assert record["lr"] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert len(set(rates)) > 2


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    words = ("--schedule", SCHEDULE, "--reproducible", "--checkpoint-every", "3st")
    train(tmp_path, *words, "--epochs", "6", "--devices", "1", out="whole")
    train(tmp_path, *words, "--epochs", "3", "--devices", "1", out="cut")
    train(tmp_path, *words, "--epochs", "6", "--devices", "2", "--resume", "cut", out="cut")
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")
    rates = [[r["lr"] for r in records(tmp_path, out) if r["group"] == "train"] for out in ("whole", "cut")]
    assert rates[0] == rates[1] and len(set(rates[0])) > 2


@pytest.mark.parametrize(
    ("words", "task", "said"),
    [
        (
            ("--eval-every", "none"),
            "task",
            "--schedule plateau needs evaluations during the run, and --eval-every is none",
        ),
        (("--eval-every", "1ep", "--epochs", "1"), "task", "the run ends before or at its first one"),
        ((), "blind", "has no held-out samples, which --schedule plateau needs"),
        (("--schedule", "plateau:metric=val_loss"), "task", "no held-out 'val_loss'"),
        (("--schedule", "plateau:metric=size"), "task", "whether a lower or a higher 'size' is better"),
    ],
)
def test_a_plateau_that_no_evaluation_drives_is_refused(
    words: tuple[str, ...], task: str, said: str, tmp_path: Path
) -> None:
    given = words if "--schedule" in words else ("--schedule", "plateau", *words)
    assert said in train(tmp_path, "--devices", "1", *given, task=task, code=2)


def test_too_few_evaluations_are_told(tmp_path: Path) -> None:
    said = train(tmp_path, "--devices", "1", "--schedule", "plateau", "--epochs", "3")
    assert "waits for 11 evaluations without a better loss after the first, and the run has 3 before its end" in said
