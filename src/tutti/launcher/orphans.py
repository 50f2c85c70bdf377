"""Tie a process to its parent: die with it, adopt and reap orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from tutti.errors import ExitCode

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(_worker: int = 0, parent: int | None = None) -> None:
    """Make the kernel kill this process by SIGKILL as soon as its parent process ends, for any reason.

    On Linux the end of the thread that forked this process counts as the parent's end. On other systems a thread polls
    the parent every second, and ends this process. Usable as a ``DataLoader``'s ``worker_init_fn``.

    Args:
        _worker: unused; ``DataLoader`` passes the number of the worker.
        parent: process id of the parent, if known: if another process is the parent by now, because the parent has
            ended, this process ends at once with ``ExitCode.PEER``. None: the parent at the time of the call.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(ExitCode.PEER)


def adopt_orphans(adopt: bool) -> None:
    """Make this process the parent of its descendants whose own parents end, or stop doing so; no effect but on Linux.

    Args:
        adopt: True to begin, False to end. Adopted processes must be reaped, as by ``await_end``.
    """
    if sys.platform == "linux":
        prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def await_end(which: int, seconds: float) -> None:
    """Wait until child processes have ended, and reap them, for at most ``seconds``; at the limit return silently.

    Args:
        which: process id of a child; or the negative id of a process group, for all its members that are children of
            this process, adopted orphans included.
        seconds: longest wait.
    """
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if os.waitpid(which, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
    except ChildProcessError:
        return


def prctl(option: int, value: int) -> None:
    """Call Linux's ``prctl(2)`` with two arguments.

    Args:
        option: number of the operation, such as PR_SET_PDEATHSIG.
        value: second argument of the call, such as the number of a signal for PR_SET_PDEATHSIG.

    Raises:
        OSError: the call fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(ExitCode.PEER)
