"""A real run, and the same run again from the ``config.toml`` that it left."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.forkserver import run

WORDS = ["train", "digits", "--devices", "1", "--workers", "2", "--steps", "2", "--device", "cpu", "--out", "first"]


def tutti(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(["-m", "tutti", *words], cwd, os.environ, 300)


def test_config_reruns_to_the_same_weights(tmp_path: Path) -> None:
    first = tutti(*WORDS, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.splitlines()) == 1
    again = tutti("train", "--config", "first/config.toml", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert json.loads(again.stdout)["weights_sha256"] == summary["weights_sha256"]
    assert summary["weights_sha256"][:12] in first.stdout
    steps = [json.loads(line)["step"] for line in (tmp_path / "first" / "metrics.jsonl").open()]
    assert steps == [1, 2, 2]


def test_a_run_that_named_no_workers_goes_on_with_those_it_had(tmp_path: Path) -> None:
    """As many as it had devices: on fewer, or as one pipeline, they are played by fewer data ranks."""
    told = ["--steps", "2", "--eval-every", "none"]
    first = tutti("train", "digits", "--devices", "2", *told, "--out", "out", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    for steps, words in ((3, ("--devices", "1")), (4, ("--devices", "3", "--strategy", "pipeline"))):
        again = tutti("train", "--resume", "out", *words, "--steps", str(steps), cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert (summary["steps"], summary["workers"]) == (steps, 2)
        assert "draws are those of" not in (tmp_path / "out" / "metrics.jsonl").read_text()
    words = ("--devices", "3", "--strategy", "mirrored", "--steps", "5")
    more = tutti("train", "--resume", "out", *words, cwd=tmp_path)
    assert more.returncode == 2 and "2 workers cannot be distributed over 3 data ranks" in more.stderr
    assert "Take --micro-batch 16 or less, --workers 3 or more, or fewer devices." in more.stderr
    for devices, workers, step in (("3", "3", 5), ("1", "1", 6)):
        words = ("--devices", devices, "--workers", workers, "--strategy", "mirrored", "--steps", str(step))
        again = tutti("train", "--resume", "out", *words, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert json.loads((tmp_path / "out" / "summary.json").read_text())["workers"] == int(workers)
        told = [line for line in map(json.loads, (tmp_path / "out" / "metrics.jsonl").open()) if "text" in line]
        assert sum("draws are those of" in line["text"] for line in told) == step - 4


def test_the_newest_run_goes_on_with_the_workers_it_had(tmp_path: Path) -> None:
    """``--resume`` alone, on other devices, as often as one likes."""
    words = ("train", "digits", "--device", "cpu", "--reproducible", "--epochs", "0.1", "--eval-every", "none")
    assert tutti(*words, "--devices", "2", "--checkpoint-every", "1st", cwd=tmp_path).returncode == 0
    for _ in range(2):
        again = tutti(*words, "--devices", "1", "--checkpoint-every", "1st", "--resume", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
    [folder] = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["workers"] == 2
    repeated = tutti("train", "--config", str(folder / "config.toml"), "--out", "new", "--json", cwd=tmp_path)
    assert repeated.returncode == 0, repeated.stderr
    assert json.loads(repeated.stdout)["weights_sha256"] == summary["weights_sha256"]
    assert "resume" not in {json.loads(line)["group"] for line in (tmp_path / "new" / "metrics.jsonl").open()}
    # A run of other workers that has never been resumed is not continued.
    other = (*words, "--devices", "1", "--workers", "3", "--checkpoint-every", "1st", "--batch-size", "63")
    assert tutti(*other, cwd=tmp_path).returncode == 0
    done = tutti(*other[:-6], "--batch-size", "63", "--checkpoint-every", "1st", "--resume", cwd=tmp_path)
    assert done.returncode == 2 and "no run of digits with this configuration can be resumed" in done.stderr
