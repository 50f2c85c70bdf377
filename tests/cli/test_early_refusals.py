"""Commands that compute for long refuse unknown tasks and files that they could not write before they compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.cli.noise_command import noise
from tutti.cli.plan_command import plan_devices
from tutti.errors import DiskError, UsageError


def test_a_file_in_no_folder_is_refused_before_a_run_is_read(tmp_path: Path) -> None:
    lost = tmp_path / "none" / "file.json"
    with pytest.raises(DiskError, match="there is no folder"):
        noise(tmp_path / "run", branch=(2,), recipe=lost)
    with pytest.raises(DiskError, match="there is no folder"):
        noise(tmp_path / "run", svg=lost)
    with pytest.raises(DiskError, match="there is no folder"):
        plan_devices("digits", runs=(tmp_path / "run",), out=lost)
    with pytest.raises(DiskError, match="it is a folder"):
        plan_devices("digits", runs=(tmp_path / "run",), out=tmp_path)


def test_an_unknown_task_is_named_before_its_runs() -> None:
    with pytest.raises(UsageError, match="unknown task 'dgits'"):
        plan_devices("dgits", runs=(Path("none"),))
