"""What a run has done is read from its lines, whatever happens to the file meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tutti.chaos.damage import find_checkpoint
from tutti.chaos.following import Follower, Resume, checkpoints, unfinished
from tutti.config.train_config import TrainConfig
from tutti.metrics.listener import Pace
from tutti.metrics.records import RunDirectory
from tutti.types.step_records import StepRecord


def train(run: RunDirectory, *steps: int) -> None:
    for step in steps:
        run.stepped(StepRecord(step, 1, step, step, 0.5, {}, grad_norm=None, lr=None), Pace(1, 0, 0))


def test_steps_resumes_and_warnings(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    follower.poll()
    assert (follower.step, follower.made, follower.mark) == (0, 0, (0, 0))
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    train(run, 1, 2, 3)
    follower.poll()
    assert (follower.step, follower.made, follower.lost) == (3, 3, 0)
    run.warned("careful")
    train(run, 4, 5)
    # Killed here, and gone on from the checkpoint of step 2.
    run = RunDirectory(tmp_path, TrainConfig(), "digits", 2)
    follower.poll()
    assert (follower.step, follower.made, follower.resumes) == (2, 0, [Resume(2, 3)])
    assert follower.warnings == ["careful"]
    train(run, 3)
    follower.poll()
    assert (follower.step, follower.made, follower.lost, follower.mark) == (3, 1, 3, (1, 3))
    run = RunDirectory(tmp_path, TrainConfig(), "digits", 2)
    train(run, 3, 4)
    follower.poll()
    assert (follower.step, follower.made, follower.lost, len(follower.resumes)) == (4, 2, 4, 2)


def write(path: Path, *lines: Any, end: str = "") -> None:
    with path.open("a") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in lines) + end)


def test_half_a_line_is_not_believed(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    follower = Follower(tmp_path)
    write(metrics, {"group": "train", "step": 1}, end='{"group": "tr')
    whole = metrics.stat().st_size - 13
    follower.poll()
    assert follower.step == 1
    # A full disk took half of it, and gave it back.
    with metrics.open("r+") as file:
        file.truncate(whole)
    write(metrics, {"group": "eval", "step": 1}, {"group": "train", "step": 2})
    follower.poll()
    follower.poll()
    assert (follower.step, follower.made) == (2, 2)


def test_checkpoints_are_complete_ones_the_newest_first(tmp_path: Path) -> None:
    for name in ("step-00000010", "step-100000000", "step-99999999", "step-00000030.tmp-0", "step-99999999.old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    (tmp_path / "checkpoints" / "step-00000040").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-100000000", "step-99999999", "step-00000010"]
    assert find_checkpoint(tmp_path).name == find_checkpoint(tmp_path / "checkpoints").name == "step-100000000"
    assert [path.name for path in unfinished(tmp_path)] == ["step-00000030.tmp-0"]
