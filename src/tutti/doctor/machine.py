"""Check the hardware available to this process: system, cores, memory, threads and memory bandwidth."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tutti import cgroup
from tutti.device import cpu_model, usable_cores
from tutti.doctor.finding import Finding
from tutti.errors import ExitCode, counted
from tutti.host_memory import format_bytes

LITTLE_MEMORY = 1 << 30
"""Free bytes below which a run is likely to be killed: torch alone takes about 200 MiB a process."""

PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that make every process of a node pin its threads to the same cores."""

_COPY_BYTES, _COPIES = 64 << 20, 5


def system() -> Iterator[Finding]:
    """Report operating system, distribution and architecture of this machine.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``system``; a note on other systems than Linux.
        Values, all texts: ``system`` (name and release), ``distribution``, ``architecture`` and ``cpu``.
    """
    name = f"{platform.system()} {platform.release()}"
    with_distribution = hasattr(platform, "freedesktop_os_release") and Path("/etc/os-release").exists()
    distribution = platform.freedesktop_os_release().get("PRETTY_NAME", "") if with_distribution else ""
    values = {"system": name, "distribution": distribution, "architecture": platform.machine(), "cpu": cpu_model()}
    remedy = "" if platform.system() == "Linux" else "Nothing to do; only Linux is tested."
    shown = " · ".join(filter(None, (name, distribution, platform.machine())))
    yield Finding("system", "note" if remedy else "ok", shown, values, remedy)


def cores(limits: cgroup.CgroupLimits) -> Iterator[Finding]:
    """Check how many cores this process may use, by CPU affinity and by its cgroup's limit.

    Args:
        limits: limits of this process's cgroup.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``cores``: a note if the cgroup allows fewer
        cores than the affinity, or if only one of several is usable. Values: ``usable_cores`` (by affinity),
        ``present_cores``, and ``cgroup_limit_cores``, None for no limit.
    """
    usable, present = usable_cores(), os.cpu_count() or 1
    values = {"usable_cores": usable, "present_cores": present, "cgroup_limit_cores": limits.cores}
    limit = "no cgroup limit" if limits.cores is None else f"cgroup allows {limits.cores:g}"
    text = f"{usable} usable of {present}, {limit} · {cpu_model()}"
    if limits.cores is not None and limits.cores < usable:
        remedy = f"Set OMP_NUM_THREADS={max(1, int(limits.cores))} ÷ processes: more threads wait for each other."
        yield Finding("cores", "note", text, values, remedy)
    elif usable == 1 and present > 1:
        remedy = "Ask for more (taskset, srun --cpus-per-task, mpirun --bind-to none): all ranks share this one."
        yield Finding("cores", "note", text, values, remedy)
    else:
        yield Finding("cores", "ok", text, values)


def memory(limits: cgroup.CgroupLimits) -> Iterator[Finding]:
    """Check total and free memory of this machine, and the limit of the process's cgroup.

    Args:
        limits: limits of this process's cgroup.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``memory``: a problem if the machine's free
        memory or the cgroup's limit is below ``LITTLE_MEMORY`` (1 GiB). Values: ``total_bytes``, ``free_bytes``,
        ``cgroup_limit_bytes`` (None if there is no limit below the total) and, with a limit, ``cgroup_used_bytes``,
        which is not subtracted from it.
    """
    import psutil  # type: ignore[import-untyped]

    host = psutil.virtual_memory()
    limit = limits.memory_bytes if (limits.memory_bytes or host.total) < host.total else None
    values = {"total_bytes": host.total, "free_bytes": host.available, "cgroup_limit_bytes": limit}
    limit_text = "no cgroup limit"
    free = host.available
    if limit is not None:
        values["cgroup_used_bytes"] = limits.memory_used_bytes
        limit_text = f"cgroup allows {format_bytes(limit)}, {format_bytes(limits.memory_used_bytes or 0)} used"
        # The cgroup's used memory includes caches that the kernel can reclaim, so only the limit itself is certain.
        free = min(free, limit)
    text = f"{format_bytes(host.total)}, {format_bytes(host.available)} free, {limit_text}"
    remedy = "End other programs or raise the container's memory: each worker needs some 300 MiB and its model."
    little = free < LITTLE_MEMORY
    yield Finding("memory", "problem" if little else "ok", text, values, remedy if little else "")


def threads(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the environment variables that set the number of threads of a process and pin them to cores.

    Args:
        environ: environment variables.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``threads``: a note if a variable pins threads,
        so that all processes of a node would share the same cores, or sets more threads a process than there are
        usable cores. Values: ``variables`` (those that are set, by name) and ``usable_cores``.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *PINNING)
    given = {name: environ[name] for name in names if name in environ}
    values = {"variables": given, "usable_cores": usable_cores()}
    pinning = [name for name in PINNING if environ.get(name, "false").lower() not in ("false", "none", "disabled")]
    many = [name for name in names[:2] if environ.get(name, "").isdecimal() and int(environ[name]) > usable_cores()]
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    if pinning:
        remedy = f"Unset {' and '.join(pinning)}: every worker would pin its threads to the same cores."
        yield Finding("threads", "note", text, values, remedy)
    elif many:
        remedy = f"Unset {' and '.join(many)}, or take cores ÷ processes, of {counted(usable_cores(), 'usable core')}."
        yield Finding("threads", "note", text, values, remedy)
    else:
        default = "no OMP_NUM_THREADS, no pinning: tutti takes cores ÷ processes, on accelerators half of that"
        yield Finding("threads", "ok", text or default, values)


def bandwidth() -> Iterator[Finding]:
    """Measure the bandwidth of copying memory with one core, in bytes a second, read plus written; best of five copies.

    The count follows STREAM: McCalpin (1995), "Memory Bandwidth and Machine Balance in Current High Performance
    Computers".

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``memory_bandwidth``: a problem, without values,
        if a copy differs from its source. Values: ``one_core_bytes_per_second`` and ``copied_bytes`` (64 MiB).
    """
    import numpy

    source = numpy.ones(_COPY_BYTES, numpy.uint8)
    target = numpy.zeros_like(source)
    seconds = []
    for _ in range(_COPIES):
        begin = time.perf_counter()
        numpy.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    rate = 2 * _COPY_BYTES / min(seconds)
    if not numpy.array_equal(source, target):
        remedy = "Test the machine's memory before training on it."
        yield Finding("memory_bandwidth", "problem", "a copy differs", {}, remedy, ExitCode.UNEXPECTED)
        return
    values = {"one_core_bytes_per_second": round(rate), "copied_bytes": _COPY_BYTES}
    yield Finding("memory_bandwidth", "ok", f"{rate / 1e9:.1f} GB/s, one core, copy", values)
