"""Which process is which rank of a run, and doing things to it.

A rank is the process that has its log open for writing, so that nothing can be out of date: no file of process ids is
believed, and no number that another program may have got since.
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

_LOG = re.compile(r"rank(\d+)\.log")
_RUNS_NOT = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def alive(process: psutil.Process) -> bool:
    """Whether a process runs or is stopped; one that only waits to be reaped does not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@dataclass(frozen=True)
class Crew:
    """The processes of a run at one moment.

    Attributes:
        launcher: who started the ranks; the run itself where it is one process; None where another launcher did.
        ranks: rank → process.
    """

    launcher: psutil.Process | None = None
    ranks: dict[int, psutil.Process] = field(default_factory=dict)

    def living(self) -> list[int]:
        """Ranks whose processes have not ended."""
        return [rank for rank, process in self.ranks.items() if alive(process)]


def crew(directory: Path, launcher: psutil.Process | None = None) -> Crew:
    """The processes of the run in ``directory``: among ``launcher`` and its descendants, or of the whole machine.

    Processes of other users are seen by root only.
    """
    with suppress(psutil.NoSuchProcess):
        near = [launcher, *launcher.children(recursive=True)] if launcher else psutil.process_iter()
        return _crew(directory.absolute(), near)
    return Crew()


def _crew(directory: Path, candidates: Iterable[psutil.Process]) -> Crew:
    writers: dict[Path, list[psutil.Process]] = {}
    for process in candidates:
        for path in _written(process):
            writers.setdefault(path, []).append(process)
    logs = {path: _LOG.fullmatch(path.name) for path in writers if path.parent == directory / "logs"}
    ranks = {int(number[1]): _first(writers[path]) for path, number in logs.items() if number}
    if ranks:
        return Crew(ranks[min(ranks)].parent(), ranks)
    if not (writing := writers.get(directory / "metrics.jsonl")):
        return Crew()
    alone = _first(writing)
    return Crew(None if "RANK" in alone.environ() else alone, {0: alone})


def _written(process: psutil.Process) -> list[Path]:
    """Files that a process has open for writing; none where it has gone or is another user's."""
    with suppress(psutil.Error, OSError):
        return [Path(file.path) for file in process.open_files() if getattr(file, "mode", "w") != "r"]
    return []


def _first(processes: list[psutil.Process]) -> psutil.Process:
    """The rank itself: what it has started may have inherited its files."""
    numbers = {process.pid for process in processes}
    return next((process for process in processes if _parent(process) not in numbers), processes[0])


def _parent(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.ppid())
    return 0


def send(process: psutil.Process, number: signal.Signals) -> None:
    """A signal to a process; nothing where it has gone."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


@contextmanager
def frozen(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Within the block none of ``processes`` runs."""
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


class Held:
    """A process that is stopped until ``release``; with a ``factor``, only for its part of every tenth of a second."""

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
        """Let it run on. Harmless where it has gone."""
        self._over.set()
        if self._thread:
            self._thread.join()
        send(self._process, signal.SIGCONT)
