"""Fork a process that has threads; retry if the child deadlocks before its first line.

A child inherits its parent's locks as they are, and none of the threads that would release them. Python before 3.11.8
takes such a lock in every child (github.com/python/cpython/issues/112275): if another thread started or ended at that
moment, the child waits for ever. It has done nothing by then, so that a second fork can replace it.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from contextlib import suppress

from tutti.launcher.held_signals import held_signals

_PATIENCE = 5.0
_ATTEMPTS = 5


def fork() -> int:
    """Fork this process like ``os.fork``, but kill and replace a child that does not start to run within five seconds.

    Such a child has inherited a lock that another thread held; up to five children are tried. A signal that arrives
    meanwhile is handled after the fork: Python drops what a handler raises in a function of ``os.register_at_fork``.

    Returns:
        0 in the child; the child's process id in the parent.

    Raises:
        OSError: no process can be made, or none of the children runs.
    """
    for _ in range(_ATTEMPTS):
        with _Line() as line:
            pid = _fork_undisturbed()
            if pid == 0:
                line.say()
                return 0
            if line.hears(_PATIENCE):
                return pid
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    raise OSError(errno.EAGAIN, f"of {_ATTEMPTS} forked processes, none started within {_PATIENCE:g} s")


def _fork_undisturbed() -> int:
    # Other threads take a signal that this one blocks, but handlers run here.
    with held_signals(signal.valid_signals()) as came:
        pid = os.fork()
        if pid == 0:
            came.clear()
    return pid


class _Line:
    """A pipe on which a child reports that it runs."""

    def __init__(self) -> None:
        self._hear, self._say = os.pipe()

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._hear)
        os.close(self._say)

    def say(self) -> None:
        os.write(self._say, b".")

    def hears(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._hear, select.POLLIN)
        return bool(poll.poll(int(1000 * seconds)))
