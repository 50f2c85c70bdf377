"""``Task.callbacks`` under ``tutti train``: events, states over ``--resume``, stops, and the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import tutti

TASK = """
import json, os
import torch
from torch import nn
import tutti
from tutti import Task

inputs = torch.arange(48.0).view(24, 2) / 48
samples = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

def loss(model, batch):
    value = nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")
    count = len(batch[0])
    return value, count, {"distance": value.detach()}

class Recording:
    def __init__(self, ranks):
        self.ranks, self.steps = ranks, 0

    def note(self, *event):
        torch.rand(3)
        with open(f"{self.ranks}{tutti.rank()}.jsonl", "a") as file:
            file.write(json.dumps([*event, self.steps]) + "\\n")

    def on_train_begin(self, run): self.note("begin", run.global_step)
    def on_epoch_begin(self, run, epoch): self.note("epoch", epoch)
    def on_step_end(self, run):
        self.steps += 1
        self.note("step", run.global_step)
    def on_evaluation(self, run, evaluation): self.note("evaluation", run.global_step)
    def on_checkpoint(self, run, path): self.note("checkpoint", int(path.name[5:]), (path / "manifest.json").exists())
    def on_epoch_end(self, run, epoch): self.note("over", epoch)
    def on_train_end(self, run): self.note("end", run.global_step)
    def state_dict(self): return {"steps": self.steps}
    def load_state_dict(self, state): self.steps = state["steps"]

def model():
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))

def task(*callbacks):
    return Task(name="own", model=model, loss=loss, train=samples, eval=samples, callbacks=callbacks,
                directions={"distance": "lower"})

def plain(): return task()
def observed(): return task(Recording("first"), Recording("all"))

class Five:
    ranks = "all"
    def on_step_end(self, run):
        if run.global_step == 5 and tutti.rank() == tutti.size() - 1:
            run.stop("five are enough")

def stopping(): return task(Five())
def early(): return task(tutti.BestModel("best", "distance", "min"), tutti.EarlyStopping("distance", 1, mode="max"))
"""
OPTIONS = (
    *("--batch-size", "6", "--optimizer", "adam:lr=0.01", "--eval-every", "1ep", "--device", "cpu"),
    *("--checkpoint-every", "3st"),
)
EVENTS = [
    *(["begin", 0, 0], ["epoch", 0, 0], ["step", 1, 1], ["step", 2, 2], ["step", 3, 3], ["checkpoint", 3, True, 3]),
    *(["step", 4, 4], ["over", 0, 4], ["evaluation", 4, 4], ["epoch", 1, 4], ["step", 5, 5], ["step", 6, 6]),
    *(["checkpoint", 6, True, 6], ["step", 7, 7], ["step", 8, 8], ["over", 1, 8], ["evaluation", 8, 8]),
    *(["checkpoint", 8, True, 8], ["end", 8, 8]),
]
WORLDS = [
    (2, "mirrored"),
    *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, "single"), (3, "mirrored"), (2, "sharded"))),
    pytest.param(2, "pipeline", marks=pytest.mark.full),
]


def train(folder: Path, task: str, size: int, strategy: str, out: str, *words: str) -> dict[str, Any]:
    (folder / "own.py").write_text(TASK, encoding="utf-8")
    workers = "1" if strategy == "pipeline" else "6"
    words = words if "--epochs" in words else ("--epochs", "2", *words)
    start = ("--devices", str(size), "--strategy", strategy, "--workers", workers, "--out", out)
    if strategy != "sharded":
        start += ("--reproducible",)
    done = tutti(folder, "train", f"own.py:{task}", *OPTIONS, *start, *words)
    assert done.code == 0, done.err
    summary: dict[str, Any] = json.loads((folder / out / "summary.json").read_text(encoding="utf-8"))
    return summary


def events(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("size", "strategy"), WORLDS)
def test_an_observing_callback_changes_no_weights(size: int, strategy: str, tmp_path: Path) -> None:
    without = train(tmp_path, "plain", size, strategy, "plain")
    observed = train(tmp_path, "observed", size, strategy, "observed")
    assert observed["weights_sha256"] == without["weights_sha256"]
    assert events(tmp_path / "first0.jsonl") == EVENTS
    assert not (tmp_path / "first1.jsonl").exists()
    assert [events(tmp_path / f"all{rank}.jsonl") for rank in range(size)] == [EVENTS] * size


@pytest.mark.parametrize(("size", "strategy"), WORLDS)
def test_a_resumed_run_continues_the_state_of_its_callbacks(size: int, strategy: str, tmp_path: Path) -> None:
    whole = train(tmp_path, "plain", size, strategy, "whole")
    train(tmp_path, "observed", size, strategy, "cut", "--epochs", "1")
    files = ["first0.jsonl", *(f"all{rank}.jsonl" for rank in range(size))]
    for name in files:
        (tmp_path / name).unlink()
    again = train(tmp_path, "observed", size, strategy, "cut", "--resume", "cut")
    assert again["weights_sha256"] == whole["weights_sha256"]
    rest = [["begin", 4, 4], *(event for event in EVENTS[EVENTS.index(["epoch", 1, 4]) :])]
    for name in files:
        assert events(tmp_path / name) == rest


@pytest.mark.parametrize(("size", "strategy"), WORLDS)
def test_a_callback_of_the_last_rank_stops_the_run(size: int, strategy: str, tmp_path: Path) -> None:
    found = train(tmp_path, "stopping", size, strategy, "out")
    assert (found["steps"], found["stopped"]) == (5, "five are enough")
    manifest = json.loads((tmp_path / "out/checkpoints/step-00000005/manifest.json").read_text(encoding="utf-8"))
    assert manifest["step"] == 5
    again = train(tmp_path, "stopping", size, strategy, "out", "--resume", "out")
    assert (again["steps"], again["weights_sha256"]) == (5, found["weights_sha256"])


def test_early_stopping_keeps_the_best_model(tmp_path: Path) -> None:
    found = train(tmp_path, "early", 2, "mirrored", "out", "--epochs", "5")
    assert (found["steps"], found["stopped"]) == (8, "no better distance in 1 evaluation")
    assert len(list((tmp_path / "best").glob("step-*"))) == 1
