"""Locales and pipes that cannot say every character: commands say what they can, and files are UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SOURCE

ASCII = [
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "POSIX"},
]
IDS = ["locale", "streams", "posix"]


def usual(number: int, *more: Any) -> Any:
    """A row with one of the environments, which is part of ``make test``."""
    return pytest.param(ASCII[number], *more, id=IDS[number])


def full(number: int, *more: Any) -> Any:
    """A row with one of the environments, each of which some other test of ``make test`` has."""
    return pytest.param(ASCII[number], *more, id=IDS[number], marks=pytest.mark.full)


TASK = """
import torch
from tutti import Task

def make():
    loss = lambda model, batch: model(batch).square().mean()
    return Task(name="own", model=lambda: torch.nn.Linear(2, 1), loss=loss, train=torch.ones(12, 2))
"""


def ran(folder: Path, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[bytes]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-m", "tutti", *words],
        capture_output=True,
        timeout=300,
        cwd=folder,
        env={**plain, "PYTHONPATH": str(SOURCE), **environ},
    )


@pytest.mark.parametrize(("environ", "devices"), [usual(0, "2"), full(1, "1"), full(2, "2")])
def test_a_finished_run_ends_well(environ: dict[str, str], devices: str, tmp_path: Path) -> None:
    (tmp_path / "größe.py").write_text(TASK, encoding="utf-8")
    words = ("train", "größe.py:make", "--devices", devices, "--workers", "2", "--steps", "2", "--batch-size", "4")
    done = ran(tmp_path, environ, *words, "--out", "täglich")
    assert done.returncode == 0, done.stderr
    assert b"samples/s" in done.stdout and b"weights" in done.stdout and b"Traceback" not in done.stderr
    # The file is the same whatever the locale is.
    summary = json.loads((tmp_path / "täglich" / "summary.json").read_text(encoding="utf-8"))
    assert summary["task"] == "größe.py:make" and summary["exit_code"] == 0
    assert tomllib.loads((tmp_path / "täglich" / "config.toml").read_text(encoding="utf-8"))["task"] == summary["task"]


@pytest.mark.parametrize("environ", [full(1), usual(2)])
def test_what_programs_read_says_what_was_meant(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "größe.py").write_text(TASK, encoding="utf-8")
    words = ("train", "größe.py:make", "--steps", "1", "--devices", "1", "--batch-size", "4")
    printed = ran(tmp_path, environ, *words, "--print-config")
    assert tomllib.loads(printed.stdout.decode())["task"] == "größe.py:make"
    assert json.loads(ran(tmp_path, environ, *words, "--json").stdout)["task"] == "größe.py:make"


@pytest.mark.parametrize("environ", [full(0), usual(1), full(2)])
def test_a_refusal_and_a_help_page(environ: dict[str, str], tmp_path: Path) -> None:
    for words, code in (
        (("train", "digits", "--strategy", "größe"), 2),
        (("train", "--help"), 0),
        (("run", "ü.py"), 2),
    ):
        done = ran(tmp_path, environ, *words)
        assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("environ", [full(0), usual(1), full(2)])
def test_what_a_script_prints(environ: dict[str, str], tmp_path: Path) -> None:
    script = "import tutti\ntutti.init()\nprint('rank', tutti.rank(), '· größer → 1 × 2 …', flush=True)\n"
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = ran(tmp_path, environ, "run", "-np", "2", "--show-all", "script.py")
    assert done.returncode == 0, done.stderr
    if environ != ASCII[2]:
        assert b"rank 0 - groer -> 1 x 2 ..." in done.stdout or b"rank 0 - gro?er -> 1 x 2 ..." in done.stdout
    log = (tmp_path / "runs" / "logs" / "rank1.log").read_text(encoding="utf-8")
    assert "rank 1 · größer → 1 × 2 …" in log
