"""Branches of a checkpoint and tuned batches, on a loss whose course is known in closed form."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import tutti
from tutti.compare import tuned_batches
from tutti.compare.branches import BranchPoint, RateRule, branch_trials
from tutti.compare.runs import Progress, Trial
from tutti.config.train_config import TrainConfig
from tutti.errors import ExitCode, TargetError, UsageError

RATE, SAMPLES, BATCH = 0.05, 24, 4
CURVES = (1.0, 0.25)
TASK = f"""
import torch
from torch import nn
from tutti.tasks.task import Task

class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, inputs):
        return inputs * self.weight

def loss(model, batch):
    return 0.5 * (model(batch[0]) ** 2).sum(), len(batch[0])

def task():
    rows = torch.tensor([{[math.sqrt(curve) for curve in CURVES]}], dtype=torch.float64)
    data = torch.utils.data.TensorDataset(rows.expand({SAMPLES}, 2).clone())
    return Task(name="own", model=Point, loss=loss, train=data, eval=data)
"""
TRAIN = ("train", "own.py:task", "--precision", "fp64", "--optimizer", f"sgd:lr={RATE}", "--batch-size", str(BATCH))


def falls(rates: list[float]) -> float:
    """The loss after steps of gradient descent: all samples are alike, so every batch has the whole gradient."""
    weights = [math.prod(1 - rate * curve for rate in rates) for curve in CURVES]
    return sum(0.5 * curve * weight**2 for curve, weight in zip(CURVES, weights, strict=True))


@pytest.mark.parametrize(("rule", "power"), [pytest.param("linear", 1.0, marks=pytest.mark.full), ("none", 0.0)])
def test_branches_follow_the_known_course(tmp_path: Path, rule: str, power: float) -> None:
    (tmp_path / "own.py").write_text(TASK)
    done = tutti(tmp_path, *TRAIN, "--epochs", "2", "--workers", "2", "--out", "base")
    assert done.code == 0, done.err
    words = ("noise", "base", "--branch", "2", "3", "--seeds", "1", "--window", "2", "--json")
    done = tutti(tmp_path, *words, "--rule", rule)
    assert done.code == 0, done.err
    said = json.loads(done.out)["branches"]
    before = [RATE] * (2 * SAMPLES // BATCH)
    assert said["start"] == pytest.approx(falls(before), rel=1e-9)
    for branch in said["losses"]:
        k = branch["multiple"]
        steps = 2 * SAMPLES // (k * BATCH)
        assert branch["loss"] == pytest.approx(falls(before + [RATE * k**power] * steps), rel=1e-9), k
    assert [branch["multiple"] for branch in said["losses"]] == [1, 2, 3]
    assert said["within"] == (3 if rule == "linear" else 1)
    # Without gradient noise a larger batch at the same rate brings nothing: the critical batch is below every batch.
    if rule == "none":
        assert json.loads(done.out)["critical_batch"] < BATCH
    again = tutti(tmp_path, *words, "--rule", rule)
    assert again.out == done.out
    assert "seed" not in again.err


@pytest.mark.parametrize(
    ("optimizer", "own", "rule", "scale", "rate"),
    [
        ("sgd:lr=0.1,momentum=0.9", "none", None, "linear:base_batch=32", 0.05),
        ("adam:lr=0.002", "none", None, "sqrt:base_batch=32", 0.001),
        ("adam:lr=0.002", "sqrt:base_batch=8", "linear", "sqrt:base_batch=8", 0.001),
        ("adam:lr=0.002", "none", "none", "none", 0.001),
    ],
)
def test_a_branch_has_the_rate_in_force_and_the_micro_batch(
    tmp_path: Path, optimizer: str, own: str, rule: RateRule | None, scale: str, rate: float
) -> None:
    config = TrainConfig(
        batch_size=32, workers=4, optimizer=optimizer, lr_scale=own, schedule="cosine", epochs=9.0, until="loss=0.1"
    )
    # The schedule has halved the rate at the checkpoint.
    point = BranchPoint(tmp_path, "own", tmp_path / "c", config, 10, 5, 640, 1.0, 0.5)
    for trial in branch_trials(point, (2, 4), 2, 3, rule):
        made = trial.config
        assert made.batch_size in (32, 64, 128) and made.micro_batch == 8 and made.workers == 4
        assert made.optimizer_choice.options.lr == pytest.approx(rate) and made.lr_scale == scale
        assert made.schedule == "constant" and made.length.value == 8 and made.until is None
        assert made.seed in (1, 2)
    assert len({trial.directory for trial in branch_trials(point, (2, 4), 2, 3, rule)}) == 6


def test_a_branch_of_a_pipeline_has_more_micro_batches(tmp_path: Path) -> None:
    config = TrainConfig(batch_size=32, workers=1, strategy="pipeline:stages=2,micro_batches=4")
    point = BranchPoint(tmp_path, "own", tmp_path / "c", config, 10, 5, 640, 1.0, 1.0)
    made = {trial.config.batch_size: trial.config for trial in branch_trials(point, (4,), 1, 1, None)}
    assert made[32].strategy == config.strategy and made[128].micro_batch is None
    assert made[128].strategy == "pipeline:stages=2,micro_batches=16"


def write_fake(least: float, critical: float, best_rate: float) -> Any:
    """A training whose samples to the target are E_min(1 + B/B_crit) at the best rate, and more at others."""

    def run_trial(trial: Trial, task: str, watch: Any) -> None:
        watch(Progress({}, {}))
        config = trial.config
        rate = config.optimizer_choice.options.lr
        off = math.log(rate / (best_rate * math.sqrt(config.batch_size)))
        trial.directory.mkdir(parents=True)
        samples = least * (1 + config.batch_size / critical) * (1 + off**2)
        target = {"metric": "accuracy", "value": 0.9, "samples": None if off > 2 else samples}
        (trial.directory / "summary.json").write_text(json.dumps({"exit_code": 9 if off > 2 else 0, "target": target}))

    return run_trial


def test_the_rate_is_tuned_at_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_batches, "run_trial", write_fake(1000, 64, 0.01))
    # The given rate is nine times too small: the grid widens to it, and the edge is left.
    base = TrainConfig(optimizer="sgd:lr=0.00444,momentum=0.9", batch_size=16, until="accuracy=0.9")
    said: list[str] = []
    found = list(
        tuned_batches.tuned_batches("own", base, (64, 16), 3, tmp_path, lambda trial, _: said.append(trial.rung))
    )
    assert [each.batch for each in found] == [16, 64]
    for each in found:
        assert each.rate == pytest.approx(0.01 * math.sqrt(each.batch), rel=0.01)
        assert not each.edge and len(each.tuned) == 5 and len(set(each.runs)) == 3
        seeds = [json.loads((run / "summary.json").read_text())["target"]["samples"] for run in each.runs]
        assert seeds == pytest.approx([1000 * (1 + each.batch / 64)] * 3, rel=1e-3)
    count = len(said)
    list(tuned_batches.tuned_batches("own", base, (64, 16), 3, tmp_path, lambda trial, _: said.append(trial.rung)))
    assert count == 16 and len(said) == count


def test_a_target_that_no_rate_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_batches, "run_trial", write_fake(1000, 64, 1e-9))
    base = TrainConfig(optimizer="sgd:lr=0.1", batch_size=16, until="accuracy=0.9")
    with pytest.raises(TargetError, match=r"no rate reached accuracy=0\.9 at batch 16"):
        list(tuned_batches.tuned_batches("own", base, (16, 64), 3, tmp_path, lambda *_: None))
    for wrong, options in (
        ((16,), base),
        ((16, 64), TrainConfig()),
        ((16, 64), TrainConfig(until="loss=1", lr_scale="sqrt:base_batch=8")),
    ):
        with pytest.raises(UsageError):
            tuned_batches.check_batches(options, wrong)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--branch", "0"), "--branch is 0"),
        (("--branch", "64"), "fewer than two steps"),
        (("--branch", "2", "--step", "3"), "no checkpoint at the end of an epoch at step 3"),
        (("--branch", "2", "--epochs", "3"), "--epochs is an option of training"),
        (("--batches", "8", "16"), "--batches needs a target"),
        (("--seeds", "0"), "--seeds is 0"),
    ],
)
def test_what_cannot_be_branched_is_refused(base_run: Path, words: tuple[str, ...], said: str) -> None:
    target = "digits" if "--batches" in words else "base"
    done = tutti(base_run, "noise", target, *words)
    assert done.code == ExitCode.USAGE
    assert said in done.err


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branched")
    (folder / "own.py").write_text(TASK)
    assert tutti(folder, *TRAIN, "--epochs", "1", "--out", "base").code == 0
    return folder
