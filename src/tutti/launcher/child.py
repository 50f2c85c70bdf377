"""Start and end of a forked rank: it dies with its launcher, logs to its own file, and records its failure."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tutti.config.watchdog_limits import WatchdogLimits
from tutti.errors import DiskError, ExitCode, NotEnoughMemory, TuttiError
from tutti.launcher import failure, heartbeat, watchdog
from tutti.launcher.encoding import replace_unencodable, write_utf8
from tutti.launcher.orphans import die_with_parent
from tutti.python_compat import forget_exit_handlers, join_threads, run_exit_handlers

# Source files of tutti and Python whose outermost frames are omitted from a user's traceback.
_HIDDEN = frozenset({__file__, str(Path(__file__).with_name("launch.py")), "<frozen runpy>"})

_DRAIN = 0.05
_last: list[Callable[[], object]] = []

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the launcher forwards to its ranks. Blocked while ranks start, so that none is lost or misread."""


def forwarded_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that this launcher forwards to its ranks: those that stop a run, such as SIGTERM and SIGINT.

    SIGHUP is missing where this process ignores it, as in a command that ``nohup`` has started: a forwarded SIGHUP
    would end the run together with its terminal, which ``nohup`` is to prevent.
    """
    hangup = signal.getsignal(signal.SIGHUP)
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or hangup is not signal.SIG_IGN)


@dataclass(frozen=True)
class Job:
    """Description of a launch, the same for every rank.

    Attributes:
        entry: function that every rank runs, called as ``entry(*args)``.
        args: positional arguments of ``entry``.
        logs: directory of the ranks' output and failure records, ``rank{N}.log`` and ``failure-rank{N}.json``.
        store: private directory for the ranks' file store.
        launcher: process id of the launcher.
        threads: number of PyTorch's intra-op CPU threads in each rank; None if the user has set ``OMP_NUM_THREADS``.
        limits: time limits of each rank's watchdog: how long the rank may make no progress.
        all_shown: whether the terminal shows the output of all ranks; False: that of rank 0 only.
    """

    entry: Callable[..., None]
    args: tuple[Any, ...]
    logs: Path
    store: Path
    launcher: int
    threads: int | None
    limits: WatchdogLimits
    all_shown: bool

    @property
    def notes(self) -> tuple[Path, Path]:
        """Two directories for the failure records of the launch's ranks: ``logs``, and if that fails ``store``.

        A failure record, ``failure-rankN.json``, says why the process of rank N ended. It is written to the first
        directory where this succeeds; the second is usually on another disk, for the case that the first disk is full.
        """
        return self.logs, self.store


def register_last(function: Callable[[], object]) -> None:
    """Register a function to be called at the end of this rank process, after all ``atexit`` handlers.

    Functions are called in the order of registration, without arguments, and their results are ignored. A rank that
    ends with an error does not call them.
    """
    _last.append(function)


def child_main(job: Job) -> NoReturn:
    """Run ``job.entry`` as a rank in this forked process, and exit the process; never returns.

    Appends output to the rank's log file (rank 0 keeps the terminal instead), starts the rank's watchdog, and writes an
    exception to the rank's failure record. The exit code is 0 if ``entry`` returns, else a member of
    ``tutti.errors.ExitCode`` for the kind of exception, or the code of a ``SystemExit``. The rank is read from the
    environment variable ``RANK``.

    Args:
        job: entry point and its arguments, folders and limits.
    """
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
    # A process group of its own: the terminal's Ctrl-C reaches the launcher alone, which passes it on exactly once,
    # and this rank's child processes can be killed together with it.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for number in forwarded_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # Exit handlers registered so far belong to the launcher, such as the removal of its temporary directories.
    forget_exit_handlers()
    _redirect(failure.log_path(job.logs, rank), keep_terminal=rank == 0, all_shown=job.all_shown)
    heartbeat.process.report_to(job.logs)
    watchdog.start_watchdog(rank, job.limits, launched=True)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.environ["TUTTI_STORE"] = str(job.store / f"attempt-{attempt}")
    if job.threads is not None:
        import torch

        torch.set_num_threads(job.threads)
    # Last, so that a pending signal is handled after the set-up.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _redirect(log: Path, keep_terminal: bool, all_shown: bool) -> None:
    """Append standard output and error to ``log``; crashes of native code leave their stack there on every rank."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise DiskError(f"cannot write the log {log}", why=error.strerror) from error
    faulthandler.enable(file=file)
    if not keep_terminal:
        os.dup2(file, 1)
        os.dup2(file, 2)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        # Line buffering, so that the log of a killed process is complete, and whole lines also under PYTHONUNBUFFERED,
        # which writes a line's end by itself: the agent that follows the log would show the halves as two lines. Rank 0
        # writes pieces of lines only where no other rank's line can come between them.
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            pieces = keep_terminal and not all_shown and stream.write_through
            stream.reconfigure(line_buffering=True, write_through=pieces)
        else:
            # A notebook's stream belongs to threads of the kernel, which are not in this process.
            setattr(sys, name, os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", closefd=False))
    change = replace_unencodable if keep_terminal else write_utf8
    change(sys.stdout, sys.stderr)


def _finish() -> None:
    """Do what Python does at interpreter exit, in its order, then call the functions of ``register_last``."""
    join_threads()
    run_exit_handlers()
    for process in multiprocessing.active_children():
        if process.daemon:
            process.terminate()
        process.join()
    for function in _last:
        function()


def _failed(job: Job, rank: int, exception: BaseException) -> int:
    """Record the exception and return the exit code."""
    code = failure.failure_exit_code(exception)
    if code == ExitCode.DONE:
        # The traceback holds the script's frames, and with them the script's objects.
        exception.__traceback__ = None
        with suppress(Exception):
            _finish()
        return code
    found = failure.record_failure(job.notes, rank, exception, _HIDDEN)
    foreseen = isinstance(exception, (TuttiError, KeyboardInterrupt, SystemExit))
    if not foreseen or isinstance(exception, NotEnoughMemory):
        with suppress(OSError), failure.log_path(job.logs, rank).open("a", encoding="utf-8") as log:
            _flush()
            log.write(found.traceback)
    return code


def _leave(code: int) -> NoReturn:
    """Exit at once: exit handlers of a broken process group may wait for peers that are gone."""
    _flush()
    watchdog.stop_watchdog()
    os._exit(code)


def drain_gloo() -> None:
    """Sleep 50 ms with the GIL released, so that Gloo's threads can free the tensors of their last messages.

    To be called before a process exits or frees a Gloo process group: these threads free the tensors after the work
    is reported as complete. A program that exits earlier is aborted, and a program that frees a process group
    meanwhile deadlocks, holding the GIL, on these threads (pytorch/pytorch#75097).
    """
    time.sleep(_DRAIN)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
