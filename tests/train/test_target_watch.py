"""Evaluations that end a run: the same step on any number of devices, and after a resume as without it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tests.train.test_keep_best import RATE, Counting, loss
from tutti.config.metric_direction import Metric
from tutti.config.training_target import TrainingTarget
from tutti.data.adapt import adapt
from tutti.errors import CheckpointError, UsageError
from tutti.launcher import context
from tutti.metrics.listener import Clock, Listeners, RunHeader
from tutti.train.loop import train_loop
from tutti.train.run_checkpoints import Checkpoints
from tutti.train.target_watch import EvaluatedAt, TargetWatch
from tutti.train.train_plan import TrainPlan

DISTANCE = Metric("distance", higher=False)
SAMPLES = 64


def at(step: int, value: float) -> EvaluatedAt:
    return EvaluatedAt(step, step, 8 * step, step / 8, 0.5 * step, 1.0 * step, value)


def watched(values: list[float], until: str | None, patience: int | None) -> TargetWatch:
    target = None if until is None else TrainingTarget.parse(until)
    watch = TargetWatch(DISTANCE if target is None else target.metric, target, patience)
    for step, value in enumerate(values, 1):
        if watch.ending is None:
            watch.evaluated(at(step, value))
    return watch


def test_the_first_evaluation_that_reaches_the_target_ends_the_run() -> None:
    found = watched([9, 5, 4, 1], "distance<=4", 2).summary()["target"]
    assert (found["ended_by"], found["reached"], found["steps"], found["samples"]) == ("target", True, 3, 24)
    assert (found["samples_before"], found["seconds"], found["wall_seconds"]) == (16, 1.5, 3.0)
    assert (found["best"], found["best_step"], found["evaluations"]) == (4, 3, 3)


def test_a_target_that_is_not_reached_says_how_near_the_run_came() -> None:
    found = watched([9, 5, 7], "distance<=4", None).summary()["target"]
    assert (found["ended_by"], found["reached"], found["steps"], found["seconds"]) == ("length", False, None, None)
    assert (found["best"], found["best_step"]) == (5, 2)


@pytest.mark.parametrize(
    ("values", "patience", "ended", "best"),
    [
        ([9, 5, 7, 6, 1], 2, 4, 5),
        ([9, 5, 7, 4, 6, 6], 2, 6, 4),
        ([5, 5, 5], 2, 3, 5),
        ([9, math.nan, 8, math.nan, math.nan], 2, 5, 8),
        ([math.nan, math.nan], 2, 2, None),
        ([math.nan, 7, 6], 1, 1, None),
    ],
)
def test_patience_counts_evaluations_without_a_better_value(
    values: list[float], patience: int, ended: int, best: float | None
) -> None:
    found = watched(values, None, patience).summary()
    assert "target" not in found
    stopped = found["early_stopping"]
    assert (stopped["ended_by"], stopped["evaluations"], stopped["best"]) == ("patience", ended, best)


def test_a_state_is_read_as_it_was_written() -> None:
    before = watched([9, 5, math.nan], "distance<=1", 5)
    after = watched([], "distance<=1", 5)
    assert after.load(json.loads(json.dumps(before.state())))
    for watch in (before, after):
        watch.evaluated(at(4, 1.0))
    assert before.summary() == after.summary() and after.summary()["target"]["samples_before"] == 24
    ended = watched([], "distance<=1", 5)
    assert ended.load(json.loads(json.dumps(after.state()))) and ended.ending == "target"


def test_another_target_is_judged_anew_and_another_metric_is_not_continued() -> None:
    before = watched([9, 5, 4], "distance<=4", None)
    harder = watched([], "distance<=1", None)
    assert harder.load(before.state()) and harder.ending is None
    assert harder.summary()["target"]["best"] == 4 and harder.summary()["target"]["steps"] is None
    other = watched([], "height>=4", None)
    assert not other.load(before.state()) and other.summary()["target"]["evaluations"] == 0
    with pytest.raises(CheckpointError, match="'target' is invalid"):
        harder.load({"metric": {"name": "distance", "higher": False}, "best": 3})


def trained(
    folder: str, until: str | None, total: int, patience: int | None = None, strategy: str = "mirrored"
) -> dict[str, Any]:
    """Train ``Counting``, whose distance falls by one a step until the third and rises then; evaluate every step."""
    run = tutti.prepare(
        *(Counting(), f"sgd:lr={RATE}", torch.zeros(SAMPLES, 1), loss), workers=3, batch_size=9, strategy=strategy
    )
    target = None if until is None else TrainingTarget.parse(until)
    watch = TargetWatch(DISTANCE if target is None else target.metric, target, patience)
    facts = {"workers": 3, "config_sha256": "0" * 64}
    saver = Checkpoints(run, Path(folder), context.current(), facts, keep=1, warn=print)
    restored = saver.restore()
    if restored is not None and restored.get("target"):
        watch.load(restored["target"])
    clock = Clock.saved(restored or {"started": 100.0})
    held_out, header = adapt(torch.zeros(5, 1)), RunHeader("", {}, total, 8)
    plan = TrainPlan(total, 1, 2)
    return train_loop(run, plan, held_out, header, Listeners(()), saver=saver, clock=clock, watch=watch)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["mirrored", "sharded:stage=3"])
def test_every_number_of_devices_ends_at_the_same_step(ranks: int, strategy: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    found = worlds.run(ranks, trained, folder=folder, until="distance<=0", total=9, strategy=strategy)
    for summary in found:
        target = summary["target"]
        assert (summary["steps"], target["steps"], target["samples"]) == (3, 3, 27)
        assert target["reached"] and target["samples_before"] == 18 and target["seconds"] > 0
        assert summary["eval"]["distance"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    # The target is reached: a resumed run trains no further, and keeps the figures.
    again = worlds.run(ranks, trained, folder=folder, until="distance<=0", total=9, strategy=strategy)
    assert [summary["steps"] for summary in again] == [3] * ranks
    assert again[0]["target"] == found[0]["target"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_patience_ends_a_run_that_grows_worse(ranks: int, tmp_path: Path) -> None:
    for summary in worlds.run(ranks, trained, folder=str(tmp_path), until=None, total=20, patience=4):
        assert summary["steps"] == 7 and summary["early_stopping"]["best_step"] == 3
    # With more patience, a resumed run goes on where it ended.
    for summary in worlds.run(ranks, trained, folder=str(tmp_path), until=None, total=20, patience=6):
        assert summary["steps"] == 9 and summary["early_stopping"]["evaluations"] == 9


def test_seconds_count_from_the_first_start(tmp_path: Path) -> None:
    [first] = worlds.run(1, trained, folder=str(tmp_path), until="height>=0", total=2)
    assert not first["target"]["reached"] and first["target"]["best_step"] == 2
    [second] = worlds.run(2, trained, folder=str(tmp_path), until="height>=0", total=9)[:1]
    target = second["target"]
    assert target["steps"] == 3 and target["seconds"] > first["seconds"]
    # The start of the clock is 100 s after 1970.
    assert target["wall_seconds"] > 1e9 and target["evaluations"] == 3


def test_a_metric_that_nobody_reports_ends_the_run_after_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(worlds.RankError) as caught:
        worlds.run(2, trained, folder=str(tmp_path), until="distances<=0", total=9)
    assert all(f is not None and f.kind == UsageError.__name__ for f in caught.value.failures)
    assert "Did you mean 'distance'" in str(caught.value)
    assert not list(tmp_path.iterdir())
