"""Optimizer and schedulers of a ``Task``: over a resume, under strategies, with ``--schedule``, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import tutti

TASK = """
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from tutti import Task

inputs = torch.arange(48.0).view(24, 2) / 48
samples = [(row, row.sum(dim=0, keepdim=True)) for row in inputs]

def collate(items):
    return {"inputs": torch.stack([i for i, _ in items]), "targets": torch.stack([t for _, t in items])}

def loss(model, batch):
    return nn.functional.mse_loss(model(batch["inputs"]), batch["targets"])

def optimizer(model):
    first, second = model
    return torch.optim.SGD([{"params": first.parameters(), "lr": 0.2}, {"params": second.parameters()}],
                           lr=0.05, momentum=0.9)

def two(model):
    first, second = model
    return [torch.optim.SGD(first.parameters(), lr=0.2, momentum=0.9),
            torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9)]

def task(**more):
    return Task(name="own", model=lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), loss=loss, train=samples,
                eval=samples, collate=collate, **({"optimizer": optimizer} | more))

def groups(): return task()
def decay(): return task(scheduler=lambda o: ExponentialLR(o, 0.9))
def several(): return task(optimizer=two, scheduler=lambda both: [ExponentialLR(o, 0.9) for o in both])
def epochs(): return task(scheduler=lambda o: ExponentialLR(o, 0.5), scheduler_every="epoch")
def plateau(every="evaluation"):
    return task(scheduler=lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.9), scheduler_every=every)
def unstepped(): return plateau("update")
def no_optimizer(): return task(optimizer=None, scheduler=lambda o: ExponentialLR(o, 0.9))
def no_type(): return task(optimizer=lambda model: "adam")
"""


def train(folder: Path, task: str, *words: str, out: str = "out", code: int = 0) -> Any:
    (folder / "own.py").write_text(TASK, encoding="utf-8")
    given = ("--batch-size", "6", "--device", "cpu", "--out", out, *words)
    length = () if {"--epochs", "--steps"} & {*words} else ("--epochs", "4")
    done = tutti(folder, "train", f"own.py:{task}", *given, *length)
    assert done.code == code, done.err
    return done.err if code else json.loads((folder / out / "summary.json").read_text(encoding="utf-8"))


def rates(folder: Path, out: str = "out") -> list[float]:
    lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["lr"] for line in lines if line["group"] == "train"]


@pytest.mark.parametrize("task", ["decay", "epochs", "plateau", "several"])
def test_a_resumed_run_is_the_uninterrupted_one(task: str, tmp_path: Path) -> None:
    words = ("--workers", "2", "--reproducible")
    whole = train(tmp_path, task, *words, "--devices", "1", out="whole")
    train(tmp_path, task, *words, "--devices", "1", "--epochs", "2", out="cut")
    again = train(tmp_path, task, *words, "--devices", "2", "--resume", "cut", out="cut")
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert rates(tmp_path, "cut") == rates(tmp_path, "whole") and len(set(rates(tmp_path, "cut"))) > 2


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss that one device ends at."""
    done = train(tmp_path_factory.mktemp("alone"), "decay", "--workers", "1", "--devices", "1")
    return float(done["eval"]["loss"])


@pytest.mark.parametrize("strategy", ["mirrored", "sharded", "pipeline", "parameter_server", "central_storage"])
def test_strategies_end_at_the_same_loss(strategy: str, alone: float, tmp_path: Path) -> None:
    found = train(tmp_path, "decay", "--strategy", strategy, "--devices", "2")
    assert found["eval"]["loss"] == pytest.approx(alone, rel=1e-4)


def test_the_schedule_of_the_command_line_multiplies_the_rates_of_all_groups(tmp_path: Path) -> None:
    words = ("--workers", "2", "--reproducible")
    train(tmp_path, "groups", *words, "--devices", "2", out="constant")
    assert rates(tmp_path, "constant") == [0.2] * 16
    option = ("--schedule", "exponential:gamma=0.9,every=1st")
    one, two = (train(tmp_path, "groups", *words, *option, "--devices", str(n), out=f"on{n}") for n in (1, 2))
    assert one["weights_sha256"] == two["weights_sha256"]
    assert rates(tmp_path, "on2") == pytest.approx([0.2 * 0.9**step for step in range(16)])
    decay = train(tmp_path, "decay", *words, "--devices", "2", out="decay")
    assert one["eval"]["loss"] == pytest.approx(decay["eval"]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        ("groups", ("--optimizer", "sgd:lr=0.1"), "makes its own optimizer, and --optimizer is sgd:lr=0.1"),
        ("groups", ("--lr-scale", "linear:base_batch=3"), "makes its own optimizer, and --lr-scale is linear"),
        ("decay", ("--schedule", "cosine"), "makes its own scheduler, and --schedule is cosine"),
        ("plateau", ("--eval-every", "none"), "Task(scheduler_every='evaluation') follows evaluations"),
        ("plateau", ("--epochs", "1"), "the run ends before or at its first one"),
        ("unstepped", (), "write Task(scheduler_every='evaluation')"),
        ("no_optimizer", (), "Task(scheduler=…) needs Task(optimizer=…)"),
        ("no_type", (), "Task(optimizer=…) returned the text"),
    ],
)
def test_what_contradicts_the_task_is_refused(task: str, words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said.lower() in train(tmp_path, task, "--devices", "1", *words, code=2).lower()


def test_a_changed_rate_contradicts_a_saved_scheduler(tmp_path: Path) -> None:
    train(tmp_path, "decay", "--devices", "1", "--epochs", "1")
    said = train(tmp_path, "decay", "--devices", "1", "--resume", "out", "--change", "lr", code=2)
    assert "lr cannot be changed while" in said
