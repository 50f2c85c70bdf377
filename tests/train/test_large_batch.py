"""What a run does with a large batch: rules of the rate, warm-up, as many updates as a small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError
from tutti.train.main import train_rank


def trained(folder: Path, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Lines of the training steps, and the summary, of a run on two embedded parameters."""
    fields = {"batch_size": 64, "eval_every": "none", "checkpoint_every": "none", "out": str(folder)}
    config = TrainConfig(**{**fields, **options})
    folder.mkdir()
    assert train_rank("linear", config, str(folder)) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["group"] == "train"], json.loads((folder / "summary.json").read_text())


def test_the_rule_and_the_warm_up_from_the_rate_before_it(tmp_path: Path) -> None:
    lines, _ = trained(
        tmp_path / "run",
        optimizer="sgd:lr=0.01",
        lr_scale="linear:base_batch=16",
        schedule="constant:warmup=4st",
        steps=6,
    )
    assert [line["lr"] for line in lines] == pytest.approx([0.01, 0.0175, 0.025, 0.0325, 0.04, 0.04])


def test_as_many_updates_as_with_a_small_batch(tmp_path: Path) -> None:
    schedule = "step:milestones=1ep,gamma=0.5"
    small, first = trained(tmp_path / "small", optimizer="sgd:lr=0.01", schedule=schedule, batch_size=16, epochs=2)
    large, second = trained(tmp_path / "large", optimizer="sgd:lr=0.01", schedule=schedule, regime_batch=16, epochs=2)
    assert first["updates"] == second["updates"] and second["samples"] > 3 * first["samples"]
    assert [line["lr"] for line in small] == [line["lr"] for line in large]


def test_a_regime_needs_a_length_in_samples() -> None:
    with pytest.raises(UsageError, match="regime-batch changes nothing"):
        TrainConfig(regime_batch=64, steps=10)
    with pytest.raises(UsageError, match="regime-batch is 0"):
        TrainConfig(regime_batch=0)


def test_identical_batches_are_one_workers_batch(tmp_path: Path) -> None:
    """Eight workers on the samples of one: the loss of each step is that of worker 0's eighth alone."""
    base: dict[str, Any] = {"optimizer": "sgd:lr=0.01", "precision": "fp64", "steps": 9, "workers": 4}
    lines, _ = trained(tmp_path / "identical", **base, identical_batches=True)
    plain, _ = trained(tmp_path / "plain", **base)
    assert lines[0]["loss"] != pytest.approx(plain[0]["loss"])
    again, _ = trained(tmp_path / "again", **base, identical_batches=True, micro_batch=5)
    assert [line["loss"] for line in again] == pytest.approx([line["loss"] for line in lines], rel=1e-12)
    with pytest.raises(UsageError, match="needs a data set with"):
        tutti.prepare(torch.nn.Linear(1, 1), "sgd:lr=0.1", iter, lambda model, batch: 0, identical_batches=True)
