"""The engine of one node among several, on each of which the same command is started, as with torchrun. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import UsageError, counted
from tutti.launcher.engine import EndedRank
from tutti.launcher.hosts import Host, TetheredRanks, plan_processes
from tutti.launcher.stdin_control import TETHER


@dataclass(frozen=True)
class NodePart:
    """Place of this node in a job of several nodes, on each of which the same command is started, as with torchrun.

    Attributes:
        nodes: number of nodes of the job.
        number: number of this node, from 0 (torchrun's ``--node-rank``).
        processes: number of ranks on each node.
        address: host name or IP address of node 0 for the other nodes (``MASTER_ADDR``).
        port: TCP port of node 0 that is free (``MASTER_PORT``).

    Raises:
        UsageError: ``nodes`` or ``processes`` is less than 1, or ``number`` is not in [0, ``nodes``).
    """

    nodes: int
    number: int
    processes: int
    address: str
    port: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.processes < 1 or not 0 <= self.number < self.nodes:
            raise UsageError(
                f"this cannot be node {self.number} of {self.nodes} with {counted(self.processes, 'process')}",
                remedy="give --nnodes and --nproc-per-node of at least 1, and a --node-rank from 0 to nnodes - 1",
            )

    @property
    def first_rank(self) -> int:
        """The number of this node's first rank within the whole job."""
        return self.number * self.processes


class NodeEngine:
    """``Engine`` that starts the ranks of this node only; the other nodes run the same command, as with torchrun.

    A slot is room for one rank. There are as many slots as ranks on this node, so that the job keeps its size.

    Args:
        part: numbers of nodes and of ranks, number of this node, and address and port of node 0.
        logs: folder for the output of all ranks but this node's first.
    """

    def __init__(self, part: NodePart, logs: Path) -> None:
        self._part = part
        self._name = f"node{part.number}"
        self._ranks = TetheredRanks(logs, part.first_rank)

    def slots(self) -> Mapping[str, int]:
        """Return the free slots of this node; a slot is room for one rank.

        Returns:
            ``{"nodeK": N}``: K is the number of this node, from 0; N is the number of ranks that the node takes, minus
            the number of those that still run.
        """
        return {self._name: self._part.processes - self._ranks.held().total()}

    def start(self, size: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the processes of this node's ranks, without waiting for their end; earlier ranks must have ended.

        Every other node of the job starts its own ranks by the same command. The engine sets torchrun's variables in
        each rank, such as ``RANK`` and ``WORLD_SIZE``.

        Args:
            size: number of this node's ranks, equal to ``processes`` of the ``NodePart`` of this engine.
            words: arguments of the Python interpreter, the same for every rank.
            environment: additional environment variables of every rank, which override those of the engine.

        Raises:
            DiskError: a log cannot be written.
        """
        part = self._part
        nodes = [Host(f"node{number}", part.processes) for number in range(part.nodes)]
        commands = []
        for process in plan_processes(nodes, None, part.address, part.port):
            if process.environment["GROUP_RANK"] == str(part.number):
                told = {**process.environment, **environment, TETHER: "stdin"}
                pairs = [f"{name}={value}" for name, value in told.items()]
                commands.append((Host("localhost", size), ["env", *pairs, sys.executable, *words]))
        self._ranks.start(commands)

    def poll(self) -> Sequence[EndedRank | None]:
        """Return how the process of each rank of this node has ended; does not wait.

        Returns:
            One entry for each rank of this node, in the order of local ranks: None for a rank that still runs, else its
            exit code (``code``, -N if signal N killed the process) and ``node``, such as ``node1``.
        """
        codes = [process.poll() for _, process in self._ranks.started]
        return [None if code is None else EndedRank(code, self._name) for code in codes]

    def stop(self, number: int) -> None:
        """Send a signal to every running rank of this node.

        Args:
            number: number of the signal; for SIGKILL the call blocks until the processes have ended.
        """
        self._ranks.stop(number)


def read_node_part(flags: Mapping[str, str], environ: Mapping[str, str], processes: int) -> NodePart | None:
    """Read the place of this node in a job of several nodes, from torchrun's flags or its variables ``PET_*``.

    A flag takes precedence over its variable, such as ``--nnodes`` over ``PET_NNODES``.

    Args:
        flags: values of ``--nnodes``, ``--node-rank``, ``--nproc-per-node``, ``--rdzv-endpoint``, ``--master-addr`` and
            ``--master-port``, as far as they are given.
        environ: environment variables.
        processes: ranks on each node if neither a flag nor a variable has a number of processes.

    Returns:
        A ``NodePart``: ``nodes`` of the job, ``number`` of this node, ``processes`` (ranks on each node), ``address``
        and ``port`` of node 0; None if no flag is given and the variables do not announce several nodes.

    Raises:
        UsageError: the number of nodes, the number of this node or the address of node 0 is missing, a value is
            malformed, there are fewer than one node or process, or the number of this node is not below the number of
            nodes.

    >>> flags = {"--nnodes": "2", "--node-rank": "1", "--rdzv-endpoint": "host0:29500"}
    >>> read_node_part(flags, {}, 4)
    NodePart(nodes=2, number=1, processes=4, address='host0', port=29500)
    """

    def value(flag: str) -> str | None:
        return flags.get(flag) or environ.get("PET_" + flag[2:].replace("-", "_").upper())

    def whole(flag: str, default: int | None = None) -> int:
        text = value(flag)
        if text is None and default is not None:
            return default
        if text is None or not text.isdecimal():
            raise UsageError(
                f"{flag} is missing" if text is None else f"{flag} is '{text}'",
                remedy=f"give a whole number as {flag}, or as PET_{flag[2:].replace('-', '_').upper()}",
            )
        return int(text)

    if value("--nnodes") is None and not flags:
        return None
    if whole("--nnodes", 1) == 1 and not flags:
        return None
    endpoint = value("--rdzv-endpoint")
    address, colon, port = (endpoint or "").rpartition(":")
    if not colon:
        address, port = endpoint or value("--master-addr") or "", str(whole("--master-port", 29500))
    if not address or not port.isdecimal() or not 1 <= int(port) < 1 << 16:
        given = "missing" if not (endpoint or address) else f"'{endpoint or f'{address}:{port}'}'"
        raise UsageError(f"--rdzv-endpoint is {given}", remedy="give node 0's address and a free port: host0:29500")
    counted = value("--nproc-per-node")
    each = processes if counted in (None, "auto", "gpu", "cpu") else whole("--nproc-per-node")
    return NodePart(whole("--nnodes"), whole("--node-rank"), each, address, int(port))
