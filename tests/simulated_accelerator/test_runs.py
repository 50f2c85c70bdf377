"""Whole runs on the simulated accelerator: profile, trace, the watchdog and a killed process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_accelerator import build

pytestmark = pytest.mark.timeout(600)


def command(folder: Path, *words: str) -> str:
    """Run ``tutti`` with two simulated devices; return its stdout."""
    environ = {**os.environ, **build.environment(2)}
    done = subprocess.run(
        [sys.executable, "-m", "tutti", *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text("utf-8"))["weights_sha256"])


def test_profile_and_trace_change_nothing_and_see_the_device(tmp_path: Path) -> None:
    build.require()
    words = ["train", "digits", "--devices", "2", "--steps", "6", "--seed", "3"]
    command(tmp_path, *words, "--device", "cpu", "--out", "cpu")
    command(tmp_path, *words, "--device", build.DEVICE, "--profile", "2:2", "--trace", "2:2", "--out", "device")
    assert weights(tmp_path / "device") == weights(tmp_path / "cpu")
    assert sorted((tmp_path / "device").glob("trace*")) and sorted((tmp_path / "device").glob("profile*"))


def test_a_killed_process_on_the_device_is_survived(tmp_path: Path) -> None:
    build.require()
    words = ["train", "digits", "--device", build.DEVICE, "--devices", "2", "--steps", "60"]
    command(tmp_path, "chaos", "kill", "--verify", "--", *words, "--out", "run")
