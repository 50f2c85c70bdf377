"""Changing the disk so that what is there survives a crash, and what fails is said in one way. No torch."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tutti.errors import DiskError

_CHUNK = 2**20
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens a file that must not be there yet."""


def write_new(path: Path, buffers: Iterable[memoryview], progress: Callable[[], object] = lambda: None) -> str:
    """Write a new file and fsync it; the SHA-256 of the bytes as memory held them. ``progress``: after a mebibyte."""
    digest = hashlib.sha256()
    descriptor = os.open(path, NEW, 0o666)
    try:
        for buffer in buffers:
            for start in range(0, len(buffer), _CHUNK):
                rest = buffer[start : start + _CHUNK]
                digest.update(rest)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                progress()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def sync(directory: Path) -> None:
    """Put the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def on_disk(path: Path, what: str = "the checkpoint", remove: Path | None = None) -> Iterator[None]:
    """Whatever goes wrong, ``remove`` is removed; the system's errors become DiskError."""
    try:
        yield
    except BaseException as error:
        if remove:
            with suppress(OSError):
                remove.unlink()
        if not isinstance(error, OSError):
            raise
        raise DiskError(
            f"{what} could not be written",
            where=str(path),
            why=error.strerror or str(error),
            remedy="free space or choose another directory; what was there before is intact",
        ) from error


def discard(path: Path) -> None:
    """Delete a checkpoint. It loses its name first, so that one half deleted is never taken for a checkpoint."""
    doomed = path.with_name(f"{path.name}.tmp-discarded")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed)
