"""Commands that compute for long refuse unknown tasks and files that they could not write before they compute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tutti.cli.bench_command import bench
from tutti.cli.noise_command import noise
from tutti.cli.output_checks import check_writable, make_writable
from tutti.cli.plan_command import plan_devices
from tutti.cli.simulate_command import simulate_step
from tutti.cli.workload_command import workload
from tutti.errors import DiskError, UsageError


def test_a_file_in_no_folder_is_refused_before_a_run_is_read(tmp_path: Path) -> None:
    lost = tmp_path / "none" / "file.json"
    with pytest.raises(DiskError, match="there is no folder"):
        bench("device", output=lost)
    with pytest.raises(DiskError, match="it is a folder"):
        bench("device", output=tmp_path / "m.json", svg=tmp_path)
    with pytest.raises(DiskError, match="there is no folder"):
        noise(tmp_path / "run", branch=(2,), recipe=lost)
    with pytest.raises(DiskError, match="there is no folder"):
        noise(tmp_path / "run", svg=lost)
    with pytest.raises(DiskError, match="there is no folder"):
        plan_devices("digits", runs=(tmp_path / "run",), out=lost)
    with pytest.raises(DiskError, match="it is a folder"):
        plan_devices("digits", runs=(tmp_path / "run",), out=tmp_path)
    with pytest.raises(DiskError, match=r"cannot write the timeline .*there is no folder"):
        simulate_step("digits", machine="none", timeline=lost)
    with pytest.raises(DiskError, match=r"cannot write the figure .*it is a folder"):
        simulate_step("digits", machine="none", sweep="devices=1..2", svg=tmp_path)
    with pytest.raises(DiskError, match=r"cannot write the workload .*there is no folder"):
        workload("digits", output=lost)


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "new.json", "the plan")
    make_writable(tmp_path / "new" / "folder", "the landscape")
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(DiskError, match=r"cannot write the plan \(.*new\.json\): there is no permission"):
        check_writable(tmp_path / "new.json", "the plan")
    with pytest.raises(DiskError, match=r"cannot write the landscape.*there is no permission"):
        make_writable(tmp_path, "the landscape")
    (tmp_path / "old.json").touch()
    check_writable(tmp_path / "old.json", "the plan")


def test_an_unknown_task_is_named_before_its_runs() -> None:
    with pytest.raises(UsageError, match="unknown task 'dgits'"):
        plan_devices("dgits", runs=(Path("none"),))
