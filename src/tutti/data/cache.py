"""Cache arrays that are slow to make in ``.npy`` files, which all processes map and thereby share.

A file is named ``KEY-CRC32.npy``: the checksum reveals a truncated or damaged file, which is then made again. The
folder may be emptied at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Longer than any decoding should take, and the most that a process suspended with the lock delays another.
_LOCK_SECONDS = 180.0


def folder() -> Path:
    """Return the cache directory: ``$TUTTI_CACHE``, else ``$XDG_CACHE_HOME/tutti``, else ``~/.cache/tutti``."""
    if own := os.environ.get("TUTTI_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "tutti"


def cached(key: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """Return an array from the cache on disk; make and store it first if the cache has no valid one.

    If several processes of a host ask for the same ``key``, one makes the array and the others wait; a process that has
    waited for three minutes makes the array itself. A cache that cannot be written is no error: the
    array then stays in this process's memory. Exceptions of ``make`` propagate, and nothing is stored.

    Args:
        key: identifies the content, such as a hash of all that the array is made from; the beginning of a file name.
        make: function without arguments that makes the array, called if no valid array is stored under ``key``.

    Returns:
        The stored array, mapped read-only from its file (see ``folder``); or the array that ``make`` returned, where
        the array cannot be stored.
    """
    found = _load(key)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        try:
            folder().mkdir(parents=True, exist_ok=True, mode=0o700)
            stack.enter_context(_lock(folder() / f"{key}.lock"))
        except OSError:
            return make()
        found = _load(key)
        if found is not None:
            return found
        array = make()
        try:
            _store(key, array)
        except OSError:
            return array
        found = _load(key)
        return array if found is None else found


def _load(key: str) -> NDArray[Any] | None:
    """Map the array of ``key`` whose checksum agrees with its file's name; None where it is missing or damaged."""
    for path in folder().glob(f"{key}-*.npy"):
        # NumPy parses the header as Python source: a damaged one raises exceptions of many types.
        with contextlib.suppress(Exception):
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            if path.name == _name(key, array):
                return array
    return None


def _store(key: str, array: NDArray[Any]) -> None:
    """Write under a temporary name and rename, while holding the lock. Raises OSError; leaves no partial file."""
    target, temporary = folder() / _name(key, array), folder() / f"{key}.tmp"
    for damaged in folder().glob(f"{key}-*.npy"):
        damaged.unlink(missing_ok=True)
    try:
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _name(key: str, array: NDArray[Any]) -> str:
    return f"{key}-{zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data):08x}.npy"


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock, which the kernel releases when this process ends; OSError after three minutes."""
    with path.open("w") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield
