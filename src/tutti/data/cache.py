"""Arrays that are slow to make, kept as ``.npy`` files that all processes map and thereby share.

A file is named ``KEY-CRC32.npy``: the name proves the content, so that a truncated or damaged file is noticed and made
again. Old files are never needed: the folder may be emptied at any time.
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

# Longer than any decoding should take: a process that was stopped with the lock in its hand holds nobody up for ever.
_LOCK_SECONDS = 180.0


def folder() -> Path:
    """``$TUTTI_CACHE``, else ``$XDG_CACHE_HOME/tutti``, else ``~/.cache/tutti``."""
    if own := os.environ.get("TUTTI_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "tutti"


def cached(key: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """The array of this key: mapped read-only if it is in the cache, otherwise made by ``make`` and put there.

    Of several processes one makes it and the others wait. A cache that cannot be written is no error: the
    array is then this process's own. What ``make`` raises passes through, and nothing is kept.
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
    """A mapped array whose bytes agree with its name; None where there is none or it is damaged."""
    for path in folder().glob(f"{key}-*.npy"):
        # NumPy reads a damaged header as Python source, and fails in as many ways as that can.
        with contextlib.suppress(Exception):
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            if path.name == _name(key, array):
                return array
    return None


def _store(key: str, array: NDArray[Any]) -> None:
    """Write under a temporary name and rename, under the lock. Raises OSError; leaves nothing half-written."""
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
    """Hold an exclusive lock that the kernel releases when this process ends. Raises OSError after three minutes."""
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
