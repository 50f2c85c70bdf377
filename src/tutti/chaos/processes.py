"""Find the processes of a run by rank, and stop, slow or signal them.

A rank is the process that has the rank's log open for writing. This cannot be out of date, as a file of process ids
could be: the system reuses ids.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tutti.chaos.faults import duty
from tutti.metrics.metrics_file import METRICS

_LOG = re.compile(r"rank(\d+)\.log")
_RUNS_NOT = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is no zombie; a process stopped by SIGSTOP counts as alive.

    Args:
        process: the process; the result is also False if it has ended and its number belongs to another process now.
    """
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@dataclass(frozen=True)
class RunProcesses:
    """The processes of a training run at one moment.

    Attributes:
        launcher: the parent process of the ranks; for a run of a single process that process itself. None if another
            launcher has started the single process, and if no process was found.
        ranks: process of each rank, by rank.
    """

    launcher: psutil.Process | None = None
    ranks: dict[int, psutil.Process] = field(default_factory=dict)

    def living(self) -> list[int]:
        """Return the ranks of the training run whose processes still exist at the time of the call.

        Returns:
            Rank numbers, in the order of ``ranks``. Processes stopped by SIGSTOP count as existing, zombies do not.
        """
        return [rank for rank, process in self.ranks.items() if alive(process)]


def find_processes(directory: Path, launcher: psutil.Process | None = None) -> RunProcesses:
    """Find the running processes of the training run in ``directory``, by the files that they have open.

    A rank is the process that has ``logs/rankN.log`` open for writing; in a run of one process, ``metrics.jsonl``.

    Args:
        directory: run directory.
        launcher: process that started the run: only it and its descendants are searched; None: all processes of the
            machine, of which only root sees those of other users.

    Returns:
        A ``RunProcesses`` of ``launcher`` and ``ranks``. ``ranks`` is a dict from the rank's number to its
        ``psutil.Process``, empty if there are none. ``launcher`` is the parent process of the lowest rank; for a run of
        a single process that process itself, or None if another launcher such as torchrun has started it; None if
        there are none.
    """
    with suppress(psutil.NoSuchProcess):
        near = [launcher, *launcher.children(recursive=True)] if launcher else psutil.process_iter()
        return _processes_among(directory.absolute(), near)
    return RunProcesses()


def _processes_among(directory: Path, candidates: Iterable[psutil.Process]) -> RunProcesses:
    writers: dict[Path, list[psutil.Process]] = {}
    for process in candidates:
        for path in _written(process):
            writers.setdefault(path, []).append(process)
    logs = {path: _LOG.fullmatch(path.name) for path in writers if path.parent == directory / "logs"}
    ranks = {int(number[1]): _first(writers[path]) for path, number in logs.items() if number}
    if ranks:
        return RunProcesses(ranks[min(ranks)].parent(), ranks)
    if not (writing := writers.get(directory / METRICS)):
        return RunProcesses()
    alone = _first(writing)
    return RunProcesses(None if "RANK" in alone.environ() else alone, {0: alone})


def _written(process: psutil.Process) -> list[Path]:
    """Return the files that a process has open for writing; none if it has ended or belongs to another user."""
    with suppress(psutil.Error, OSError):
        return [Path(file.path) for file in process.open_files() if getattr(file, "mode", "w") != "r"]
    return []


def _first(processes: list[psutil.Process]) -> psutil.Process:
    """Return the rank among ``processes``: its child processes may have inherited its open files."""
    numbers = {process.pid for process in processes}
    return next((process for process in processes if _parent(process) not in numbers), processes[0])


def _parent(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.ppid())
    return 0


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process; do nothing if it has ended.

    Args:
        process: the process.
        number: the signal, such as ``SIGSTOP``.
    """
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


@contextmanager
def frozen(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Stop processes with SIGSTOP while a ``with`` block runs, and continue them with SIGCONT after it.

    The block begins once all of them have stopped; processes that have ended are skipped. They are continued if the
    block raises, too. The context manager gives no value.

    Args:
        processes: processes of this machine that this user may signal.
    """
    held = list(processes)
    try:
        for process in held:
            send(process, signal.SIGSTOP)
        while any(map(_runs, held)):
            time.sleep(0.001)
        yield
    finally:
        for process in held:
            send(process, signal.SIGCONT)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() not in _RUNS_NOT
    return False


class StoppedProcess:
    """Stops a process by SIGSTOP, or slows it down, from construction until ``release``.

    Args:
        process: the process.
        factor: stop the process only for 1 - 1/factor of every tenth of a second, so that it becomes ``factor`` times
            slower; None: stop it all the time.
    """

    def __init__(self, process: psutil.Process, factor: float | None = None) -> None:
        self._process, self._over = process, threading.Event()
        send(process, signal.SIGSTOP)
        self._thread = threading.Thread(target=self._slow, args=(factor,)) if factor else None
        if self._thread:
            self._thread.start()

    def _slow(self, factor: float) -> None:
        for runs, seconds in duty(factor):
            send(self._process, signal.SIGCONT if runs else signal.SIGSTOP)
            if self._over.wait(seconds):
                return

    def release(self) -> None:
        """Let the process that this object has stopped or slowed down run on, by SIGCONT.

        Does nothing if the process has ended.
        """
        self._over.set()
        if self._thread:
            self._thread.join()
        send(self._process, signal.SIGCONT)
