"""Launch ranks on several nodes over SSH, with rank and size in their environment. No torch.

Rank 0 writes to the terminal, the other ranks to log files. Every process has a tether: its standard input, which
carries signals, and whose end of file means that the launcher is gone. So no process is left behind on another node.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tutti.device import COLLECTIVE_VARIABLES, VISIBLE_DEVICES
from tutti.errors import DiskError, ExitCode, UsageError
from tutti.launcher.stdin_control import TETHER

# A name that begins with a dash would be an option of ssh.
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.:-]*")
_PASSED = ("TUTTI_", "GLOO_", *COLLECTIVE_VARIABLES)
_ALSO_PASSED = ("PYTHONPATH", "OMP_NUM_THREADS", *VISIBLE_DEVICES)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SSH_FAILED = 255
_ASKED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
_POLL = 0.05
_TAIL = 20


@dataclass(frozen=True)
class Host:
    """A node: its name, and the number of processes that it takes."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The node's name without the user's."""
        return self.name.rpartition("@")[2]

    @property
    def local(self) -> bool:
        """Whether it is this node, so that no SSH is needed."""
        return self.address in ("localhost", "127.0.0.1", "::1", socket.gethostname())


@dataclass(frozen=True)
class RemoteProcess:
    """One process to start: its node and its additional environment variables."""

    host: Host
    environment: Mapping[str, str]


def parse_hosts(text: str) -> list[Host]:
    """Parse ``host0:2,user@host1:4``; the default number of processes is 1. Raises UsageError.

    >>> parse_hosts("host0:2,me@host1")
    [Host(name='host0', slots=2), Host(name='me@host1', slots=1)]
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().rpartition(":")
        if not colon:
            name, slots = slots, "1"
        if not _NAME.fullmatch(name) or not slots.isdecimal() or not int(slots):
            raise UsageError(f"-H has '{part}'", remedy="write HOST:PROCESSES,…, such as host0:2,host1:2")
        hosts.append(Host(name, int(slots)))
    if len({host.address for host in hosts}) < len(hosts):
        raise UsageError(f"-H {text} has a host twice", remedy="give each once, with all its processes")
    return hosts


def plan_processes(hosts: Sequence[Host], processes: int | None, address: str, port: int) -> list[RemoteProcess]:
    """Return every rank's node and environment; nodes are filled in order.

    Args:
        hosts: the nodes.
        processes: number of ranks; None for one on every slot.
        address: ``MASTER_ADDR``.
        port: ``MASTER_PORT``.

    Raises:
        UsageError: there are more ranks than slots.

    >>> [p.environment["LOCAL_RANK"] for p in plan_processes(parse_hosts("a:2,b:2"), 3, "a", 29500)]
    ['0', '1', '0']
    """
    room = sum(host.slots for host in hosts)
    size = room if processes is None else processes
    if size > room:
        raise UsageError(
            f"{size} processes do not fit on hosts with room for {room}", remedy=f"take -np {room}, or give more in -H"
        )
    left, used = size, []
    for host in hosts:
        if left:
            used.append((host, min(host.slots, left)))
            left -= used[-1][1]
    common = {"WORLD_SIZE": size, "GROUP_WORLD_SIZE": len(used), "MASTER_ADDR": address, "MASTER_PORT": port}
    found: list[RemoteProcess] = []
    for number, (host, count) in enumerate(used):
        for local in range(count):
            own = {"RANK": len(found), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": number}
            found.append(RemoteProcess(host, {name: str(value) for name, value in {**own, **common}.items()}))
    return found


def meeting(hosts: Sequence[Host]) -> tuple[str, int]:
    """Return address and port of rank 0's store: ``MASTER_ADDR`` and ``MASTER_PORT``, else first node, random port."""
    address = os.environ.get("MASTER_ADDR") or (
        socket.gethostname() if hosts[0].local and len(hosts) > 1 else hosts[0].address
    )
    port = os.environ.get("MASTER_PORT", "")
    # Below Linux's ephemeral port range.
    return address, int(port) if port.isdecimal() else 10_000 + secrets.randbelow(20_000)


def command(process: RemoteProcess, words: Sequence[str], directory: Path) -> list[str]:
    """Return the command line that starts a process: directly on this node, by ssh with quoted words elsewhere.

    Args:
        process: its node and environment.
        words: the rank's command.
        directory: working directory on another node.
    """
    passed = {n: v for n, v in os.environ.items() if n.startswith(_PASSED) or n in _ALSO_PASSED}
    pairs = [f"{name}={value}" for name, value in {**passed, **process.environment, TETHER: "stdin"}.items()]
    if process.host.local:
        return ["env", *pairs, *words]
    there = f"cd {shlex.quote(str(directory))} && exec env {shlex.join([*pairs, *words])}"
    return ["ssh", "-T", "-o", "BatchMode=yes", process.host.name, there]


def run_hosts(processes: Sequence[RemoteProcess], words: Sequence[str], logs: Path, grace: float = 30.0) -> int:
    """Start all ranks, wait for them, and return the exit code of the first that failed, or 0.

    When one rank fails, all get SIGTERM, and SIGKILL after ``grace`` seconds. Signals to the launcher are passed on; a
    second one kills all ranks.

    Args:
        processes: the ranks, in order.
        words: the command of every rank.
        logs: folder for the output of all ranks but rank 0.
        grace: seconds between SIGTERM and SIGKILL.

    Raises:
        DiskError: ``logs`` cannot be written.
    """
    with ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_kill, started)
        stack.enter_context(_passing_signals(started))
        for rank, process in enumerate(processes):
            output = None if rank == 0 else stack.enter_context(_log(logs, rank))
            started.append(
                subprocess.Popen(
                    command(process, words, Path.cwd()),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=None if output is None else subprocess.STDOUT,
                    # A session of its own: a terminal's signal reaches the launcher, which passes it on once.
                    start_new_session=True,
                )
            )
        first = _wait(started, grace)
    if first is None:
        return int(ExitCode.DONE)
    return _conclude(first, started[first].returncode, processes[first].host, logs)


def _wait(started: Sequence[subprocess.Popen[bytes]], grace: float) -> int | None:
    """Wait for all ranks; return the first that failed, or None."""
    first, deadline = None, float("inf")
    while None in (codes := [process.poll() for process in started]):
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and first is None:
            first, deadline = failed[0], time.monotonic() + grace
            # In a run that was asked to stop, other ranks may still be saving, and a second signal would end them.
            if started[first].returncode not in _ASKED:
                _tell(started, signal.SIGTERM)
        if time.monotonic() > deadline:
            _kill(started)
        time.sleep(_POLL)
    failed = [rank for rank, code in enumerate(codes) if code]
    return first if first is not None else failed[0] if failed else None


def _tell(started: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal over every tether."""
    for process in started:
        if process.poll() is None and process.stdin is not None:
            with suppress(OSError, ValueError):
                process.stdin.write(f"{int(number)}\n".encode())
                process.stdin.flush()


def _kill(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill all running processes: over the tether on their nodes, then the local ssh processes."""
    for process in started:
        if process.poll() is None:
            with suppress(OSError, ValueError):
                if process.stdin is not None:
                    process.stdin.write(f"{int(signal.SIGKILL)}\n".encode())
                    process.stdin.close()
    for process in started:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _passing_signals(started: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Within the block, pass a signal on to all processes; a second one kills them."""
    seen: list[int] = []

    def take(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise SystemExit(128 + number)
        _tell(started, number)

    before = {number: signal.signal(number, take) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _log(logs: Path, rank: int) -> Iterator[int]:
    """Open the rank's log and yield its file descriptor. Raises DiskError."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        file = (logs / f"rank{rank}.log").open("wb")
    except OSError as error:
        raise DiskError("cannot write a log", where=str(logs), why=error.strerror) from error
    with file:
        yield file.fileno()


def _conclude(rank: int, code: int, host: Host, logs: Path) -> int:
    """Print which rank failed first, and on which node; return the exit code of the run."""
    code = 128 - code if code < 0 else code
    if code in _ASKED:
        return code
    log = logs / f"rank{rank}.log"
    message = f"tutti: rank {rank} on {host.name} ended with exit code {code}"
    if code == _SSH_FAILED and not host.local:
        message = f"tutti: rank {rank}: no connection to {host.name} by ssh, or it was lost"
        message += f". 'ssh -o BatchMode=yes {host.name} true' must work without a password."
        code = int(ExitCode.PEER)
    print(message, file=sys.stderr)
    if rank and log.is_file():
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
        print("\n".join([f"The end of {log}:", *tail]), file=sys.stderr, flush=True)
    return code
