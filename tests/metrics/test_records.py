"""The run directory: strict JSON, whole lines, whole files, whatever the disk does."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tutti.config.train_config import TrainConfig
from tutti.errors import DiskError, UsageError
from tutti.metrics import records
from tutti.metrics.listener import Clock, EvalRecord, Pace
from tutti.metrics.records import RunDirectory, make_run_directory, read_summary, record_exit, write_json
from tutti.types.step_records import StepRecord

NAN = float("nan")


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, Any]]:
    """Without the time, which each must have, not before that of the line above."""
    found = [strict(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    times = [line.pop("time") for line in found if line.get("group") != "train" or "time" in line]
    assert len(times) == len(found) and times == sorted(times) and all(abs(t - time.time()) < 1000 for t in times)
    return found


def step(number: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(number, 0, number * 8, number, loss, {"accuracy": 0.75}, grad_norm=NAN, lr=0.1)


def test_metrics(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    run.stepped(step(1), Pace(10.0, 0.25, 1.0))
    run.stepped(step(2, loss=float("inf")), Pace(10.0, 0.5, 1.0))
    run.evaluated(EvalRecord(2, 1, 0.4, {"accuracy": 0.8}, 300))
    run.close()
    head = {"group": "train", "epoch": 0}
    assert lines(tmp_path) == [
        {**head, "step": 1, "samples": 8, "updates": 1, "loss": 0.5, "accuracy": 0.75}
        | {"grad_norm": None, "lr": 0.1, "seconds": 0.25},
        {**head, "step": 2, "samples": 16, "updates": 2, "loss": None, "accuracy": 0.75}
        | {"grad_norm": None, "lr": 0.1, "seconds": 0.5},
        {"group": "eval", "step": 2, "epoch": 1, "samples": 300, "loss": 0.4, "accuracy": 0.8, "seconds": 0.5},
    ]


def test_an_evaluation_of_the_average_says_so(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    run.evaluated(EvalRecord(2, 1, 0.4, {"accuracy": 0.8}, 300, raw={"loss": NAN, "accuracy": 0.7}))
    run.close()
    [line] = lines(tmp_path)
    assert line["weights"] == "ema"
    values = {"loss": 0.4, "accuracy": 0.8, "raw_loss": None, "raw_accuracy": 0.7}
    assert {name: line[name] for name in values} == values


def test_a_line_is_written_at_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    run.stepped(step(1), Pace(1, 0, 0))
    assert [line["step"] for line in lines(tmp_path)] == [1]
    run.warned("careful")
    assert lines(tmp_path)[1] == {"group": "warning", "text": "careful", "seconds": 0.0}
    run.close()


def test_a_resumed_run_keeps_its_lines_whenever_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    for number in (1, 2, 3):
        run.stepped(step(number), Pace(1, 0, 0))
    run.close()

    def dies(source: Any, target: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tutti.metrics.records.os.replace", dies)
        RunDirectory(tmp_path, TrainConfig(), "digits", resumed=2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    again = RunDirectory(tmp_path, TrainConfig(), "digits", resumed=2)
    again.stepped(step(3), Pace(1, 0, 0))
    again.close()
    assert [line["step"] for line in lines(tmp_path) if line["group"] == "train"] == [1, 2, 3]


def test_a_resumed_run_counts_what_is_done_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    for number in range(1, 8):
        run.stepped(step(number), Pace(1, 0, 0))
    run.evaluated(EvalRecord(7, 1, 0.4, {}, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"group": "train", "step": 8, "ha')
    for resumed, lost in ((5, 2), (3, 2)):
        RunDirectory(tmp_path, TrainConfig(), "digits", resumed).close()
        assert lines(tmp_path)[-1] == {"group": "resume", "from": resumed, "lost": lost, "seconds": 0.0}
        assert [line["step"] for line in lines(tmp_path) if line["group"] == "train"] == list(range(1, resumed + 1))
    # What was lost before stays on record, however far back the last resume went.
    assert sum(line["group"] == "resume" for line in lines(tmp_path)) == 2


def test_the_clock_goes_on_after_what_was_lost(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits", clock=Clock(1000.0))
    for number in (1, 2, 3):
        run.stepped(step(number), Pace(1, 10.0 * number, 0))
    run.close()
    # The checkpoint is of step 2, and step 3 took ten seconds all the same.
    again = RunDirectory(tmp_path, TrainConfig(), "digits", 2, Clock(1000.0, 20.0))
    assert again.clock == Clock(1000.0, 30.0)
    again.warned("before the first step")
    again.close()
    assert [line["seconds"] for line in lines(tmp_path)] == [10.0, 20.0, 30.0, 30.0]
    # Of a checkpoint from before it was kept: the folder knows, or nobody does.
    assert RunDirectory(tmp_path, TrainConfig(), "digits", 2, Clock.saved({})).clock == Clock(1000.0, 30.0)
    (tmp_path / "env.json").write_text("{}")
    (tmp_path / "metrics.jsonl").unlink()
    assert RunDirectory(tmp_path, TrainConfig(), "digits", 2, Clock.saved({"step": 2})).clock == Clock(None, 0.0)
    assert json.loads((tmp_path / "env.json").read_text())["started"] is None


def test_configuration_and_environment(tmp_path: Path) -> None:
    RunDirectory(tmp_path, TrainConfig(out=str(tmp_path), overwrite=True, seed=3), "digits").close()
    config = tomllib.loads((tmp_path / "config.toml").read_text())
    assert config.pop("task") == "digits"
    assert TrainConfig(**config) == TrainConfig(seed=3)
    found = strict((tmp_path / "env.json").read_text())
    assert found["versions"]["torch"] and found["cpu_count"] >= 1 and found["torch_threads"] >= 1


def test_the_configuration_of_a_resumed_run_starts_a_new_one(tmp_path: Path) -> None:
    RunDirectory(tmp_path, TrainConfig(resume=str(tmp_path), seed=3), "digits", resumed=0).close()
    assert tomllib.loads((tmp_path / "config.toml").read_text()).keys().isdisjoint({"resume", "out", "change"})


def test_summary_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    seen: list[bool] = []
    replace = os.replace

    def watch(source: Any, target: Any) -> None:
        seen.append(Path(target).exists())
        assert strict(Path(source).read_text())["steps"] == 3
        replace(source, target)

    monkeypatch.setattr("tutti.metrics.records.os.replace", watch)
    run.finished({"steps": 3, "train": {"loss": NAN}, "exit_code": 0})
    run.close()
    assert seen == [False]
    assert strict((tmp_path / "summary.json").read_text()) == {"steps": 3, "train": {"loss": None}, "exit_code": 0}
    names = {"config.toml", "env.json", "metrics.jsonl", "summary.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    record_exit(tmp_path, 6)
    assert read_summary(tmp_path) == {"steps": 3, "train": {"loss": None}, "exit_code": 6}


def full_after(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the disk takes ``capacity`` bytes more and is then full."""
    write, left = os.write, [capacity]

    def limited(descriptor: int, data: Any) -> int:
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        taken = write(descriptor, bytes(data)[: left[0]])
        left[0] -= taken
        return taken

    monkeypatch.setattr("tutti.metrics.records.os.write", limited)
    monkeypatch.setattr(records, "MOST_WAITING", 3)


def test_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    run.stepped(step(1), Pace(1, 0, 0))
    with monkeypatch.context() as full:
        full_after(50, full)
        run.stepped(step(2), Pace(1, 0, 0))
        run.evaluated(EvalRecord(2, 0, 0.4, {}, 3))
        assert [line["step"] for line in lines(tmp_path)] == [1]
    run.stepped(step(3), Pace(1, 0, 0))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 2, 3]
    run.close()


def test_disk_that_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    run.stepped(step(1), Pace(1, 0, 0))
    full_after(50, monkeypatch)
    run.stepped(step(2), Pace(1, 0, 0))
    with pytest.raises(DiskError, match=r"No space left on device.*--out") as caught:
        run.finished({"exit_code": 0})
    assert caught.value.exit_code == 8
    run.stepped(step(3), Pace(1, 0, 0))
    with pytest.raises(DiskError):
        run.stepped(step(4), Pace(1, 0, 0))
    run.close()
    assert [line["step"] for line in lines(tmp_path)] == [1] and not read_summary(tmp_path)


def test_full_disk_keeps_the_old_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    record_exit(tmp_path, 3)
    full_after(10, monkeypatch)
    with pytest.raises(DiskError):
        run.finished({"exit_code": 0})
    run.close()
    assert read_summary(tmp_path) == {"exit_code": 3}
    assert not list(tmp_path.glob(".*"))


def test_directory_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(runs=str(tmp_path / "runs"))
    paths = [make_run_directory(config, "lessons/line.py:make") for _ in range(2)]
    assert paths[0] != paths[1]
    assert all(path.is_dir() and path.name.startswith("line-make-20") for path in paths)


def test_used_directory(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000060").mkdir(parents=True)
    for name in ("summary.json", "metrics.jsonl", "mine.txt"):
        (tmp_path / name).write_text("{}")
    config = TrainConfig(out=str(tmp_path))
    with pytest.raises(UsageError, match="--overwrite"):
        make_run_directory(config, "digits")
    assert make_run_directory(dataclasses.replace(config, overwrite=True), "digits") == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_directory_of_a_run_that_never_began_is_taken_again(tmp_path: Path) -> None:
    config = TrainConfig(out=str(tmp_path))
    (tmp_path / "logs").mkdir()
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(UsageError, match="not empty"):
        make_run_directory(config, "digits")
    (tmp_path / "logs" / "failure-rank2.json").write_text("{}")
    assert make_run_directory(config, "digits") == tmp_path
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        make_run_directory(config, "digits")


def test_a_summary_with_an_invalid_byte_keeps_its_entries(tmp_path: Path) -> None:
    found = {"stopped": os.fsdecode(b"no more of \xff")}
    write_json(tmp_path / "summary.json", found)
    record_exit(tmp_path, 0)
    assert read_summary(tmp_path) == {**found, "exit_code": 0}


def test_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.os, "access", lambda path, mode: False)
    with pytest.raises(DiskError, match="no permission"):
        make_run_directory(TrainConfig(out=str(tmp_path)), "digits")
