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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path

from tutti.device import COLLECTIVE_VARIABLES, VISIBLE_DEVICES
from tutti.errors import DiskError, UsageError
from tutti.launcher.engine import EndedRank, SlotsGone
from tutti.launcher.stdin_control import TETHER

# A name that begins with a dash would be an option of ssh.
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.:-]*")
_PASSED = ("TUTTI_", "HOROVOD_", "GLOO_", *COLLECTIVE_VARIABLES)
_ALSO_PASSED = ("PYTHONPATH", "OMP_NUM_THREADS", *VISIBLE_DEVICES)
_SSH_FAILED = 255
_REACH = 5


@dataclass(frozen=True)
class Host:
    """A node on which ranks are started.

    Attributes:
        name: host name or IP address, perhaps with a user, as in ``me@host1``.
        slots: number of ranks that the node takes.
    """

    name: str
    slots: int

    @property
    def address(self) -> str:
        """Host name or IP address of the node without the user's name: ``host1`` for ``me@host1``."""
        return self.name.rpartition("@")[2]

    @property
    def local(self) -> bool:
        """Whether the host's name is that of this machine or of the loopback; ranks are then started without SSH."""
        return self.address in ("localhost", "127.0.0.1", "::1", socket.gethostname())


@dataclass(frozen=True)
class RemoteProcess:
    """Assignment of one rank to a node, with its variables, as ``plan_processes`` makes it; nothing is started.

    Attributes:
        host: node of the rank.
        environment: additional environment variables of the rank's process, such as ``RANK`` and ``MASTER_ADDR``.
    """

    host: Host
    environment: Mapping[str, str]


def parse_hosts(text: str) -> list[Host]:
    """Parse the value of ``-H``, the hosts on which ranks are to be started.

    Args:
        text: hosts ``[USER@]HOST[:PROCESSES]``, separated by commas; one process by default.

    Returns:
        For each host, in the order of the text, ``name`` (with the user, if given) and ``slots``, the number of ranks
        that it takes.

    Raises:
        UsageError: a part is malformed, or a host is named twice.

    >>> parse_hosts("host0:2,me@host1")
    [Host(name='host0', slots=2), Host(name='me@host1', slots=1)]
    """
    hosts = []
    for part in text.split(","):
        host = _parse_host(part.strip())
        if host is None:
            raise UsageError(f"-H has '{part}'", remedy="write HOST:PROCESSES,…, such as host0:2,host1:2")
        hosts.append(host)
    if len({host.address for host in hosts}) < len(hosts):
        raise UsageError(f"-H {text} has a host twice", remedy="give each once, with all its processes")
    return hosts


def _parse_host(text: str) -> Host | None:
    """Parse ``[USER@]HOST[:PROCESSES]``; return None for another form."""
    name, colon, slots = text.rpartition(":")
    if not colon:
        name, slots = slots, "1"
    if not _NAME.fullmatch(name) or not slots.isdecimal() or not int(slots):
        return None
    if ":" in name:
        try:
            IPv6Address(name.rpartition("@")[2])
        except AddressValueError:
            return None
    return Host(name, int(slots))


def parse_host_file(path: Path) -> str:
    """Read a host file, and return its hosts as a value of ``-H``, such as ``host0:2,host1:1``.

    Args:
        path: file with lines ``HOST`` (one rank), ``HOST slots=N`` as Open MPI has them, perhaps with ``max_slots=N``,
            which has no effect, or ``HOST:N`` as MPICH has them; text after ``#`` and blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, has no host, or has a line of another form.
    """
    try:
        lines = [line.split("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UsageError(f"cannot read the host file {path}", why=why) from error
    hosts = []
    for number, words in enumerate(lines, 1):
        if not words:
            continue
        name, *options = words
        given = dict(option.replace("-", "_").split("=", 1) for option in options if "=" in option)
        # An address of IPv6 has more than one colon.
        counted = name.count(":") == 1
        host = name if counted else f"{name}:{given.get('slots', 1)}"
        odd = len(given) < len(options) or given.keys() - {"slots", "max_slots"} or (counted and given)
        if odd or _parse_host(host) is None:
            raise UsageError(
                f"the host file has '{' '.join(words)}'",
                where=f"{path}:{number}",
                remedy="write HOST slots=N or HOST:N, one host a line",
            )
        hosts.append(host)
    if not hosts:
        raise UsageError(f"the host file {path} has no host", remedy="write HOST slots=N, one host a line")
    return ",".join(hosts)


def plan_processes(hosts: Sequence[Host], processes: int | None, address: str, port: int) -> list[RemoteProcess]:
    """Assign ranks to hosts in order, filling each host's slots before the next host's; return each rank's assignment.

    Args:
        hosts: the nodes; each has as many slots as it takes ranks.
        processes: number of ranks; None for one on every slot.
        address: value of ``MASTER_ADDR``: address of the node of rank 0.
        port: value of ``MASTER_PORT``: TCP port for rank 0 to listen on.

    Returns:
        For each rank, in rank order, its ``host`` and its ``environment``, a mapping with the variables of torchrun:
        ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and so on.

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


def store_endpoint(hosts: Sequence[Host]) -> tuple[str, int]:
    """Choose the address and the TCP port at which rank 0 will host the job's key-value store.

    The address is ``MASTER_ADDR`` of this process's environment. If that is not set, it is the address of the first
    host; if that host is this machine and there are several hosts, it is this machine's host name instead. The port is
    ``MASTER_PORT``; if that is not set to a number, a random one from 10000 to 29999, which may be in use.

    Args:
        hosts: hosts of the job, rank 0's first.

    Returns:
        Address (host name or IP address) and port.
    """
    address = os.environ.get("MASTER_ADDR") or (
        socket.gethostname() if hosts[0].local and len(hosts) > 1 else hosts[0].address
    )
    port = os.environ.get("MASTER_PORT", "")
    # Below Linux's ephemeral port range.
    return address, int(port) if port.isdecimal() else 10_000 + secrets.randbelow(20_000)


def passed_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the environment variables that a launcher passes on to ranks on other nodes.

    These are the variables of tutti (``TUTTI_…``), of Horovod scripts (``HOROVOD_…``), of Gloo (``GLOO_…``) and of
    vendors' collectives (``NCCL_…``, ``TORCH_NCCL_…``, ``RCCL_…``, ``CCL_…``), variables that limit the visible
    devices, such as ``CUDA_VISIBLE_DEVICES``, ``PYTHONPATH`` and ``OMP_NUM_THREADS``.

    Args:
        environ: environment variables of the launcher.

    Returns:
        Name → value of each of these variables that is set.
    """
    return {name: value for name, value in environ.items() if name.startswith(_PASSED) or name in _ALSO_PASSED}


def command(process: RemoteProcess, words: Sequence[str], directory: Path) -> list[str]:
    """Make the command line that starts a rank: by ``env`` on this node, by ``ssh`` on another one.

    The command sets the variables of the rank, those that a launcher passes on (``passed_variables``: ``TUTTI_…``,
    ``NCCL_…`` and others, as this process has them), and one that makes the rank's process take signals from its
    standard input and end when the input is closed.

    Args:
        process: node and environment of the rank.
        words: program and arguments of the rank.
        directory: working directory on another node.

    Returns:
        Program and arguments, to be run on this node without a shell.
    """
    passed = {**passed_variables(os.environ), **process.environment, TETHER: "stdin"}
    pairs = [f"{name}={value}" for name, value in passed.items()]
    if process.host.local:
        return ["env", *pairs, *words]
    there = f"cd {shlex.quote(str(directory))} && exec env {shlex.join([*pairs, *words])}"
    return ["ssh", "-T", "-o", "BatchMode=yes", process.host.name, there]


class TetheredRanks:
    """Starts and stops the ranks of a job by local processes, one for each rank, such as an ``ssh`` for a remote rank.

    Engines (``HostsEngine``, ``NodeEngine``, ``SlurmEngine``) use it for the ranks of each start of the job. The
    standard input of a process carries signals to its rank; the rank ends when the input is closed.

    Args:
        logs: folder for the output of all ranks but the first one.
        first_rank: number of the first rank within the whole job, for the names of the logs.

    Attributes:
        started: pairs (host, ``Popen`` of the process on this node) of the ranks of the last ``start``, in rank order.
    """

    def __init__(self, logs: Path, first_rank: int = 0) -> None:
        self._logs, self._first = logs, first_rank
        self.started: list[tuple[Host, subprocess.Popen[bytes]]] = []

    def start(self, ranks: Sequence[tuple[Host, Sequence[str]]]) -> None:
        """Start a process on this node for each rank, such as an ``ssh`` to the rank's host, in rank order.

        Returns at once. Ranks of an earlier call are forgotten, and must have ended. The first rank's output is that of
        this process; the output of each other rank N is appended to ``rankN.log`` in the folder of logs.

        Args:
            ranks: for each rank its host and the command line to run on this node.

        Raises:
            DiskError: a log cannot be written.
            UsageError: this node lacks the program of a command line, such as ``ssh``.
        """
        self.started = []
        for place, (host, words) in enumerate(ranks):
            with _log(self._logs, self._first + place) if place else nullcontext() as output:
                try:
                    running = subprocess.Popen(
                        words,
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=None if output is None else subprocess.STDOUT,
                        # A terminal's signal reaches the launcher's process group, which passes it on once. In sessions
                        # of their own (Linux's autogroups), ranks could not yield the processor to one another.
                        process_group=0,
                    )
                except FileNotFoundError:
                    raise UsageError(
                        f"there is no {words[0]} on this machine, which starts ranks on {host.name}",
                        remedy=f"install {words[0]}, or start the job with --devices on this machine alone",
                    ) from None
            self.started.append((host, running))

    def held(self) -> Counter[str]:
        """Return the number of ranks that still run on each host.

        A rank counts as running as long as its process on this node runs, which is for a rank on another host its
        ``ssh``.

        Returns:
            Name of the host → number of ranks; 0 for a host without a running rank.
        """
        return Counter(host.name for host, process in self.started if process.poll() is None)

    def stop(self, number: int) -> None:
        """Send a signal to all ranks that still run, as a line with the signal's number on their standard input.

        Args:
            number: number of the signal. For SIGKILL the standard inputs are closed too, and the call blocks until the
                processes on this node, such as ``ssh``, have ended.
        """
        running = [process for _, process in self.started if process.poll() is None]
        for process in running:
            if process.stdin is not None:
                with suppress(OSError, ValueError):
                    process.stdin.write(f"{int(number)}\n".encode())
                    process.stdin.flush()
        if number != signal.SIGKILL:
            return
        for process in running:
            with suppress(OSError, ValueError):
                if process.stdin is not None:
                    process.stdin.close()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class HostsEngine:
    """``Engine`` that starts the ranks of a job on this node and on nodes that are reached over SSH, for ``supervise``.

    A slot is room for one rank. The slots of a host whose SSH connection was lost do not count until ``ssh HOST true``
    succeeds again.

    Args:
        hosts: the nodes with their slots.
        logs: folder for the output of all ranks but rank 0.
    """

    def __init__(self, hosts: Sequence[Host], logs: Path) -> None:
        self._hosts = hosts
        self._ranks = TetheredRanks(logs)
        self._gone: dict[str, subprocess.Popen[bytes] | None] = {}

    def slots(self) -> Mapping[str, int]:
        """Return the free slots (places for a rank) on this node and on nodes that are reached over SSH; does not wait.

        A host counts even if no connection to it was tried yet. A host whose SSH connection was lost is left out until
        it answers again, for which this method starts an attempt in the background.

        Returns:
            Name of the host → number of free slots.
        """
        held = self._ranks.held()
        self._probe()
        return {host.name: host.slots - held[host.name] for host in self._there()}

    def start(self, size: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the processes of ranks 0 to ``size`` - 1, on this node and over SSH, filling the hosts in order.

        Returns without waiting for the ranks. Ranks that this method started earlier must have ended. Each rank works
        in the same directory as this process. The engine sets torchrun's variables in each rank, such as ``RANK`` and
        ``MASTER_ADDR``.

        Args:
            size: number of ranks.
            words: arguments of the Python interpreter, the same for every rank.
            environment: additional environment variables of every rank, which override those of the engine.

        Raises:
            SlotsGone: there are fewer than ``size`` slots (places for a rank) by now.
            DiskError: a log cannot be written.
            UsageError: there is no ``ssh`` on this machine.
        """
        hosts = self._there()
        if size > sum(host.slots for host in hosts):
            raise SlotsGone
        planned = [
            replace(process, environment={**process.environment, **environment})
            for process in plan_processes(hosts, size, *store_endpoint(hosts))
        ]
        here = Path.cwd()
        self._ranks.start([(each.host, command(each, [sys.executable, *words], here)) for each in planned])

    def poll(self) -> Sequence[EndedRank | None]:
        """Return how the process of each rank has ended, on this node or over SSH; does not wait.

        A lost SSH connection counts as the end of its rank; the host's slots (places for a rank) then do not count
        until SSH reaches the host again.

        Returns:
            One entry for each rank, in rank order: None for a rank that still runs; else ``code`` (exit code, -N if
            signal N killed the process), ``node``, ``lost`` (that the connection was lost, in words; else empty) and
            ``remedy`` (advice for the user, or None).
        """
        found = [
            None if process.poll() is None else _ended(host, process.returncode)
            for host, process in self._ranks.started
        ]
        for ended in found:
            if ended is not None and ended.lost:
                self._gone.setdefault(ended.node, None)
        return found

    def stop(self, number: int) -> None:
        """Send a signal to every rank that still runs, on this node or over SSH, through its standard input.

        Args:
            number: number of the signal; for SIGKILL the call blocks until the local processes, ``ssh`` included, have
                ended.
        """
        if number == signal.SIGKILL:
            for probe in self._gone.values():
                if probe is not None and probe.poll() is None:
                    probe.kill()
        self._ranks.stop(number)

    def _there(self) -> list[Host]:
        return [host for host in self._hosts if host.name not in self._gone]

    def _probe(self) -> None:
        """Try to reach each lost host, without waiting for the answer; count a host again that has answered."""
        for name, probe in list(self._gone.items()):
            code = None if probe is None else probe.poll()
            if code == 0:
                del self._gone[name]
            elif probe is None or code is not None:
                self._gone[name] = subprocess.Popen(
                    ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_REACH}", name, "true"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )


def _ended(host: Host, code: int) -> EndedRank:
    if code != _SSH_FAILED or host.local:
        return EndedRank(code, host.name)
    return EndedRank(
        code,
        host.name,
        lost=f"has no connection to {host.name} by ssh, or it was lost",
        remedy=f"'ssh -o BatchMode=yes {host.name} true' must work without a password.",
    )


@contextmanager
def _log(logs: Path, rank: int) -> Iterator[int]:
    """Open the rank's log to append and yield its file descriptor. Raises DiskError."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        file = (logs / f"rank{rank}.log").open("ab")
    except OSError as error:
        raise DiskError("cannot write a log", where=str(logs), why=error.strerror) from error
    with file:
        yield file.fileno()
