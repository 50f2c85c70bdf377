"""``--until`` and ``--patience`` on the command line: exit codes, the summary, and early refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compare.test_compare import prepare
from tests.faults.commands import tutti

DIGITS = ("train", "digits", "--workers", "6", "--batch-size", "60", "--eval-every", "4st", "--reproducible")


def summary(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / run / "summary.json").read_text())
    return found


def test_the_same_step_on_one_and_three_devices(tmp_path: Path) -> None:
    found = []
    for devices in ("1", "3"):
        result = tutti(tmp_path, *DIGITS, "--until", "accuracy=0.4", "--devices", devices, "--out", devices)
        assert result.code == 0, result.err
        assert "ends early at" in result.err and "accuracy >= 0.4 at step" in result.out
        found.append(summary(tmp_path, devices))
    targets = [{k: v for k, v in run["target"].items() if "seconds" not in k} for run in found]
    assert targets[0] == targets[1] and targets[0]["reached"]
    assert targets[0]["steps"] == found[0]["steps"] < 72 and found[0]["eval"]["accuracy"] >= 0.4
    assert len({run["weights_sha256"] for run in found}) == 1
    evaluations = [
        line
        for line in map(json.loads, (tmp_path / "1" / "metrics.jsonl").read_text().splitlines())
        if line["group"] == "eval"
    ]
    assert [line["step"] for line in evaluations if line["accuracy"] >= 0.4] == [targets[0]["steps"]]


def test_a_target_that_is_missed_ends_with_exit_code_9(tmp_path: Path) -> None:
    words = (*DIGITS, "--epochs", "0.5", "--until", "accuracy=0.999")
    for devices in ("1", "2"):
        result = tutti(tmp_path, *words, "--devices", devices, "--out", devices, "--max-restarts", "2")
        assert result.code == 9, result.err
        assert "accuracy >= 0.999 not reached: best 0." in result.out and "restarting" not in result.err
        found = summary(tmp_path, devices)
        assert found["exit_code"] == 9 and not found["target"]["reached"] and found["target"]["ended_by"] == "length"
        assert found["target"]["best"] == found["eval"]["accuracy"]
    # More training reaches a target that is nearer.
    result = tutti(tmp_path, "train", "--resume", "1", "--until", "accuracy=0.5", "--epochs", "3")
    assert result.code == 0, result.err
    assert summary(tmp_path, "1")["target"]["steps"] > found["steps"] and summary(tmp_path, "1")["exit_code"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--until", "acuracy=0.9"), "Did you mean 'accuracy'"),
        (("--until", "raw_accuracy=0.9"), "no held-out 'raw_accuracy'"),
        (("--until", "accuracy"), "NAME=VALUE"),
        (("--until", "accuracy<=0.9"), "a higher accuracy is better"),
        (("--until", "accuracy=0.9", "--eval-every", "none"), "--eval-every is none"),
        (("--patience", "0"), "--patience is 0"),
        (("--keep-best", "acuracy"), "Did you mean 'accuracy'"),
    ],
)
def test_what_cannot_be_reached_is_refused_before_a_process_starts(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = tutti(tmp_path, "train", "digits", "--devices", "2", *words)
    assert result.code == 2 and said.lower() in result.err.lower(), result.err
    assert not (tmp_path / "runs").exists()


def test_a_task_of_the_users_own(tmp_path: Path) -> None:
    prepare(tmp_path, 0.0, "own.py")
    words = ("train", "own.py:task", "--workers", "2", "--batch-size", "12", "--epochs", "6", "--out", "run")
    refused = tutti(tmp_path, *words, "--until", "acuracy>=0.5")
    assert refused.code == 2 and "Did you mean 'accuracy'" in refused.err, refused.err
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    result = tutti(tmp_path, *words, "--patience", "1", "--optimizer", "sgd:lr=0", "--overwrite")
    assert result.code == 0 and "ended after 1 evaluation without a better loss" in result.out, result.err
    found = summary(tmp_path, "run")
    assert found["early_stopping"]["ended_by"] == "patience" and found["epochs"] == 2


@pytest.mark.full
def test_compare_tells_steps_samples_and_time_to_the_target(tmp_path: Path) -> None:
    prepare(tmp_path, 0.0, "own.py")
    words = ("compare", "own.py:task", "--ladder", "own.toml", "--workers", "3", "--batch-size", "12", "--epochs", "2")
    result = tutti(tmp_path, *words, "--seeds", "1", "--until", "loss<=9", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    runs = {rung["name"]: rung["runs"][0] for rung in found["rungs"]}
    assert [runs[name]["steps_to_target"] for name in ("one", "many", "rule")] == [12, 4, 4]
    assert all(run["reached"] and run["samples_to_target"] == 48 for run in runs.values())
    said = "'many' reached loss<=9 with 1 of 1 seed, after 4 steps (× 0.33), 48 samples (× 1.00)"
    assert any(sentence.startswith(said) for sentence in found["verdict"]), found["verdict"]
    table = (tmp_path / "runs" / "compare-own-own" / "table.md").read_text()
    assert "samples to it" in table and "1 of 1" in table


@pytest.mark.full
def test_compared_runs_that_miss_their_target_are_finished_runs(tmp_path: Path) -> None:
    prepare(tmp_path, 0.0, "own.py")
    words = ("compare", "own.py:task", "--ladder", "own.toml", "--workers", "3", "--batch-size", "12", "--epochs", "2")
    missed = tutti(tmp_path, *words, "--seeds", "1", "--until", "loss<=0.0001")
    assert missed.code == 0 and "'one' reached loss<=0.0001 with 0 of 1 seed." in missed.out, missed.err
