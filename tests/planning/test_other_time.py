"""Start, evaluations and saves of a plan: as a run's records give them, and as they change with devices and batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planning.test_device_plan import MEASURED, step
from tests.planning.test_run_evidence import evidence, write_run
from tutti.config.spec import Duration
from tutti.config.train_config import TrainConfig
from tutti.planning.conformal_band import shipped_residuals
from tutti.planning.device_plan import TargetData, device_plans, lost_reason
from tutti.planning.other_time import OtherTime, RunOverhead
from tutti.planning.run_evidence import other_time

START, STEP, EVALUATION, SAVE, END = 30.0, 0.5, 4.0, 1.5, 3.0
ONE = RunOverhead(devices=2, ranks=2, start=20.0, evaluation=6.0, save=1.0, end=2.0)
KNOWN = OtherTime((ONE,), Duration.parse("1ep"), Duration.parse("1000sa"), epoch=400.0)


def write_timed(folder: Path, devices: int, epochs: int = 3, **options: Any) -> Path:
    """A run of 4 steps of 8 samples an epoch, evaluated and saved after each epoch."""
    run = write_run(folder, 8, 32 * epochs, devices=str(devices), **options)
    lines, now, spent, number = [], 1000.0 + START, 0.0, 0
    for epoch in range(epochs):
        for _ in range(4):
            now, spent, number = now + STEP, spent + STEP, number + 1
            train = {"group": "train", "step": number, "epoch": epoch + 1, "samples": 8 * number, "seconds": spent}
            lines.append({**train, "time": now})
        now += EVALUATION
        held = {"group": "eval", "step": number, "epoch": epoch + 1, "samples": 99, "accuracy": 0.9, "seconds": spent}
        lines.append({**held, "time": now})
        now += SAVE * (epoch + 1 < epochs)
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    (run / "summary.json").write_text(json.dumps({**summary, "ended": now + END}), encoding="utf-8")
    (run / "env.json").write_text(json.dumps({"host": "lab", "devices": [], "launched": 1000.0}), encoding="utf-8")
    return run


def test_a_run_says_what_it_spent_besides_training(tmp_path: Path) -> None:
    (run,) = evidence(write_timed(tmp_path / "a", 2))
    assert run.epoch_samples == 32 and run.overhead is not None
    assert (run.overhead.devices, run.overhead.ranks) == (2, 2)
    found = (run.overhead.start, run.overhead.evaluation, run.overhead.save, run.overhead.end)
    assert found == pytest.approx((START, EVALUATION, SAVE, END))
    # The intervals are those of the planned run.
    known = other_time([run], TrainConfig(eval_every="2st", checkpoint_every="none"))
    assert known.seconds(2, 2, 8, 96) == pytest.approx({"start": START, "evaluation": 6 * EVALUATION, "save": END})
    # Records without times, and a run that has not ended, say nothing.
    assert evidence(write_run(tmp_path / "b", 8, 96))[0].overhead is None
    (tmp_path / "a" / "summary.json").write_text("{}", encoding="utf-8")
    assert evidence(tmp_path / "a")[0].overhead is None
    assert other_time([], TrainConfig()).seconds(2, 2, 8, 96) == {}


def test_a_run_with_one_save_does_not_say_how_long_others_take(tmp_path: Path) -> None:
    (run,) = evidence(write_timed(tmp_path / "a", 1, epochs=1, checkpoint_every="none"))
    assert run.overhead is not None and run.overhead.save is None and run.overhead.end == pytest.approx(END)
    seconds = OtherTime((run.overhead,), None, Duration.parse("16sa")).seconds(1, 1, 8, 64)
    assert "save" not in seconds and seconds["evaluation"] == pytest.approx(EVALUATION)


def test_evaluations_divide_over_data_ranks_and_the_rest_does_not() -> None:
    """3,000 samples: 8 epochs and 3 saves."""
    assert KNOWN.seconds(2, 2, 10, 3000) == pytest.approx({"start": 20, "evaluation": 8 * 6, "save": 2 + 2 * 1})
    assert KNOWN.seconds(8, 8, 10, 3000) == pytest.approx({"start": 20, "evaluation": 8 * 6 / 4, "save": 4})
    # Eight devices in stages are one data rank, which evaluates all samples.
    assert KNOWN.seconds(8, 1, 10, 3000)["evaluation"] == pytest.approx(8 * 6 * 2)
    # An interval below a global batch is a step.
    assert KNOWN.seconds(2, 2, 1500, 3000)["evaluation"] == pytest.approx(2 * 6)
    unknown = OtherTime((ONE,), Duration.parse("1ep"), Duration.parse("10st"))
    assert unknown.seconds(2, 2, 10, 95) == pytest.approx({"start": 20, "save": 2})


def test_the_runs_with_the_nearest_number_of_devices_count() -> None:
    slow = RunOverhead(16, 16, 100.0, None, None, 5.0)
    both = OtherTime((ONE, slow, RunOverhead(16, 16, 200.0, 2.0, None, 5.0)))
    assert both.seconds(4, 4, 10, 100)["start"] == 20 and both.seconds(8, 8, 10, 100)["start"] == 150
    assert both.seconds(8, 8, 10, 100)["evaluation"] == pytest.approx(2 * 16 / 8)


def test_time_cost_and_reasons_have_what_is_spent_besides_training() -> None:
    data = TargetData(MEASURED, None, {}, "digits").with_other(KNOWN)
    planned = step(2, 64, {"compute": 0.1})
    (plain,) = device_plans([planned], TargetData(MEASURED, None, {}, "digits"), 3600.0)
    (found,) = device_plans([planned], data, 3600.0)
    besides = {"start": 20, "evaluation": 320 * 6, "save": 2 + 127}
    assert found.other == pytest.approx(besides) and found.training_seconds == pytest.approx(plain.seconds)
    assert found.seconds == pytest.approx(plain.seconds + sum(besides.values()))
    assert found.cost == pytest.approx(2 * found.seconds)
    assert (found.draws - plain.draws) == pytest.approx(sum(besides.values()))
    # The band is of training; what was measured besides shifts it.
    banded = replace(planned, batch=256, band=(0.08, 0.125))
    alone, whole = (
        device_plans([banded], TargetData(MEASURED, None, shipped_residuals(), "digits").with_other(other), None)[0]
        for other in (OtherTime(), KNOWN)
    )
    assert alone.band is not None and whole.band is not None and sum(whole.other.values()) > 0
    shift = sum(whole.other.values())
    assert whole.band == pytest.approx((alone.band[0] + shift, alone.band[1] + shift))


def test_a_plan_may_lose_by_its_evaluations() -> None:
    data = TargetData(MEASURED, None, {}, "digits").with_other(KNOWN)
    apart = step(8, 64, {"compute": 0.1})
    stages = replace(step(8, 64, {"compute": 0.0999}), strategy="pipeline:stages=8")
    found = device_plans([apart, stages], data, None)
    assert found[0].step is apart
    reason = lost_reason(found[1], found[0])
    assert reason.term == "evaluation" and reason.closes == pytest.approx(320 * 6 * (2 - 1 / 4))
    assert "s by evaluation" in reason.text
