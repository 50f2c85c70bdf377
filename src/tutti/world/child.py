"""A worker's first and last moments: it dies with its launcher, logs to its own file, says why it failed."""

from __future__ import annotations

import atexit
import ctypes
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

from tutti.errors import DiskError, ExitCode, TuttiError
from tutti.world import failure

_PR_SET_PDEATHSIG = 1
# Outermost frames in these files are ours or Python's, and say nothing about a user's error.
_HIDDEN = frozenset({__file__, str(Path(__file__).with_name("launch.py")), "<frozen runpy>"})

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
    """

    entry: Callable[..., None]
    args: tuple[Any, ...]
    logs: Path
    store: Path
    launcher: int
    threads: int | None


def log_path(logs: Path, rank: int) -> Path:
    """A rank's log."""
    return logs / f"rank{rank}.log"


def die_with_parent(_worker: int = 0, parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends.

    Usable as a ``DataLoader``'s ``worker_init_fn``. Where the kernel cannot (not Linux), a thread looks every second.

    Args:
        parent: the starter's process id, where known: if it is gone already, this process ends at once.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(ExitCode.PEER)


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
    _redirect(log_path(job.logs, rank), keep_terminal=rank == 0)
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
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for process in multiprocessing.active_children():
        if process.daemon:
            process.terminate()
        process.join()


def _failed(job: Job, rank: int, exception: BaseException) -> int:
    """Record the exception and return the exit code."""
    code = failure.exit_code(exception)
    if code == ExitCode.DONE:
        with suppress(Exception):
            _finish()
        return code
    found = failure.record(job.logs, rank, exception, _HIDDEN)
    if not isinstance(exception, (TuttiError, KeyboardInterrupt, SystemExit)):
        with suppress(OSError), log_path(job.logs, rank).open("a", encoding="utf-8") as log:
            _flush()
            log.write(found.traceback)
    return code


def _leave(code: int) -> NoReturn:
    """End now: the exit handlers of a broken process group may wait for peers that are gone."""
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(ExitCode.PEER)
