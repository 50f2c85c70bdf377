"""TensorBoard's own reader finds every scalar of every step, and after a resume each step once."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tutti.metrics.events import TensorBoard
from tutti.metrics.listener import EvalRecord, Pace, RunHeader
from tutti.types.step_records import StepRecord

pytestmark = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")


def step(number: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {"loss": 1 / number, "metrics": {"accuracy": 0.5}, "grad_norm": 2.0, "lr": 0.1} | changes
    return StepRecord(step=number, epoch=1, samples=8 * number, updates=number, **values)


def write(folder: Path, steps: list[StepRecord], done: int = 0) -> None:
    board = TensorBoard(folder, done)
    board.started(RunHeader("title", {"workers": "4"}, 9, 3))
    for record in steps:
        board.stepped(record, Pace(100.0, 1.0, 1.0))
        if record.step % 2 == 0:
            board.evaluated(EvalRecord(record.step, 1, 0.25, {"accuracy": 0.75}, 5))
    board.warned("something")
    board.finished({})
    board.close()


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_every_scalar_of_every_step(tmp_path: Path) -> None:
    write(tmp_path, [step(1), step(2), step(3)])
    found = read(tmp_path)
    assert found.keys() == {
        *(f"train/{name}" for name in ("loss", "accuracy", "grad_norm", "lr")),
        *(f"eval/{name}" for name in ("loss", "accuracy")),
        *("throughput/samples_per_sec", "time/train_sec"),
    }
    assert found["train/loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert found["throughput/samples_per_sec"] == [(n, 100.0) for n in (1, 2, 3)]
    assert found["eval/accuracy"] == [(2, 0.75)]


def test_what_there_is_not_is_left_out_and_what_is_not_finite_is_kept(tmp_path: Path) -> None:
    write(tmp_path, [step(1, grad_norm=math.nan, lr=None, metrics={})])
    found = read(tmp_path)
    assert found.keys() == {"train/loss", "train/grad_norm", "throughput/samples_per_sec", "time/train_sec"}
    assert math.isnan(found["train/grad_norm"][0][1])


def test_a_resumed_run_appends_and_hides_what_is_done_again(tmp_path: Path) -> None:
    write(tmp_path, [step(n) for n in (1, 2, 3, 4)])
    write(tmp_path, [step(n, loss=7.0) for n in (3, 4, 5)], done=2)
    assert len(list(tmp_path.iterdir())) == 2
    assert read(tmp_path)["train/loss"] == [(1, 1.0), (2, 0.5), (3, 7.0), (4, 7.0), (5, 7.0)]


def test_a_folder_that_is_used_again_shows_the_new_run(tmp_path: Path) -> None:
    write(tmp_path, [step(n) for n in (1, 2)])
    write(tmp_path, [step(1, loss=7.0)])
    assert read(tmp_path)["train/loss"] == [(1, 7.0)]
