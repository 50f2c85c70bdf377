"""Dated results of benchmarks: the machine that they were measured on, their file, and the exit code of failures."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tutti.errors import ExitCode


def machine_facts() -> dict[str, Any]:
    """Return date, version of torch, and the machine; the load average says how quiet it is now."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def write_result(result: Mapping[str, Any], *files: Path | None, indent: int = 1) -> None:
    """Write a result as JSON into each of the files; None leaves a file out."""
    for file in files:
        if file is not None:
            file.write_text(json.dumps(result, indent=indent) + "\n", encoding="utf-8")


def report_failures(failures: Sequence[str]) -> ExitCode:
    """Print failures on stderr, one a line, and return the exit code: that of a missed threshold, 0 without any."""
    for line in failures:
        print(line, file=sys.stderr)
    return ExitCode.THRESHOLD if failures else ExitCode.DONE
