"""``tutti bench scaling TASK``: throughput of a task on numbers of devices, beside linear scaling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver
from tests.faults.commands import tutti, write_task
from tests.launching import SAFETY_NET, SOURCE
from tutti.cli.bench_command import bench
from tutti.workload import bench_scaling
from tutti.workload.bench_scaling import scaling_rows
from tutti.workload.machine_file import Figure, read_machine


def started(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` would do, in a process that has imported torch before."""
    assert command[0] == sys.executable
    folder = Path(os.environ["BENCH_FOLDER"])
    return forkserver.run(command[1:], folder, os.environ | {"PYTHONPATH": str(SOURCE)}, SAFETY_NET)


def test_a_task_is_trained_on_each_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path)
    monkeypatch.setenv("BENCH_FOLDER", str(tmp_path))
    monkeypatch.setattr(bench_scaling.subprocess, "run", started)
    monkeypatch.setattr(bench_scaling, "ROUNDS", 2)
    monkeypatch.setattr(bench_scaling, "STEPS", 12)
    output, picture = tmp_path / "machine.json", tmp_path / "scaling.svg"
    words = ("scaling", "own.py:task", "--batch-size", "6")
    assert bench(*words, output=output, svg=picture, ranks="1,2", device="cpu") == 0
    machine = read_machine(output)
    assert machine.parts == ("scaling own.py:task --batch-size 6",) and machine.device["type"] == "cpu"
    assert {name: (one.unit, one.n) for name, one in machine.figures.items()} == {
        f"scaling/own.py:task/{count}": ("sample/s", 2) for count in (1, 2)
    }
    assert all(one.value > 0 for one in machine.figures.values())
    assert "of linear" in capsys.readouterr().out and "scaling of own.py:task" in picture.read_text()


def test_the_share_of_linear_is_that_of_the_fewest_devices() -> None:
    rates = {2: 100.0, 8: 300.0, 4: 190.0}
    figures = {f"scaling/gpt/{count}": Figure(rate, "sample/s", 3, 0.0) for count, rate in rates.items()}
    figures["start/2"] = Figure(1.0, "s", 1, None)
    [(task, rows)] = scaling_rows(figures).items()
    assert task == "gpt"
    assert [(count, efficiency) for count, _, efficiency in rows] == [(2, 1.0), (4, 0.95), (8, 0.75)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scaling"], "there is no task to measure the scaling of"),
        (["scaling", "digits", "--ranks", "0,2"], "--ranks is '0,2'"),
        (["scaling", "digits", "--", "--devices", "3"], "tutti bench scaling sets --devices itself"),
        (["scalin", "digits"], "there is no part 'scalin' to measure"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    result = tutti(tmp_path, "bench", *words)
    assert result.code == 2 and said in result.err and not (tmp_path / "machine.json").exists()


def test_a_run_that_fails_ends_the_measurement_with_its_exit_code(tmp_path: Path) -> None:
    result = tutti(tmp_path, "bench", "scaling", "digitz", "--ranks", "1")
    assert result.code == 2 and "digitz" in result.err and "measuring scaling failed" in result.err


def test_figures_that_name_no_devices_are_damaged(tmp_path: Path) -> None:
    content = {"format": "tutti machine", "version": 1, "host": {}, "device": {}, "parts": [], "curves": {}}
    content |= {"figures": {"scaling/gpt/x": {"value": 1.0, "unit": "sample/s", "n": 1, "spread": None}}}
    (tmp_path / "machine.json").write_text(json.dumps(content | {"measured": "", "seconds": 1.0}))
    result = tutti(tmp_path, "train", "digits", "--machine", "machine.json", "--steps", "1")
    assert result.code == 2 and "scaling/gpt/x names no ranks" in result.err
