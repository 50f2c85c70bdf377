"""What the C library does with freed memory: keep it, which makes CPU training faster, or give it back at once.

glibc maps every large block anew and unmaps it when freed, so that each activation's pages are zeroed by the kernel
again in every step. Measured for a step on the CPU: 0.94 × the time for a small CNN (docs/log.md). But where layers are
gathered and freed, kept memory has holes that nothing fits into. Who sets glibc's own variables has chosen otherwise.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGE, _LOOSE, _BLOCKS = 4 << 20, 64 << 20, 65536
_CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tell glibc to serve large blocks from the heap and never to trim it; False where it is left as it is."""
    return _set({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1})


def free_at_once() -> bool:
    """Tell glibc to give blocks of 4 MiB and more back as they are freed; False where it is left as it is."""
    chosen = _set({_M_MMAP_MAX: _BLOCKS, _M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: _LOOSE})
    if chosen:
        give_back()
    return chosen


def _set(values: Mapping[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _CHOSEN):
        return False
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(name, ctypes.c_int(value)) for name, value in values.items())


def give_back() -> None:
    """Return what is free now to the system, once: for much that is freed and will not be needed again."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
