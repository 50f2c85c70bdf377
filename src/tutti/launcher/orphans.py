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
    """Let the kernel kill this process when its parent ends, by any cause.

    Usable as a ``DataLoader``'s ``worker_init_fn``. On systems other than Linux a thread polls the parent every second.

    Args:
        parent: the parent's process id, if known: if the parent is gone already, this process ends at once.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(ExitCode.PEER)


def adopt_orphans(adopt: bool) -> None:
    """Make orphaned descendants of this process its children, to be reaped, or stop doing so. Linux only."""
    if sys.platform == "linux":
        prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def await_end(which: int, seconds: float) -> None:
    """Reap a child, or with ``-group`` all children and adopted orphans of a process group, for at most ``seconds``."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if os.waitpid(which, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
    except ChildProcessError:
        return


def prctl(option: int, value: int) -> None:
    """Call Linux's ``prctl(2)``. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(ExitCode.PEER)
