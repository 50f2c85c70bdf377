"""The wheel holds the report's template, which is no Python file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tutti.report.html_report import TEMPLATE

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_the_template(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        assert f"tutti/report/{TEMPLATE}" in archive.namelist()
