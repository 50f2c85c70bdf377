"""The measurement of a disk on systems with other calls than Linux has."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tutti.workload import bench_storage
from tutti.workload.bench_timing import Findings


def test_a_disk_is_measured_without_posix_fadvise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has another call that keeps a file out of the cache of pages."""
    monkeypatch.setattr(bench_storage, "_BYTES", 4096)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    # Any command that is harmless on Linux.
    monkeypatch.setattr(fcntl, "F_NOCACHE", fcntl.F_SETFD, raising=False)
    found = Findings(show=False)
    bench_storage.bench_disk(tmp_path, found)
    assert found.figures["disk/read"].value > 0 and found.figures["disk/write"].value > 0
