"""Check system limits: shared memory, open files, processes, network, and the current directory."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tutti import cgroup
from tutti.doctor.finding import Finding
from tutti.errors import ExitCode
from tutti.host_memory import format_bytes

SHARED_MEMORY = Path("/dev/shm")

LITTLE_SHARED_MEMORY = 256 << 20
"""Free bytes below which a model of a few million parameters no longer fits; containers often have 64 MiB."""

FEW_FILES, FEW_PROCESSES = 512, 512
"""Limits below which a run with loader processes is likely to fail."""

_NAME_SECONDS = 2.0


def shared_memory(folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Check that shared memory (``/dev/shm``) is writable and has room for collectives and data loaders.

    Args:
        folder: directory of shared memory.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``shared_memory``: a problem if the folder is
        missing or cannot be written, a note if less than ``LITTLE_SHARED_MEMORY`` (256 MiB) is free. Values:
        ``total_bytes`` and ``free_bytes``, both 0 for a problem.
    """
    remedy = "Mount a larger one: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm."
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        text = f"{folder} is not there or cannot be written: sums and loaders take slower ways"
        yield Finding("shared_memory", "problem", text, {"total_bytes": 0, "free_bytes": 0}, remedy)
        return
    usage = shutil.disk_usage(folder)
    values = {"total_bytes": usage.total, "free_bytes": usage.free}
    text = f"{folder}: {format_bytes(usage.total)}, {format_bytes(usage.free)} free"
    if usage.free < LITTLE_SHARED_MEMORY:
        yield Finding("shared_memory", "note", text, values, remedy)
    else:
        yield Finding("shared_memory", "ok", text, values)


def open_files() -> Iterator[Finding]:
    """Check how many files and connections a process may have open (``RLIMIT_NOFILE``).

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``open_files``: a problem if the soft limit is
        below ``FEW_FILES`` (512). Values: ``soft_limit_count`` and ``hard_limit_count``, None for unlimited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = {"soft_limit_count": _count(soft), "hard_limit_count": _count(hard)}
    text = f"{_shown(soft)} a process (may be raised to {_shown(hard)})"
    few = 0 <= soft < FEW_FILES
    if 0 <= hard < FEW_FILES:
        remedy = "Ask the administrator for at least 4,096 (limits.conf, docker run --ulimit nofile=4096)."
    else:
        remedy = f"Run ulimit -n {min(4096, hard) if hard >= 0 else 4096} before tutti."
    yield Finding("open_files", "problem" if few else "ok", text, values, remedy if few else "")


def processes(limits: cgroup.CgroupLimits) -> Iterator[Finding]:
    """Check how many processes and threads may exist: by the user's limit (``RLIMIT_NPROC``) and the cgroup's.

    Args:
        limits: limits of this process's cgroup.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``processes``: a problem if the smaller of the
        user's soft limit and the cgroup's limit is below ``FEW_PROCESSES`` (512). Values: ``soft_limit_count`` and
        ``cgroup_limit_count``, None for no limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    values = {"soft_limit_count": _count(soft), "cgroup_limit_count": limits.processes}
    text = f"{_shown(soft)} a user" + (f", {limits.processes:,} in this cgroup" if limits.processes else "")
    few = min(soft if soft >= 0 else FEW_PROCESSES, limits.processes or FEW_PROCESSES) < FEW_PROCESSES
    remedy = "Run ulimit -u 4096, or docker run --pids-limit 4096: threads count too." if few else ""
    yield Finding("processes", "problem" if few else "ok", text, values, remedy)


def network(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the network interface by which Gloo connects hosts.

    Gloo takes the interface that ``GLOO_SOCKET_IFNAME`` names, else the interface with the host name's address.

    Args:
        environ: environment variables.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``network``: a problem if
        ``GLOO_SOCKET_IFNAME`` names an interface that this host lacks; without the variable a note if the host name's
        address is unknown, a loopback address or of no interface. Values: ``GLOO_SOCKET_IFNAME`` (None if unset),
        ``interfaces`` (name → addresses), and without the variable ``host_address`` and ``host_interface``.
    """
    interfaces = _addresses()
    choices = ", ".join(interfaces) or "none"
    named = environ.get("GLOO_SOCKET_IFNAME")
    values = {"GLOO_SOCKET_IFNAME": named, "interfaces": interfaces}
    if named is not None:
        missing = [name for name in named.split(",") if name not in interfaces]
        if missing:
            text = f"GLOO_SOCKET_IFNAME={named}, but there is no such interface with an address"
            remedy = f"Unset GLOO_SOCKET_IFNAME, or name one of: {choices}."
            yield Finding("network", "problem", text, values, remedy, ExitCode.PEER)
        else:
            yield Finding("network", "ok", f"GLOO_SOCKET_IFNAME={named}", values)
        return
    address = _own_address()
    found = next((name for name, addresses in interfaces.items() if address in addresses), None)
    text = f"lo on one host; across hosts {found or 'none'}, from the host's name ({address or 'unknown'})"
    loopback = address is None or address.startswith("127.") or found is None
    remedy = f"Nothing on one host; across hosts set GLOO_SOCKET_IFNAME to one of: {choices}." if loopback else ""
    values |= {"host_address": address, "host_interface": found}
    yield Finding("network", "note" if loopback else "ok", text, values, remedy)


def _addresses() -> dict[str, list[str]]:
    """Return the IPv4 and IPv6 addresses of every interface that is up and has one."""
    import psutil  # type: ignore[import-untyped]

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: addresses
        for name, entries in psutil.net_if_addrs().items()
        if name in up and (addresses := [entry.address for entry in entries if entry.family in kinds])
    }


def _own_address() -> str | None:
    """Resolve the host name to an address; None on failure, or without an answer within 2 s."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.append(str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError:
            return

    # In a thread: a name server that does not answer would block the report for half a minute.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_NAME_SECONDS)
    return found[0] if found else None


def directory() -> Iterator[Finding]:
    """Check that the current directory can be written and has free space for a run.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``directory``: a problem if the directory
        cannot be written, a note if less than ``LITTLE_SHARED_MEMORY`` (256 MiB) of its disk is free. Values:
        ``writable`` (bool) and, if it is, ``free_bytes``.
    """
    remedy = "Change to a directory of your own, or give --runs DIR."
    try:
        folder = Path.cwd()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"the current directory cannot be written: {error.strerror}"
        yield Finding("directory", "problem", text, {"writable": False}, remedy, ExitCode.DISK)
        return
    full = free < LITTLE_SHARED_MEMORY
    text = f"writable, {format_bytes(free)} free"
    remedy = "Make room, or give --runs DIR on another disk." if full else ""
    yield Finding(
        "directory", "note" if full else "ok", text, {"writable": True, "free_bytes": free}, remedy, ExitCode.DISK
    )


def _count(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
