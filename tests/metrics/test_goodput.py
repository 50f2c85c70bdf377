"""The account of a run's time: every second has one cause, and the causes are those that a test made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import tutti, write_task
from tutti.errors import UsageError
from tutti.metrics.goodput import CAUSES, Goodput, measured_goodput, run_goodput
from tutti.parallel.pipeline.pipeline_schedule import bubble_fraction

STEP, DATA = 2.0, 0.25


class Records:
    """Records of a run whose clock is advanced by hand; it begins at 1000."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.now, self.seconds, self.number = 1000.0, 0.0, 0

    def step(self, seconds: float = STEP, data: float = DATA) -> None:
        self.now, self.seconds, self.number = self.now + seconds, self.seconds + seconds, self.number + 1
        self._add(group="train", samples=8 * self.number, data_seconds=data)

    def evaluate(self, seconds: float) -> None:
        begun = self.seconds
        self.now += seconds
        self._add(group="eval", at=begun)

    def resume(self, step: int, launched: float | None) -> None:
        lost = self.number - step
        kept = [line for line in self.lines if line.get("step", 0) <= step]
        self.lines, self.number = kept, step
        self._add(group="resume", lost=lost, launched=launched)

    def _add(self, group: str, at: float | None = None, **more: Any) -> None:
        where = {} if group == "resume" else {"step": self.number}
        line = {"group": group, **where, "seconds": self.seconds if at is None else at, "time": self.now, **more}
        self.lines.append(line)


def account(records: Records, ended: float | None = None) -> Goodput:
    found = measured_goodput(records.lines, 1000.0, ended)
    assert found.productive + sum(found.lost.values()) == pytest.approx(found.elapsed)
    return found


def nonzero(found: Goodput) -> dict[str, float]:
    return {cause: value for cause, value in found.lost.items() if value > 1e-9}


def test_each_pause_has_its_cause() -> None:
    records = Records()
    records.now += 30
    records.step(seconds=STEP + 5)
    for _ in range(9):
        records.step()
    records.evaluate(7)
    records.now += 3
    records.step()
    records.step(seconds=STEP + 4)
    found = account(records, records.now + 11)
    assert nonzero(found) == pytest.approx(
        {"start": 35, "data": 12 * DATA, "evaluation": 7, "save": 14, "slow steps": 4}
    )
    assert found.productive == pytest.approx(12 * (STEP - DATA)) and found.steps == 12 and found.attempts == 1
    assert found.elapsed == pytest.approx(30 + 12 * STEP + 9 + 7 + 3 + 11)
    assert found.fraction == pytest.approx(found.productive / found.elapsed)


@pytest.mark.parametrize("by_launcher", [True, False])
def test_a_failure_costs_the_steps_that_are_computed_again(by_launcher: bool) -> None:
    records = Records()
    for _ in range(10):
        records.step()
    records.now += 20
    launched = None if by_launcher else records.now
    records.now += 5
    records.resume(6, launched)
    for _ in range(6):
        records.step()
    found = account(records)
    # 4 steps are lost; the launcher notices the end at an unknown moment of the 25 s.
    lost = {"failure": 4 * STEP, "restart": 25.0} if by_launcher else {"failure": 4 * STEP + 20, "restart": 5.0}
    assert nonzero(found) == pytest.approx({"data": 12 * DATA, **lost})
    assert found.steps == 12 and found.attempts == 2


def test_a_stop_without_lost_steps_is_no_failure() -> None:
    records = Records()
    for _ in range(5):
        records.step()
    records.now += 100
    records.resume(5, records.now)
    records.now += 2
    records.step()
    assert nonzero(account(records)) == pytest.approx({"data": 6 * DATA, "stopped": 100, "restart": 2})


def test_steps_of_another_size_are_not_slow() -> None:
    records = Records()
    for _ in range(8):
        records.step()
    records.lines.append(
        records.lines.pop() | {"samples": 8 * 8 + 24, "seconds": 8 * STEP + 6, "time": 1000 + 8 * STEP + 6}
    )
    assert "slow steps" not in nonzero(account(records))


def test_steps_without_an_update_are_lost() -> None:
    records = Records()
    for _ in range(9):
        records.step()
    for line in records.lines[2:5]:
        line |= {"skipped": True, "bubble": 0.25}
    found = account(records)
    assert nonzero(found) == pytest.approx({"data": 9 * DATA, "skipped steps": 3 * (STEP - DATA)})
    assert found.steps == 6


def test_a_bubble_and_stragglers_take_their_shares_of_the_time_of_steps() -> None:
    records = Records()
    for _ in range(9):
        records.step()
    records.step(seconds=STEP + 4)
    for line in records.lines:
        line["bubble"] = 0.25
    worked = 10 * (STEP - DATA)
    others = {"data": 10 * DATA, "slow steps": 4}
    assert nonzero(account(records)) == pytest.approx({**others, "bubble": worked / 4})
    for idle, late in ((0.35, 0.1), (0.2, 0.0)):
        found = measured_goodput(records.lines, 1000.0, None, idle)
        assert nonzero(found) == pytest.approx(
            {**others, "bubble": worked / 4, **({"straggler": late * worked} if late else {})}
        )
        assert found.productive == pytest.approx(worked * (0.75 - late))
        assert found.productive + sum(found.lost.values()) == pytest.approx(found.elapsed)
        assert any("bubble" in note for note in found.notes) and any("straggler" in note for note in found.notes)


def test_what_the_records_do_not_tell_is_said() -> None:
    records = Records()
    records.step()
    for line in records.lines:
        del line["data_seconds"]
    found = account(records)
    assert "data" not in found.lost and any("data" in note for note in found.notes)
    for bad, said in (([], "no step"), ([{"group": "train", "step": 1, "seconds": 1.0}], "no times")):
        with pytest.raises(UsageError, match=said):
            measured_goodput(bad, 0.0, None)


@pytest.mark.parametrize("content", ["5", "[]", '{"launched": "x"}', "[" * 100_000])
def test_an_environment_that_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text(content)
    (tmp_path / "metrics.jsonl").write_text('{"group": "train", "step": 1, "seconds": 1.0, "time": 1.0}\n')
    with pytest.raises(UsageError, match=r"there is no run|start is unknown"):
        run_goodput(tmp_path)


def test_a_pipeline_and_its_trace_tell_bubble_and_stragglers(tmp_path: Path) -> None:
    words = ("--strategy", "pipeline:stages=2", "--workers", "1", "--batch-size", "32", "--micro-batch", "8")
    run = ("train", "digits", *words, "--devices", "2", "--steps", "8", "--trace", "4:3", "--out", "run")
    done = tutti(tmp_path, *run)
    assert done.code == 0, done.err
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    bubble = bubble_fraction("1f1b", 2, 4)
    assert [line["bubble"] for line in steps if line["group"] == "train"] == pytest.approx([bubble] * 8, abs=1e-6)
    found = run_goodput(tmp_path / "run")
    assert found.lost["bubble"] > 0 and "straggler" in found.lost
    assert found.productive + sum(found.lost.values()) == pytest.approx(found.elapsed)
    peaks = json.loads((tmp_path / "run" / "summary.json").read_text())["peak_memory"]
    assert [peak["rank"] for peak in peaks] == [0, 1]
    assert all(peak["resident"] > 2**20 and peak["device"] is None for peak in peaks)


def test_a_run_that_lost_steps(tmp_path: Path) -> None:
    own = write_task(tmp_path)
    words = ("--workers", "2", "--batch-size", "4", "--checkpoint-every", "2st", "--devices", "2")
    assert tutti(tmp_path, "train", own, *words, "--steps", "10", "--out", "run").code == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000010")
    again = tutti(tmp_path, "train", own, *words, "--steps", "12", "--resume", "run")
    assert again.code == 0, again.err
    shown = tutti(tmp_path, "goodput", "run", "--json")
    assert shown.code == 0, shown.err
    found = json.loads(shown.out)
    assert set(found["lost_seconds"]) <= set(CAUSES) and found["attempts"] == 2 and found["steps"] == 12
    assert all(found["lost_seconds"][cause] > 0 for cause in ("start", "restart", "failure", "data"))
    assert found["productive_seconds"] + sum(found["lost_seconds"].values()) == pytest.approx(found["elapsed_seconds"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    launched = json.loads((tmp_path / "run" / "env.json").read_text())["launched"]
    assert found["elapsed_seconds"] == pytest.approx(summary["ended"] - launched)
    assert run_goodput(tmp_path / "run").fraction == found["goodput"] > 0
    table = tutti(tmp_path, "goodput", "run")
    assert table.out.startswith("goodput ") and "12 steps, 2 starts" in table.out and "--trace" in table.out
    assert tutti(tmp_path, "goodput", "nothing").code == 2
