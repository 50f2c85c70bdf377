"""The Slurm engine: inside of an allocation, a job step of one task for each rank, held by its standard input.

Each attempt starts its own steps, so that the supervisor restarts, shrinks and ends a job as on every other engine.
Slurm's commands are called, its libraries are not. No torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tutti.errors import ExitCode, PeerError, UsageError
from tutti.launcher.engine import EndedRank, SlotsGone
from tutti.launcher.hosts import Host, TetheredRanks, plan_processes, store_endpoint
from tutti.launcher.stdin_control import TETHER, TETHER_KILL
from tutti.process_context import tasks_per_node

JOB = "SLURM_JOB_ID"
_LOOK = 5.0
_LIMIT = 60.0
_CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_ASKED = frozenset(
    {int(ExitCode.PREEMPTED), *(128 + each for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))}
)
# One task with all CPUs and GPUs of the job on its node, beside the other ranks' steps.
_STEP = ("srun", "--quiet", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--mem=0")


class SlurmEngine:
    """``Engine`` that starts the ranks of a job in a Slurm allocation, each rank as a job step (``srun``) of one task.

    A slot is room for one rank; each node has as many slots as Slurm tasks. When Slurm takes a node from the job
    (``sbatch --no-kill``), the slots of the node are lost and do not come back within the job.

    Args:
        logs: folder for the output of all ranks but rank 0.

    Raises:
        UsageError: this process does not run in a Slurm allocation, or Slurm's variables contradict each other.
        PeerError: Slurm does not answer.
    """

    def __init__(self, logs: Path) -> None:
        if not {JOB, "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"} <= os.environ.keys():
            raise UsageError("this process runs in no job of Slurm", remedy="start it with sbatch or salloc")
        names = _host_names(os.environ["SLURM_JOB_NODELIST"])
        counts = tasks_per_node(os.environ["SLURM_TASKS_PER_NODE"], "SLURM_TASKS_PER_NODE")
        if names is None:
            raise PeerError("Slurm does not say which nodes its job has", where=os.environ["SLURM_JOB_NODELIST"])
        if len(names) != len(counts):
            raise UsageError(
                f"the Slurm job has {len(names)} nodes, and SLURM_TASKS_PER_NODE is that of {len(counts)}",
                remedy="leave the variables of Slurm as sbatch and salloc set them",
            )
        self._tasks = dict(zip(names, counts, strict=True))
        self._held = set(names)
        self._looked = time.monotonic()
        self._ranks = TetheredRanks(logs)
        self._ends: dict[int, EndedRank] = {}

    def slots(self) -> Mapping[str, int]:
        """Return the free slots of the nodes that still belong to the Slurm job and answer.

        A slot is room for one rank. Asks Slurm's commands, which may take seconds. If ``squeue`` or ``scontrol`` does
        not answer, the nodes that the job had at the last answer count; if ``sinfo`` does not, all of the job's nodes
        count.

        Returns:
            Name of the node → number of free slots.
        """
        held = self._ranks.held()
        return {host.name: host.slots - held[host.name] for host in self._there()}

    def start(self, size: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start all ranks, each as its own job step (``srun``) in this Slurm allocation, filling the nodes in order.

        Does not wait for the ranks, but asks Slurm which nodes the job has. Ranks that this method started earlier must
        have ended. The engine sets torchrun's variables in each rank, such as ``RANK`` and ``MASTER_ADDR``.

        Args:
            size: number of ranks.
            words: arguments of the Python interpreter, the same for every rank.
            environment: additional environment variables of every rank, which override those of the engine.

        Raises:
            SlotsGone: there are fewer than ``size`` slots (places for a rank) by now.
            DiskError: a log cannot be written.
            UsageError: there is no ``srun`` on this machine.
        """
        hosts = self._there()
        if size > sum(host.slots for host in hosts):
            raise SlotsGone
        alone = hosts[0].slots >= size
        address = "127.0.0.1" if alone else node_address(hosts[0].name) or hosts[0].name
        common = {**environment, TETHER: TETHER_KILL}
        if alone and "GLOO_SOCKET_IFNAME" not in os.environ:
            common["GLOO_SOCKET_IFNAME"] = "lo"
        commands = []
        for rank, process in enumerate(plan_processes(hosts, size, *store_endpoint([Host(address, 1)]))):
            pairs = [f"{name}={value}" for name, value in {**process.environment, **common}.items()]
            step = [*_STEP, f"--nodelist={process.host.name}", f"--job-name=rank{rank}"]
            commands.append((process.host, [*step, "env", *pairs, sys.executable, *words]))
        self._ends = {}
        self._ranks.start(commands)

    def poll(self) -> Sequence[EndedRank | None]:
        """Return how the process of each rank in this Slurm allocation has ended; does not wait for an end.

        A rank whose node Slurm has taken from the job counts as killed, with its slot (place for a rank) lost. Asks
        Slurm for the nodes of the job, which may take seconds, every five seconds and when a rank has ended; while
        Slurm does not answer, the nodes of its last answer count.

        Returns:
            One entry for each rank, in rank order: None for a rank that still runs; else ``code`` (exit code, -N if
            signal N killed the process), ``node`` and ``lost`` (that the node was lost, in words; else empty).
        """
        if time.monotonic() - self._looked > _LOOK:
            self._look()
        there: set[str] | None = None
        for rank, (host, process) in enumerate(self._ranks.started):
            if rank in self._ends:
                continue
            if host.name not in self._held and process.poll() is None:
                # srun may wait for a task that it cannot reach any more.
                process.kill()
                process.wait()
            if (code := process.poll()) is None:
                continue
            if there is None:
                there = {each.name for each in self._there()}
            # When Slurm takes a node away, srun ends with 0.
            gone = host.name not in (there if code else self._held)
            self._ends[rank] = _lost(host.name) if gone else EndedRank(_signal_or_code(code), host.name)
        return [self._ends.get(rank) for rank in range(len(self._ranks.started))]

    def stop(self, number: int) -> None:
        """Send a signal to every running rank, through its standard input.

        Args:
            number: number of the signal; for SIGKILL the call blocks until the job steps' ``srun`` processes have
                ended.
        """
        self._ranks.stop(number)

    def _look(self) -> None:
        """Ask which nodes the job still has."""
        self._looked = time.monotonic()
        if (listed := _answer("squeue", "--noheader", f"--jobs={os.environ[JOB]}", "--format=%N")) is not None:
            # A run goes on while Slurm is busy or away.
            self._held = set(found) if (found := _host_names(listed)) is not None else self._held

    def _there(self) -> list[Host]:
        """Return the job's nodes that answer, with all their slots."""
        self._look()
        nodes = [name for name in self._tasks if name in self._held]
        states = _answer("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T") or ""
        # Slurm marks a node that does not answer by a star.
        gone = {name for name, state in map(str.split, states.splitlines()) if state.startswith("down") or "*" in state}
        return [Host(name, self._tasks[name]) for name in nodes if name not in gone]


def node_address(name: str) -> str | None:
    """Return the address of a node, for which Slurm (``scontrol``) is asked; None if Slurm does not know or answer.

    For clusters where the node's name does not resolve. Blocks until Slurm answers, which may take seconds.

    Args:
        name: the node's name in Slurm.
    """
    shown = _answer("scontrol", "--oneliner", "show", "node", name) or ""
    return dict(word.split("=", 1) for word in shown.split() if "=" in word).get("NodeAddr")


def restarts(environ: Mapping[str, str]) -> int:
    """Return how many times Slurm has started this job again, such as after a requeue.

    Args:
        environ: environment variables, of which ``SLURM_RESTART_COUNT`` is read; 0 without it. ValueError is raised
            where it is no whole number.
    """
    return int(environ.get("SLURM_RESTART_COUNT", "0"))


def requeue(code: int) -> None:
    """Put this Slurm job back into the queue (``scontrol requeue``) if its run was preempted or ended by a signal.

    ``tutti train`` and ``tutti run`` with ``--on slurm`` call it after the run. The job is that of ``SLURM_JOB_ID``,
    without which KeyError is raised. The signals are SIGTERM, SIGUSR1 and SIGUSR2. Does nothing after other ends of the
    run, nor if Slurm itself is ending the job: a cancelled job would come back. Blocks until Slurm answers, which may
    take seconds. Prints a line on standard error if the job is requeued; if Slurm refuses or does not answer, nothing
    is printed or raised, and the job is not requeued.

    Args:
        code: exit code of the run, a member of ``tutti.errors.ExitCode`` (75: preempted) or 128 + the number of a
            signal.
    """
    job = os.environ[JOB]
    # A job that is cancelled, preempted or out of time ends already; requeuing would bring a cancelled one back.
    if code not in _ASKED or _answer("squeue", "--noheader", f"--jobs={job}", "--format=%T") != "RUNNING":
        return
    if _answer("scontrol", "requeue", job) is not None:
        print(f"tutti: job {job} is back in the queue and continues from its checkpoint", file=sys.stderr, flush=True)


def _lost(node: str) -> EndedRank:
    return EndedRank(-signal.SIGKILL, node, lost=f"was lost with its node {node}")


def _signal_or_code(code: int) -> int:
    """Return srun's exit code as ``subprocess`` has it: a task that crashed by a signal has a negative code."""
    return 128 - code if code - 128 in _CRASHES else code


def _host_names(nodes: str) -> list[str] | None:
    """Return the names in a list of Slurm, such as ``n[1-3]``; None if Slurm does not answer."""
    names = _answer("scontrol", "show", "hostnames", nodes) if nodes else ""
    return None if names is None else names.split()


def _answer(*words: str) -> str | None:
    """Return the output of a command of Slurm; None if it fails, such as while the controller is away."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
