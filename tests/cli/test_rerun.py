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
