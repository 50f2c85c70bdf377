"""A worker's first and last moments: it dies with its launcher, logs to its own file, says why it failed."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tutti.errors import DiskError, ExitCode, NotEnoughMemory, TuttiError
from tutti.world import failure, heartbeat, watchdog
from tutti.world.orphans import die_with_parent
from tutti.world.watchdog import Limits

# Outermost frames in these files are ours or Python's, and say nothing about a user's error.
_HIDDEN = frozenset({__file__, str(Path(__file__).with_name("launch.py")), "<frozen runpy>"})

_LET_GO = 0.05
_last: list[Callable[[], object]] = []

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""What the launcher forwards to its workers. Blocked while workers start, so that none is lost or misread."""


@dataclass(frozen=True)
class Job:
    """What every worker of a launch is told.

    Attributes:
        entry: called with ``args`` in every worker.
        args: its arguments.
        logs: directory of ``rank{N}.log`` and ``failure-rank{N}.json``.
        store: private directory for the workers' file store.
        launcher: process id of the launcher.
        threads: CPU threads a process; None where the user has chosen in the environment.
        limits: how long a worker may show no progress.
    """

    entry: Callable[..., None]
    args: tuple[Any, ...]
    logs: Path
    store: Path
    launcher: int
    threads: int | None
    limits: Limits

    @property
    def notes(self) -> tuple[Path, Path]:
        """Where failures are recorded: with the logs, or on what is mostly another disk where theirs is full."""
        return self.logs, self.store


def at_last(function: Callable[[], object]) -> None:
    """Have a worker that ends well call ``function`` when all exit handlers have run."""
    _last.append(function)


def main(job: Job) -> NoReturn:
    """Run the job's entry in this forked process; never returns, but leaves with the exit code of what happened."""
    rank = int(os.environ["RANK"])
    try:
        _prepare(job, rank)
        job.entry(*job.args)
        _finish()
    except BaseException as exception:
        _leave(_failed(job, rank, exception))
    _leave(ExitCode.DONE)


def _prepare(job: Job, rank: int) -> None:
    die_with_parent(parent=job.launcher)
    # A group of its own: the terminal's Ctrl-C reaches the launcher alone, which passes it on exactly once,
    # and whatever this worker starts can be ended together with it.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # Exit handlers so far are the launcher's, such as the removal of its temporary directories.
    atexit._clear()
    _redirect(failure.log_path(job.logs, rank), keep_terminal=rank == 0)
    heartbeat.process.report_to(job.logs)
    watchdog.start(rank, job.limits, launched=True)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.environ["TUTTI_STORE"] = str(job.store / f"attempt-{attempt}")
    if job.threads is not None:
        import torch

        torch.set_num_threads(job.threads)
    # Last, so that a signal that came meanwhile finds everything in place.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _redirect(log: Path, keep_terminal: bool) -> None:
    """Append standard output and error to ``log``; crashes of native code leave their stack there on every rank."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise DiskError(f"cannot write the log {log}", why=error.strerror) from error
    faulthandler.enable(file=file)
    if not keep_terminal:
        os.dup2(file, 1)
        os.dup2(file, 2)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, so that the log of a killed process ends where the process did.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _finish() -> None:
    """What Python does at the end of a program, in its order."""
    # Ends the threads of executors that nobody shut down, and joins all others.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for process in multiprocessing.active_children():
        if process.daemon:
            process.terminate()
        process.join()
    for function in _last:
        function()


def _failed(job: Job, rank: int, exception: BaseException) -> int:
    """Record the exception and return the exit code."""
    code = failure.exit_code(exception)
    if code == ExitCode.DONE:
        # It holds the script's frames, and with them all that ends with the script.
        exception.__traceback__ = None
        with suppress(Exception):
            _finish()
        return code
    found = failure.record(job.notes, rank, exception, _HIDDEN)
    foreseen = isinstance(exception, (TuttiError, KeyboardInterrupt, SystemExit))
    if not foreseen or isinstance(exception, NotEnoughMemory):
        with suppress(OSError), failure.log_path(job.logs, rank).open("a", encoding="utf-8") as log:
            _flush()
            log.write(found.traceback)
    return code


def _leave(code: int) -> NoReturn:
    """End now: the exit handlers of a broken process group may wait for peers that are gone."""
    _flush()
    watchdog.stop()
    os._exit(code)


def let_go() -> None:
    """Sleep, so that Gloo's threads get Python's lock, which they need to free the tensors of their last messages.

    They do so after they have said that they are done. A program that ends before is aborted, and one that frees a
    group meanwhile waits, with the lock, for these threads (pytorch/pytorch#75097).
    """
    time.sleep(_LET_GO)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
