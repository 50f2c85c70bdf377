"""Targets of the Makefile in a checkout whose ``.venv`` is a link to another checkout's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_linked_environment_is_used_and_never_changed(tmp_path: Path) -> None:
    (tmp_path / "other" / "bin").mkdir(parents=True)
    (tmp_path / "other" / "bin" / "python").symlink_to(sys.executable)
    here = tmp_path / "here"
    here.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, here)

    def planned(*targets: str) -> str:
        return subprocess.run(["make", "-n", *targets], cwd=here, check=True, capture_output=True, text=True).stdout

    assert "-m venv" in planned("backtest")
    (here / ".venv").symlink_to(tmp_path / "other")
    found = planned("venv", "backtest", "bench", "LEAVE_OUT=source")
    assert "benchmarks/backtest.py" in found and "--leave-out source" in found
    assert "-m venv" not in found and "pip" not in found
    assert "FAULT_RUNS=10 " in planned("faults") and "FAULT_RUNS=1 " in planned("faults", "FAULT_RUNS=1")
