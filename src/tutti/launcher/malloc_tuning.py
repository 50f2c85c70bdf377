"""glibc malloc tuning: keep freed memory, which makes CPU training faster, or return it to the system at once.

By default glibc maps every large block and unmaps it when freed, so that the kernel zeroes each activation's pages
again in every step. Measured for a step on the CPU: 0.94 × the time for a small CNN (docs/log.md). But where layers are
gathered and freed (sharding), kept memory fragments. Skipped if the user has set glibc's own variables.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

from tutti.config.variables import is_off

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGE, _LOOSE, _BLOCKS = 4 << 20, 64 << 20, 65536
_CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep all freed memory in this process instead of returning it to the system.

    ``tutti.init`` calls it on a CPU: the kernel then does not zero the pages of each activation again in every step.

    Returns:
        True if the settings were changed. False without glibc, or where the user has set malloc's environment variables
        or ``TUTTI_PROCESS_SETUP=off``.
    """
    return _set({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1})


def free_at_once() -> bool:
    """Make glibc's malloc return blocks of 4 MiB and more to the system as soon as they are freed.

    Called before a large model is sharded on CPUs. Replaces the settings of ``keep_freed_memory``, and returns memory
    that is free already.

    Returns:
        True if the settings were changed. False without glibc, or where the user has set malloc's environment variables
        or ``TUTTI_PROCESS_SETUP=off``.
    """
    chosen = _set({_M_MMAP_MAX: _BLOCKS, _M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: _LOOSE})
    if chosen:
        give_back()
    return chosen


def _set(values: Mapping[int, int]) -> bool:
    chosen = is_off("PROCESS_SETUP", os.environ) or any(name in os.environ for name in _CHOSEN)
    if platform.libc_ver()[0] != "glibc" or chosen:
        return False
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(name, ctypes.c_int(value)) for name, value in values.items())


def give_back() -> None:
    """Give the memory that malloc's heap has free now back to the system, once; later frees are not affected.

    Calls glibc's ``malloc_trim``; does nothing without glibc. The call is worth its time only after much memory was
    freed that will not be needed again.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
