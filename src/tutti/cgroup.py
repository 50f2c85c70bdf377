"""Resource limits of containers and batch systems: Linux control groups (cgroups), versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of this process's Linux control groups; None where there is no limit.

    Attributes:
        cores: number of CPU cores: CPU seconds that the group may use in a second.
        memory_bytes: memory of all processes of the group together.
        memory_used_bytes: memory in use by that group, reclaimable caches included.
        processes: number of processes and threads of the group.
    """

    cores: float | None
    memory_bytes: int | None
    memory_used_bytes: int | None
    processes: int | None


def read_limits(root: Path = ROOT, membership: Path = MEMBERSHIP) -> CgroupLimits:
    """Return the CPU, memory and process limits that Linux control groups set for this process.

    A limit is the smallest one of this process's groups and all their ancestors. Both versions of control groups are
    read.

    Args:
        root: mount point of the control groups.
        membership: file that lists this process's groups, in the format of ``/proc/PID/cgroup``.

    Returns:
        A ``CgroupLimits``: ``cores`` (float: CPU seconds in a second), ``memory_bytes`` and ``memory_used_bytes``
        (limit and present use of the group with the smallest memory limit, in bytes), and ``processes`` (number of
        processes and threads). Each is None if no group sets the limit, or if its file cannot be read.
    """
    groups = _groups(membership)
    cores = [quota for folder in _folders(root, groups, "cpu") for quota in _quota(folder)]
    processes = [limit for folder in _folders(root, groups, "pids") for limit in _numbers(folder / "pids.max")]
    memory = [
        (value, _numbers(folder / used))
        for folder in _folders(root, groups, "memory")
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        for value in _numbers(folder / limit)
    ]
    tightest, used_there = min(memory) if memory else (None, [])
    used_bytes = used_there[0] if used_there else None
    return CgroupLimits(min(cores, default=None), tightest, used_bytes, min(processes, default=None))


def _groups(membership: Path) -> dict[str, str]:
    """Return the path of this process's group by controller; version 2 has one group for all, under the key ''."""
    groups: dict[str, str] = {}
    with suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _folders(root: Path, groups: dict[str, str], controller: str) -> Iterator[Path]:
    """Yield the directories of the process's group and its ancestors; in a container the group may be the root."""
    for base, path in ((root / controller, groups.get(controller)), (root, groups.get(""))):
        if path is not None:
            parts = [part for part in path.split("/") if part not in ("", "..")]
            yield from (base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _quota(folder: Path) -> list[float]:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        return [] if quota == "max" else [int(quota) / int(period)]
    quotas, periods = _numbers(folder / "cpu.cfs_quota_us"), _numbers(folder / "cpu.cfs_period_us")
    return [quota / period for quota, period in zip(quotas, periods, strict=False) if quota > 0]


def _numbers(file: Path) -> list[int]:
    """Return the number in ``file``; an empty list if it is missing, 'max' or practically unlimited (≥ 2⁶⁰)."""
    with suppress(OSError, ValueError):
        value = int(file.read_text(encoding="utf-8"))
        return [value] if value < _UNLIMITED else []
    return []
