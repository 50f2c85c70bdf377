"""Memory of this node that a process may use, and amounts of memory as text. No torch."""

from __future__ import annotations

import math
import os
import re
import resource
import sys

from tutti import cgroup
from tutti.errors import UsageError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def memory_share(processes: int) -> int:
    """Return each process's equal share of the node's memory, or of its cgroup's limit if that is lower, in bytes.

    Args:
        processes: number of processes on this node.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, cgroup.read_limits().memory_bytes or total) // processes


def free_memory(processes: int) -> int:
    """Return the bytes of host memory that each of some processes on this node can still allocate.

    The result is the smallest of these numbers, and at least 0: the node's available memory, divided by ``processes``;
    if this process's control group has a memory limit, the limit divided by ``processes``, minus this process's
    resident memory; and if RLIMIT_DATA is finite, this limit minus the data that this process has allocated.

    Args:
        processes: number of processes on this node.
    """
    import psutil  # type: ignore[import-untyped]

    own = psutil.Process().memory_info()
    allowed = [psutil.virtual_memory().available // processes]
    if (group := cgroup.read_limits().memory_bytes) is not None:
        # A group's usage includes reclaimable caches; a process's resident memory does not.
        allowed.append(group // processes - own.rss)
    if (most := resource.getrlimit(resource.RLIMIT_DATA)[0]) != resource.RLIM_INFINITY:
        allowed.append(most - getattr(own, "data", own.rss))
    return max(int(min(allowed)), 0)


def peak_resident() -> int:
    """Return the largest resident set of this process so far, in bytes: its memory with all libraries, not swapped out.

    In a process that was started by ``fork`` and ``exec`` the result may be the parent's largest resident set, if that
    was larger.
    """
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def parse_bytes(text: str, option: str) -> int:
    """Parse a number of bytes with a decimal or binary unit, such as ``16GB``, ``512MiB`` or ``1e9``.

    Units are K, M, G and T (powers of 1000) or Ki, Mi, Gi and Ti (of 1024), in any case, with or without a B; a number
    without a unit is in bytes. A fraction of a byte is dropped.

    Args:
        text: the text.
        option: name of the option that has the text, for the message.

    Returns:
        The number of bytes.

    Raises:
        UsageError: the text is not of this form, or states less than one byte.

    >>> parse_bytes("16GB", "--memory"), parse_bytes("512 MiB", "--memory")
    (16000000000, 536870912)
    >>> parse_bytes("0.5", "--memory")
    Traceback (most recent call last):
    tutti.errors.UsageError: '0.5' is not an amount of memory (--memory). Write 16GB or 512MiB.
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?", text.strip().upper().replace("E", "e"))
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value < math.inf:
        raise UsageError(f"'{text}' is not an amount of memory", where=option, remedy="write 16GB or 512MiB")
    return int(value)


def format_bytes(count: float) -> str:
    """Format a number of bytes in the largest binary unit, up to TiB, in which the rounded number is at least 1.

    Numbers below 100 have at most one decimal, others none.

    Args:
        count: number of bytes, at least 0.

    Returns:
        The text, such as ``1.5 KiB``.

    >>> format_bytes(64 << 20), format_bytes(1536), format_bytes(0), format_bytes((1 << 20) - 1)
    ('64 MiB', '1.5 KiB', '0 B', '1 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while round(count) >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{round(count, 1 if count < 100 else 0):g} {units[0]}"
