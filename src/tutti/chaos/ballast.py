"""Fill a disk for a while."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tutti.errors import DiskError, UsageError

MOST = 2**30
"""Largest number of bytes to allocate without ``--yes``."""


class Ballast:
    """Fills a file system to test a full disk: allocates all of its free space but ``leave`` bytes, until ``release``.

    The file that takes the space has no name, so that the system frees the space even when this process is killed.

    Args:
        folder: any directory on the file system.
        leave: bytes to leave free.
        most: largest number of bytes to allocate.

    Attributes:
        size: bytes that were allocated.

    Raises:
        UsageError: more than ``most`` bytes would have to be allocated.
        DiskError: the file cannot be made.
    """

    def __init__(self, folder: Path, leave: int, most: int = MOST) -> None:
        size = max(0, free_disk(folder) - leave)
        if size > most:
            raise UsageError(
                f"the file system of {folder} has {size / 2**20:,.0f} MiB to fill",
                why=f"more than {most / 2**20:,.0f} MiB are filled only when asked to",
                remedy="name a directory on a small one, such as a tmpfs, or add --yes",
            )
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            self.size = self._take(size, folder, leave) if size else 0
        except OSError as error:
            raise DiskError("the disk cannot be filled", where=str(folder), why=error.strerror) from error

    def _take(self, size: int, folder: Path, leave: int) -> int:
        """Allocate ``size`` bytes, then the space still free, and return the sum.

        It repeats because the file system's metadata takes space and other programs free some.
        """
        taken = 0
        for _ in range(64):
            try:
                os.posix_fallocate(self._file.fileno(), taken, size)
                taken += size
                size = free_disk(folder) - leave
            except OSError:
                size //= 2
            if size <= 0:
                break
        return taken

    def release(self) -> None:
        """Free the disk space that this object has allocated to fill the disk, by closing its unnamed file."""
        self._file.close()


def free_disk(folder: Path) -> int:
    """Return how many bytes this user can still write on the file system of ``folder``.

    For root, blocks that the file system reserves for root are included.

    Args:
        folder: any directory on the file system.

    Raises:
        OSError: the directory does not exist.
    """
    found = os.statvfs(folder)
    return (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
