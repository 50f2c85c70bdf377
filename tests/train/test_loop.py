"""The loop around the step: how many steps, when it evaluates, what it tells."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tutti.checkpoint.write import step_name
from tutti.data.adapt import adapt
from tutti.data.order import permutation
from tutti.errors import DiskError, Preempted
from tutti.launcher import context
from tutti.metrics.listener import Listeners, RunHeader
from tutti.train.loop import train_loop
from tutti.train.loop_meters import Means
from tutti.train.run import Run
from tutti.train.run_checkpoints import Checkpoints
from tutti.train.train_plan import TrainPlan

COUNT, BATCH, PER_EPOCH = 22, 8, 3


class Told:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def started(self, header: RunHeader) -> None:
        self.calls.append(("started", header.title))

    def stepped(self, record: Any, pace: Any) -> None:
        self.calls.append(("stepped", record))

    def evaluated(self, record: Any) -> None:
        self.calls.append(("evaluated", record))

    def warned(self, text: str) -> None:
        self.calls.append(("warned", text))


def loss(net: Any, batch: Tensor) -> Any:
    result = net(batch)
    return result.square().sum(), len(batch), {"positive": (result > 0).sum()}


def looped(total: int, every: int | None, held_out: int, poison: bool = False, **more: Any) -> Any:
    torch.manual_seed(0)
    data = torch.randn(COUNT, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if poison:
        data[5] = torch.nan
    run = tutti.prepare(nn.Linear(2, 1).double(), "sgd:lr=0.1", data, loss, workers=4, batch_size=BATCH, **more)
    told = Told()
    source = adapt(data.nan_to_num()[:held_out]) if held_out else None
    header = RunHeader("title", {}, total, PER_EPOCH)
    summary = train_loop(run, TrainPlan(total, every), source, header, told)  # type: ignore[arg-type]
    return told.calls, summary


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("total", "every", "held_out", "evaluations"),
    [
        (7, 3, 5, [3, 6, 7]),
        (6, 3, 5, [3, 6]),
        (6, None, 5, [6]),
        (4, 1, 5, [1, 2, 3, 4]),
        (2, 5, 5, [2]),
        (4, 2, 0, []),
    ],
)
def test_steps_and_evaluations(
    ranks: int, total: int, every: int | None, held_out: int, evaluations: list[int]
) -> None:
    for calls, summary in worlds.run(ranks, looped, total=total, every=every, held_out=held_out):
        assert calls[0] == ("started", "title")
        steps = [record for kind, record in calls if kind == "stepped"]
        assert [r.step for r in steps] == list(range(1, total + 1))
        assert [r.epoch for r in steps] == [(s // PER_EPOCH) + 1 for s in range(total)]
        consumed = [COUNT * (s // PER_EPOCH) + min(s % PER_EPOCH * BATCH, COUNT) for s in range(1, total + 1)]
        assert [r.samples for r in steps] == consumed
        assert [r.updates for r in steps] == list(range(1, total + 1))
        assert {r.lr for r in steps} == {0.1} and not any(r.skipped for r in steps)
        evaluated = [record for kind, record in calls if kind == "evaluated"]
        assert [r.step for r in evaluated] == evaluations
        assert all(r.samples == held_out for r in evaluated)
        assert (summary["steps"], summary["updates"], summary["samples"]) == (total, total, consumed[-1])
        assert summary["epochs"] == pytest.approx(consumed[-1] / COUNT) and summary["skipped"] == 0
        last = [r for r in steps if r.epoch == steps[-1].epoch]
        sizes = [BATCH if r.step % PER_EPOCH else COUNT - 2 * BATCH for r in last]
        mean = sum(r.loss * n for r, n in zip(last, sizes, strict=True)) / sum(sizes)
        positive = sum(r.metrics["positive"] * n for r, n in zip(last, sizes, strict=True)) / sum(sizes)
        assert summary["train"] == pytest.approx({"loss": mean, "positive": positive})
        found = {"loss": evaluated[-1].loss, **evaluated[-1].metrics} if evaluated else None
        assert summary["eval"] == found


def test_waiting_for_slower_ranks_before_an_evaluation_is_training_time() -> None:
    """Rank 0's own six steps end long before rank 2 has slept six times."""
    [(calls, _), *_] = worlds.run(
        3, looped, total=6, every=None, held_out=7, strategy="parameter_server:mode=async", slow="rank=2,ms=100"
    )
    [seconds] = [record.seconds for kind, record in calls if kind == "evaluated"]
    assert seconds > 0.6


def test_ranks_are_told_and_return_the_same() -> None:
    answers = worlds.run(3, looped, total=5, every=2, held_out=7)
    times = ("seconds", "samples_per_second")
    for calls, summary in answers[1:]:
        assert calls == answers[0][0]
        assert {k: v for k, v in summary.items() if k not in times} == {
            k: v for k, v in answers[0][1].items() if k not in times
        }


def test_skipped_steps_are_told_of() -> None:
    for calls, summary in worlds.run(3, looped, total=3, every=None, held_out=0, poison=True):
        steps = [record for kind, record in calls if kind == "stepped"]
        assert [r.skipped for r in steps].count(True) == 1 and summary["skipped"] == 1
        assert steps[-1].updates == summary["updates"] == 2
        [warning] = [text for kind, text in calls if kind == "warned"]
        assert "skipped" in warning and "weights are unchanged" in warning


def saved_in_an_epoch_with_a_skipped_step(folder: str) -> Any:
    """Resumed in its middle, the epoch's mean is what it would have been: none."""
    told: list[Any] = []
    for total in (2, 3):
        data = torch.ones(COUNT, 2, dtype=torch.float64)
        data[permutation(0, 0, COUNT)[0]] = torch.nan
        run = tutti.prepare(nn.Linear(2, 1).double(), "sgd", data, loss, workers=4, batch_size=BATCH)
        saver = Checkpoints(
            run, Path(folder), context.current(), {"workers": 4, "config_sha256": ""}, 1, told.append, most_failures=1
        )
        facts = saver.restore()
        means = Means.saved(facts) if facts else None
        summary = train_loop(
            run, TrainPlan(total, None, 1), None, RunHeader("", {}, total, PER_EPOCH), Listeners(()), saver, means
        )
        told.append((run.global_step, summary["train"]["loss"]))
    return told


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_skipped_step_does_not_stop_saves(ranks: int, tmp_path: Path) -> None:
    for told in worlds.run(ranks, saved_in_an_epoch_with_a_skipped_step, folder=str(tmp_path)):
        assert [clock for clock, _ in told] == [2, 3] and all(math.isnan(value) for _, value in told)


class Obstructing(Told):
    """Lets the save of step 4 fail; may ask the run to stop then."""

    def __init__(self, run: Run, folder: Path, stop: bool) -> None:
        super().__init__()
        self.run, self.folder, self.stop = run, folder, stop

    def stepped(self, record: Any, pace: Any) -> None:
        if record.step == 3:
            # In the place of the folder for its files.
            (self.folder / f"{step_name(4)}.tmp-0").touch()
            if self.stop:
                self.run.ask_to_stop()


def obstructed(folder: str, total: int, every: int, stop: bool) -> tuple[int, str, int]:
    """Exit code and text of the error that ends the run, if any, and the number of warnings."""
    warnings: list[str] = []
    data = torch.ones(COUNT, 2, dtype=torch.float64)
    run = tutti.prepare(nn.Linear(2, 1).double(), "sgd", data, loss, workers=4, batch_size=BATCH)
    facts = {"workers": 4, "config_sha256": ""}
    saver = Checkpoints(run, Path(folder), context.current(), facts, 1, warnings.append)
    plan, header = TrainPlan(total, None, every), RunHeader("", {}, total, PER_EPOCH)
    try:
        train_loop(run, plan, None, header, Obstructing(run, Path(folder), stop), saver)  # type: ignore[arg-type]
    except (DiskError, Preempted) as error:
        return int(error.exit_code), str(error), len(warnings)
    return 0, "", len(warnings)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("total", "every", "stop", "code", "said"),
    [
        (6, 2, False, 0, ""),
        (4, 2, False, 8, "the last save failed (step 4, "),
        (6, 2, True, 75, "asked to stop (step 4). This step was not saved, --resume continues from step 2."),
        (6, 4, True, 75, "asked to stop (step 4). Nothing could be saved."),
    ],
)
def test_a_run_that_ends_without_its_last_checkpoint_says_so(
    ranks: int, total: int, every: int, stop: bool, code: int, said: str, tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path), "total": total, "every": every, "stop": stop}
    for found, text, warnings in worlds.run(ranks, obstructed, **arguments):
        assert (found, warnings) == (code, 1) and said in text, text


def test_means_weigh_by_samples() -> None:
    means = Means()
    means.add(1.0, 30, {"a": 0.5})
    means.add(4.0, 10, {"a": 1.0})
    assert means.summary() == {"loss": 1.75, "a": 0.625}
    assert Means().summary() == {"loss": 0.0}
