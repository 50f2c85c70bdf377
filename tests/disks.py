"""A small disk of its own for a test: a tmpfs, where mounting one is allowed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """An empty file system of ``size`` (as in ``256k``) at ``folder / "disk"``; skips the test where it cannot be."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield disk
    finally:
        # Detached at once: a process that is just ending may still hold a file.
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, spare: int) -> Path:
    """Take all pages of the disk but ``spare``; the file to unlink to free them."""
    filler, page = disk / "filler", os.statvfs(disk).f_bsize
    filler.write_bytes(b"\0" * page * (os.statvfs(disk).f_bavail - spare))
    return filler
