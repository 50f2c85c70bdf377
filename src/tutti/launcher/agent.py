"""The agent of one node: torchrun's elastic agent without its network; tutti ends and restarts the ranks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from tutti.errors import ExitCode
from tutti.launcher import child, failure
from tutti.launcher.budget import Budget
from tutti.launcher.failure import Failure
from tutti.launcher.lost_rank_notes import LostRankNotes
from tutti.launcher.orphans import await_end
from tutti.torch_compat import elastic_processes, make_elastic_agent, set_elastic_restarts

_POLL = 0.05
# After a failure the other ranks mostly fail too, with records of their own; an orderly end may write a checkpoint.
_SETTLE = 1.0
_TERMINATE = 5.0
_ORDERLY = frozenset({ExitCode.PREEMPTED, ExitCode.INTERRUPTED})


class OneHost(RendezvousHandler):
    """Rendezvous handler of torchelastic for a job on one node: it completes at once, with no connection to a peer.

    Each call of ``next_rendezvous`` picks a free port, which PyTorch passes to the ranks as ``MASTER_PORT``, and
    reserves it until the next call or ``shutdown``: tutti's ranks need no port, but a script that makes a process group
    of its own (DDP, Accelerate) listens there, seconds later.
    """

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._reserved: socket.socket | None = None

    def get_backend(self) -> str:
        """Return ``tutti``, the name of this rendezvous backend; PyTorch's elastic agent calls this method."""
        return "tutti"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once the rendezvous result of a job on this node alone.

        PyTorch's elastic agent calls this method before each start of the ranks.

        Returns:
            An in-process ``HashStore``, node rank 0, number of nodes 1, and the master address and port for the ranks:
            127.0.0.1 and a TCP port. The system gives that port to no other socket; a socket that asks for it by number
            needs ``SO_REUSEADDR``, which PyTorch's store sets. Each call picks a port anew.
        """
        self.shutdown()
        self._reserved = socket.socket()
        # Bound and never listening: a listener may join it, and the system does not hand the port to anyone else.
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        port = self._reserved.getsockname()[1]
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        """Return False to PyTorch's elastic agent: the rendezvous of a job on one node is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing when PyTorch's elastic agent closes the rendezvous: there is no agent of another node to tell."""

    def num_nodes_waiting(self) -> int:
        """Return 0 to PyTorch's elastic agent: no node waits to join, as a job on one node admits no other node."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of this run for torchelastic: 32 random hexadecimal digits, the same at every call."""
        return self._run_id

    def shutdown(self) -> bool:
        """Release the reserved port, and return True: the rendezvous is shut down."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        return True


class Logs(LogsSpecs):
    """Log destinations for torchelastic's agent, which redirects no output: each rank writes its own log file.

    Args:
        directory: folder of the ranks' log files.
        shown: whether the agent follows the log files of ranks above 0 and prints their lines on the terminal.
    """

    def __init__(self, directory: Path, shown: bool) -> None:
        super().__init__(str(directory))
        self._directory, self._shown = directory, shown

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where PyTorch's elastic agent redirects the ranks' output (nowhere), and which logs it shows.

        The agent calls this method before each start of the ranks.

        Args:
            envs: local rank → its environment; only the keys are used.

        Returns:
            Destinations in which no output is redirected, because each rank redirects its own. If the output of all
            ranks is to be shown, they name the log file of each rank above 0 as the file to follow as standard output.
        """
        nowhere = dict.fromkeys(envs, "")
        shown = {rank: str(failure.log_path(self._directory, rank)) for rank in envs if rank > 0 and self._shown}
        return LogsDest(nowhere, dict(nowhere), shown, {}, dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        """Path, as a string, of the directory that holds the log files of all ranks of this node."""
        return str(self._directory)


class Agent:
    """Starts the ranks of one node, restarts them all after a failure, and ends them together.

    If a rank is killed by a signal, no restart is left, and the rank has recorded that the run can go on without it
    (``LostRankNotes.mark_expendable``), the others keep running.

    Args:
        job: entry point, arguments and folders of every rank.
        processes: number of ranks on this node.
        budget: counts the restarts that are still allowed.
        grace: seconds that the ranks have to end after a signal, before they get SIGKILL.

    Attributes:
        deaths: rank → exit code and time (seconds since the epoch), for ranks that ended before this agent began to end
            them.
        lost: ranks that were killed while the run goes on without them.
        exhausted: text for the user that says why no restart was left after a failure that a restart could have
            repaired; empty if there was no such failure, or if no restarts were ever allowed.
    """

    def __init__(self, job: child.Job, processes: int, budget: Budget, grace: float) -> None:
        self._rendezvous = OneHost()
        spec = WorkerSpec(
            role="tutti",
            local_world_size=processes,
            rdzv_handler=self._rendezvous,
            entrypoint=child.child_main,
            args=(job,),
            max_restarts=budget.left,
            monitor_interval=_POLL,
        )
        self._elastic = make_elastic_agent(
            spec,
            Logs(job.logs, job.all_shown),
            "[rank ${rank}] ",
            start=self._start,
            monitor=self._monitor,
            shut_down=lambda number: self._end(number, self._grace),
        )
        self.deaths: dict[int, tuple[int, float]] = {}
        self.lost: set[int] = set()
        self.exhausted = ""
        self._notes = LostRankNotes(job.store)
        self._job, self._processes, self._grace, self._budget = job, processes, grace, budget
        self._workers: list[Any] = []
        self._killed: set[int] = set()
        self._ending = False
        _silence()

    def run(self) -> None:
        """Start the ranks of this node and block until they have ended for good, all restarts included.

        A failure of the ranks raises nothing; ``failures`` returns it afterwards.

        Raises:
            SignalException: this process got a signal that asks the run to stop. PyTorch's elastic agent has ended the
                ranks before: it has passed the signal on, and killed the ranks that ran on after ``grace`` seconds.
        """
        try:
            self._elastic.run()
        finally:
            self._rendezvous.shutdown()

    def failures(self) -> list[Failure]:
        """Return the failures of this node's ranks that had a non-zero exit code before the agent ended the others.

        Only the ranks of the last start count. Ranks that were killed while the run went on without them are left out.

        Returns:
            One record for each such rank, in the order in which their ends were noticed: rank, time (seconds since the
            epoch), kind and text of the exception, exit code, traceback, and where known step, remedy and signal. A
            record is the one that the rank has written, if there is one, else made from the exit code.
        """
        ended = self.deaths.items()
        return [self._failure(rank) for rank, (code, _) in ended if code != 0 and rank not in self.lost]

    def _failure(self, rank: int) -> Failure:
        return failure.read_failure(self._job.notes, rank) or failure.from_death(rank, *self.deaths[rank])

    def exit_codes(self) -> set[int]:
        """Return the distinct exit codes of all ranks of this node that have ended; -N if signal N killed a rank.

        Ranks of former starts do not count.
        """
        return {worker.exitcode for worker in self._workers if worker.exitcode is not None}

    def kill(self) -> None:
        """Kill every rank of this node that still runs, and its child processes, by SIGKILL, and wait for their end.

        Waits at most ten seconds for each rank.
        """
        self._end(None, 0)

    def _start(self, fork: Callable[[], dict[int, Any]]) -> dict[int, Any]:
        """Start all ranks with signals blocked; return the result of ``fork``."""
        self.deaths, self.lost, self._ending = {}, set(), False
        self._notes.clear()
        failure.clear(self._job.notes, range(self._processes))
        signal.pthread_sigmask(signal.SIG_BLOCK, child.SIGNALS)
        try:
            pids = fork()
            self._workers = elastic_processes(self._elastic)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, child.SIGNALS)
        return pids

    def _monitor(self) -> RunResult:
        """Record ranks that have ended, and return the state of the job; after a failure, end all and decide."""
        self._reap()
        codes = {code for rank, (code, _) in self.deaths.items() if rank not in self.lost}
        if codes - {0}:
            orderly = codes <= _ORDERLY | {0}
            self._wait(self._grace if orderly else _SETTLE)
            self._end(signal.SIGTERM, _TERMINATE)
            self._decide()
            return RunResult(state=WorkerState.FAILED)
        if len(self.deaths) < len(self._workers):
            return RunResult(state=WorkerState.HEALTHY)
        # The elastic agent expects a return value of every rank, even None.
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.deaths))

    def _decide(self) -> None:
        """Decide on a restart, tell the user, and set the elastic agent's own restart counters to match."""
        cause = failure.root_cause(self.failures())
        restart = None if failure.is_final(cause) else self._budget.spend()
        set_elastic_restarts(self._elastic, 0)
        if restart is not None:
            message = failure.describe_failure(cause, failure.log_path(self._job.logs, cause.rank))
            # Print the stack of a stuck rank in full: no exception will show it again.
            message = message if cause.traceback and not cause.kind else message.splitlines()[0]
            print(f"{message}\ntutti: {restart.describe()}", file=sys.stderr, flush=True)
            time.sleep(restart.pause)
            set_elastic_restarts(self._elastic, restart.left + 1)
        elif not failure.is_final(cause):
            self.exhausted = self._budget.describe()

    def _end(self, number: signal.Signals | None, grace: float) -> None:
        """Send a signal to every rank, wait ``grace`` seconds, then kill the ranks' process groups."""
        self._reap()
        self._ending = True
        alive = [worker for worker in self._workers if worker.exitcode is None]
        try:
            if number is not None:
                for worker in alive:
                    with suppress(ProcessLookupError):
                        os.kill(worker.pid, number)
            self._wait(grace)
        finally:
            for worker in alive:
                self._kill(worker)
            for worker in alive:
                worker.join(_TERMINATE)
            for worker in self._workers:
                if worker.pid in self._killed and worker.exitcode is not None:
                    await_end(-worker.pid, _TERMINATE)

    def _wait(self, seconds: float) -> None:
        """Wait until all ranks have ended, at most ``seconds``."""
        end = time.monotonic() + seconds
        while not self._reap() and time.monotonic() < end:
            time.sleep(_POLL / 5)

    def _reap(self) -> bool:
        """Record ranks that have ended; return whether all have."""
        for rank, worker in enumerate(self._workers):
            if rank not in self.deaths and worker.exitcode is not None and not self._ending:
                self.deaths[rank] = (worker.exitcode, time.time())
                if worker.exitcode != 0:
                    self._kill(worker)
                    self._lose(rank)
        return all(worker.exitcode is not None for worker in self._workers)

    def _lose(self, rank: int) -> None:
        """Mark a killed rank as lost, so that the run goes on, if it is expendable and no restart is left."""
        if self.deaths[rank][0] < 0 and not self._budget.left and self._notes.is_expendable(rank):
            self.lost.add(rank)
            self._notes.mark_lost(rank, self._failure(rank).message)

    def _kill(self, worker: Any) -> None:
        """Kill a rank's process group: the rank, if alive, and its child processes."""
        self._killed.add(worker.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        if worker.exitcode is None:
            # The rank may not have made its process group yet.
            worker.kill()


def _silence() -> None:
    """Silence the elastic agent's log; tutti reports failures itself."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def run_agent(agent: Agent) -> signal.Signals | None:
    """Start the ranks of this node by ``agent`` and block until they have ended, restarts included.

    Ranks that are left are killed. A signal is passed on to the ranks; a second signal kills them at once. After the
    end, also after an exception, this process ignores the signals that stop a run (``child.SIGNALS``, such as SIGINT
    and SIGTERM).

    Args:
        agent: starts and restarts the ranks.

    Returns:
        The first signal that asked the run to stop; None if it ended by itself, also if ranks failed, which raises
        nothing: ``agent.failures()`` then returns their failures.
    """
    try:
        agent.run()
    except SignalException as stopped:
        return signal.Signals(stopped.sigval)
    finally:
        for number in child.SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        agent.kill()
    return None
