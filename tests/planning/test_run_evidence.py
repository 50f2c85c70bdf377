"""Runs that are written by hand: what they say of data to a target and of steps, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutti.config.train_config import TrainConfig
from tutti.config.training_target import TrainingTarget
from tutti.errors import TargetError, UsageError
from tutti.metrics.records import config_toml
from tutti.planning.critical_batch import noise_evidence
from tutti.planning.device_plan import TargetData
from tutti.planning.law_fit import fit_target
from tutti.planning.plan_candidates import check_measured_algorithms, measured_steps
from tutti.planning.run_evidence import find_runs, measured_targets, read_evidence, usable_runs

TARGET = TrainingTarget.parse("accuracy=0.93")


def write_run(
    folder: Path, batch: int, samples: int | None, step_seconds: float = 0.01, task: str = "digits", **options: Any
) -> Path:
    """A run of 100 steps that has reached the target after so many samples; None: never."""
    folder.mkdir(parents=True)
    config = TrainConfig(**{"batch_size": batch, "devices": "1", "epochs": 20.0, "until": "accuracy=0.93", **options})
    (folder / "config.toml").write_text(config_toml(config, task), encoding="utf-8")
    records: list[dict[str, Any]] = [
        {"group": "train", "step": n, "samples": n * batch, "seconds": 1.0 + n * step_seconds, "loss": 1.0}
        for n in range(1, 101)
    ]
    records.append({"group": "eval", "step": 100, "samples": 359, "accuracy": 0.94, "loss": 0.2, "seconds": 2.0})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    target = {"metric": "accuracy", "better": "higher", "value": 0.93, "reached": samples is not None}
    ends = (None, None) if samples is None else (samples - 1, samples + 1)
    target |= {"samples_before": ends[0], "samples": ends[1], "epochs": samples and samples / 1438}
    (folder / "summary.json").write_text(
        json.dumps({"task": task, "global_batch_size": batch, "target": target}), encoding="utf-8"
    )
    (folder / "env.json").write_text(json.dumps({"host": "lab", "devices": []}), encoding="utf-8")
    return folder


def evidence(*folders: Path) -> list[Any]:
    return [read_evidence(folder) for folder in folders]


def test_steps_and_samples_are_read(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 32, 6400)
    write_run(tmp_path / "b", 32, 7000, step_seconds=0.02)
    write_run(tmp_path / "c", 128, 9600, step_seconds=0.03)
    assert [path.name for path in find_runs([tmp_path, tmp_path / "a"])] == ["a", "b", "c"]
    runs = evidence(*find_runs([tmp_path]))
    assert runs[0].step_seconds == pytest.approx(0.01) and runs[0].host == "lab cpu"
    target, found, notes = measured_targets(runs, None, "digits")
    assert str(target) == str(TARGET) and not notes
    assert [(each.batch, each.samples, each.runs) for each in found] == [(32, 7000, 2), (128, 9600, 1)]
    steps = measured_steps(runs)
    assert [(each.devices, each.batch, each.strategy) for each in steps] == [(1, 32, "mirrored"), (1, 128, "mirrored")]
    assert steps[0].seconds == pytest.approx(0.015) and steps[0].measured and "2 runs" in steps[0].basis


def test_measured_steps_of_two_strategies_err_independently(tmp_path: Path) -> None:
    """Equal draws would make any difference of two medians certain."""
    for number, strategy in enumerate(("mirrored", "sharded", "sharded:stage=1")):
        for seconds in (0.01, 0.02):
            write_run(tmp_path / f"{number}-{seconds}", 32, 6400, seconds, strategy=strategy, devices="2")
    drawn = [step.draws for step in measured_steps(evidence(*find_runs([tmp_path])))]
    found = np.corrcoef(drawn)[np.triu_indices(3, 1)]
    assert len(found) == 3 and (np.abs(found) < 0.3).all()


def test_plan_and_noise_take_the_same_samples_to_the_target(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 32, 6400)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    summary["target"] |= {"samples_before": 6000, "samples": 8000}
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    _, (planned,), notes = measured_targets(evidence(run), TARGET, "digits")
    noise = noise_evidence(run)
    assert planned.samples == noise.samples == 7000
    assert planned.spread == noise.spread == pytest.approx(2000 / 12**0.5 / 7000)
    assert any("between 6,000 and 8,000 samples" in note for note in notes)
    # The interval is part of the draws: coarse evaluations leave a wide one.
    coarse = TargetData([planned], None, {}, "digits").at(32)
    assert np.std(np.log(coarse.draws)) == pytest.approx(planned.spread, rel=0.2)


def test_coarse_evaluations_count_less_in_the_fit() -> None:
    batches, runs = np.array([32.0, 64.0, 128.0]), np.ones(3)
    data = 6400 * (1 + batches / 256) * np.array([1.0, 1.2, 1.0])
    plain, _ = fit_target(batches, data, runs).predict(256.0)
    weighed, _ = fit_target(batches, data, runs, np.array([0.0, 0.2, 0.0])).predict(256.0)
    assert abs(weighed - 12800) < abs(plain - 12800)


def test_a_damaged_environment_says_nothing_of_the_host(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 64, 6400)
    assert read_evidence(run).host == "lab cpu"
    (run / "env.json").write_text("[]", encoding="utf-8")
    assert read_evidence(run).host == ""


def test_a_run_that_missed_the_target_counts_as_infinite(tmp_path: Path) -> None:
    runs = evidence(
        write_run(tmp_path / "a", 32, 6400),
        write_run(tmp_path / "b", 128, None),
        write_run(tmp_path / "c", 128, 9600),
        write_run(tmp_path / "d", 32, 6000),
        write_run(tmp_path / "e", 32, None),
    )
    _, found, notes = measured_targets(runs, TARGET, "digits")
    assert [(each.batch, each.samples) for each in found] == [(32, 6400)]
    assert any("batch 128 is left out" in note for note in notes)
    # Of a run that diverged tutti train leaves no more than its exit code.
    (tmp_path / "a" / "summary.json").write_text('{"exit_code": 6}')
    diverged = evidence(*(tmp_path / name for name in "abde"))
    with pytest.raises(TargetError, match="batch 32 is left out: 2 of 3 runs missed it"):
        measured_targets(diverged, TARGET, "digits")
    assert not diverged[0].target["reached"]
    with pytest.raises(TargetError, match="no run has reached"):
        measured_targets(runs[1:2], TARGET, "digits")


def test_other_targets_and_metrics_are_refused(tmp_path: Path) -> None:
    runs = evidence(write_run(tmp_path / "a", 32, 6400))
    with pytest.raises(UsageError, match=r"no run was trained to accuracy >= 0\.95"):
        measured_targets(runs, TrainingTarget.parse("accuracy=0.95"), "digits")
    with pytest.raises(UsageError, match="Did you mean 'accuracy'"):
        measured_targets(runs, TrainingTarget.parse("acuracy>=0.9"), "digits")
    with pytest.raises(UsageError, match="targets of the runs are: none"):
        measured_targets([], None, "digits")


def test_runs_of_two_problems_are_refused_and_changing_batches_left_out(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", 32, 6400)
    growing = write_run(tmp_path / "b", 64, 6400, batch_growth="milestones=5ep,factor=2")
    kept, notes = usable_runs(evidence(first, growing), "digits")
    assert len(kept) == 1 and "left out" in notes[0]
    _, notes = usable_runs(evidence(first, write_run(tmp_path / "r", 64, 6400, clip=1.0)), "digits")
    assert notes == ["the runs differ in clip: 1.0, None"]
    with pytest.raises(UsageError, match="differ in 'model'"):
        usable_runs(evidence(first, write_run(tmp_path / "c", 64, 6400, model="cnn")), "digits")
    with pytest.raises(UsageError, match="trains 'text'"):
        usable_runs(evidence(write_run(tmp_path / "d", 64, 6400, task="text")), "digits")
    with pytest.raises(UsageError, match="there is no run"):
        find_runs([tmp_path / "none"])


def test_a_run_that_has_not_ended_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    half, done = write_run(tmp_path / "half", 64, 9000), write_run(tmp_path / "done", 32, 5000)
    (half / "summary.json").write_text('{"target": {"met', encoding="utf-8")
    found = evidence(half, done)
    assert found[0].target is None and found[0].step_seconds is not None
    assert str(half) in caplog.text and "has not ended" in caplog.text and str(done) not in caplog.text
    assert [each.batch for each in measured_targets(found, TARGET, "digits")[1]] == [32]


def test_an_algorithm_without_one_update_needs_a_measured_run(tmp_path: Path) -> None:
    runs = evidence(
        write_run(tmp_path / "a", 64, 9000, strategy="local_sgd:period=4", devices="2", workers=2),
        write_run(tmp_path / "b", 64, None, strategy="diloco", devices="2", workers=2),
    )
    steps = measured_steps(runs)
    assert [(step.strategy, step.samples) for step in steps] == [("local_sgd:period=4", 9000.0)]
    check_measured_algorithms(["local_sgd:period=4", "mirrored"], steps, "tutti train digits")
    for name in ("diloco", "parameter_server:mode=async"):
        with pytest.raises(UsageError, match=f"tutti train digits --strategy {name}"):
            check_measured_algorithms([name], steps, "tutti train digits")
