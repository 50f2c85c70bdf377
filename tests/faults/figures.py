"""What fault tests measured, by row of the fault suite: ``pytest -m faults tests/faults --figures FILE``.

A test belongs to the rows of its mark ``row``. What it hands to pytest's ``record_property`` is a figure of all of
them, or of one where the name begins with its number: ``record_property("3: orphans", 0)``.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

_OF_A_ROW = re.compile(r"(\d+): (.+)")
_PACKAGES = ("torch", "numpy", "safetensors")


class Figures:
    """The plugin of the process that collects all reports; under xdist that is the controller."""

    def __init__(self, file: Path, runs: int) -> None:
        self._file, self._runs, self._start = file, runs, time.monotonic()
        self._load = os.getloadavg()[0]
        self._rows: dict[int, dict[str, Any]] = {}
        file.parent.mkdir(parents=True, exist_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        properties = list(report.user_properties)
        rows = next((value for name, value in properties if name == "rows"), None) or [0]
        for row in rows:
            entry = self._rows.setdefault(
                row, {"runs": 0, "failures": 0, "skipped": 0, "files": set(), "failed": [], "figures": {}}
            )
            entry["files"].add(report.nodeid.partition("::")[0])
            entry["skipped"] += report.skipped
            entry["runs"] += not report.skipped
            if report.failed:
                entry["failures"] += 1
                entry["failed"].append(report.nodeid)
            self._add(row, entry["figures"], properties)
        self._write()

    def _add(self, row: int, figures: dict[str, list[float]], properties: Sequence[tuple[str, object]]) -> None:
        for name, value in properties:
            own = _OF_A_ROW.fullmatch(name)
            if isinstance(value, int | float) and (own is None or int(own[1]) == row):
                figures.setdefault(own[2] if own else name, []).append(value)

    def _write(self) -> None:
        """After every test, so that a suite that is cut short leaves what it has found."""
        document = {
            "suite": "faults",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "runs_of_each_test": self._runs,
            "seconds": round(time.monotonic() - self._start),
            "hardware": hardware(self._load),
            "rows": [
                {"row": row, **entry, "files": sorted(entry["files"]), "figures": _summaries(entry["figures"])}
                for row, entry in sorted(self._rows.items())
            ],
        }
        self._file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def hardware(load: float) -> dict[str, Any]:
    """What the figures were measured on; ``load`` is the machine's average before the first test."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return {
        "cpu": found[1] if found else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": load,
        "versions": {name: version(name) for name in _PACKAGES},
    }


def _summaries(figures: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {name: summary(values) for name, values in sorted(figures.items())}


def summary(values: Sequence[float]) -> dict[str, float]:
    """How many, least, median, 95th percentile and most of some numbers."""
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    kept = {"min": ordered[0], "p50": statistics.median(ordered), "p95": p95, "max": ordered[-1]}
    return {"n": len(ordered), **{name: round(value, 3) if value > 1e-3 else value for name, value in kept.items()}}
