"""Write, fsync and delete files so that checkpoints survive a crash; turn OSErrors into DiskError. No torch."""

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
"""Flags of ``os.open`` that create a new file and fail if it exists."""


def write_new(path: Path, buffers: Iterable[memoryview], progress: Callable[[], object] = lambda: None) -> str:
    """Write a new file, fsync it and return the SHA-256 of the bytes in memory, in hexadecimal.

    Args:
        path: the file, which must not exist.
        buffers: the file's bytes, in order.
        progress: called after every mebibyte.

    Raises:
        OSError: the file exists or cannot be written. A partial file is left, which ``on_disk`` can delete.
    """
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
    """Fsync a directory, so that the files created or renamed in it are still there after a crash of the machine.

    Args:
        directory: path of the directory.

    Raises:
        OSError: the directory cannot be opened or synchronised.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def on_disk(path: Path, what: str = "the checkpoint", remove: Path | None = None) -> Iterator[None]:
    """Return a context manager that turns an OSError into DiskError, and deletes a partial file after any exception.

    Args:
        path: file or directory that the block writes, which the DiskError states.
        what: noun for what is written, such as ``the weights``, which the DiskError states.
        remove: the partial file to delete; None for none.

    Raises:
        DiskError: the block raised an OSError.
    """
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
            remedy="free space or choose another directory; existing files are intact",
        ) from error


def discard(path: Path) -> None:
    """Rename a checkpoint's directory to ``{name}.tmp-discarded``, then delete it with its files.

    By the rename, a crash in between leaves no partial checkpoint under the checkpoint's name.

    Args:
        path: the checkpoint's directory.

    Raises:
        OSError: the directory cannot be renamed or deleted.
    """
    doomed = path.with_name(f"{path.name}.tmp-discarded")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed)
