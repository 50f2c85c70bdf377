"""Processes of the parameter servers: a rank forks a supervising guard process, which forks and restarts servers.

Servers are forked, because only a fork passes on an optimizer that the user made without pickle. The guard has no
threads, so that it can fork safely at any time. Guard and servers end with the rank, however it ends, and leave no
names, files or ports behind. Servers of a run that the rank has dropped answer the last requests of other ranks first.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from tutti.launcher.forking import fork
from tutti.launcher.orphans import die_with_parent
from tutti.torch_compat import skip_graph_capture_checks

_POLL_MS = 50
_MOST_STARTS = 10
_ENDING = 5.0
RETIRE = signal.SIGTERM
"""Signal that asks a server process to end once no rank is connected; blocked until the server has a handler."""
_OPEN: weakref.WeakSet[ServerSupervisor] = weakref.WeakSet()


class ServerSupervisor:
    """Starts a rank's parameter servers as processes, and restarts those that are killed.

    The constructor forks a guard process without threads, which forks the servers, restarts them, and ends with the
    rank. The constructor does not wait for the servers.

    Args:
        serve: for each server the function that its process runs.
        keep: file descriptors that guard and servers inherit; the guard closes all others except the standard ones.
        restart: start a server again that was killed by a signal, at most 10 times in all. Otherwise, and where a
            server ends by itself, all servers are killed.

    Attributes:
        pids: process id of each server, by its index in ``serve``, as of the latest ``look``.
        failed: why the servers ended without being started again, as of the latest ``look``; empty while they run.
    """

    def __init__(self, serve: Sequence[Callable[[], None]], keep: Collection[int], restart: bool) -> None:
        hear, self._say = os.pipe()
        self._told, tell = os.pipe()
        os.set_blocking(self._told, False)
        parent = os.getpid()
        pid = fork()
        if pid == 0:
            _guard(parent, serve, hear, tell, keep, restart)
        os.close(hear)
        os.close(tell)
        self.pids: dict[int, int] = {}
        self.failed = ""
        self._rest = b""
        self._process = parent, pid, self._say, self._told
        self._collected = weakref.finalize(self, _retire, *self._process)
        # The interpreter's exit waits until all processes are gone: ``_end_all``.
        self._collected.atexit = False
        _OPEN.add(self)

    def close(self) -> None:
        """End this rank's parameter server processes at once, with the guard process that has forked them, and wait.

        After 5 s the guard is killed. Does nothing in a forked child, and when called again. If this supervisor object
        is garbage-collected instead, the servers end once no rank is connected to them any more, because other ranks
        may still wait for an answer.
        """
        if self._collected.detach() is not None:
            _end(*self._process)

    def look(self) -> None:
        """Update the attributes ``pids`` and ``failed`` of this rank's parameter servers. Does not block.

        ``pids`` has each server's process id by its index, ``failed`` the reason why the servers ended without being
        started again, or "". The call reads all messages that have arrived from the guard process, which starts and
        restarts the servers.
        """
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._told, 1 << 16):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "pid" in said:
                self.pids[said["server"]] = said["pid"]
            else:
                self.failed = said["failed"]


def _end(owner: int, pid: int, say: int, told: int) -> None:
    """Ask the guard to end the servers and wait for it; kill it after 5 s. Does nothing in a forked child."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        os.write(say, b"end")
    os.close(say)
    end = time.monotonic() + _ENDING
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
    os.close(told)


@atexit.register
def _end_all() -> None:
    for supervisor in list(_OPEN):
        supervisor.close()


def _retire(owner: int, pid: int, say: int, told: int) -> None:
    """Ask the guard to end each server once no rank is connected to it. Does not block; nothing in a forked child."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        os.write(say, b"retire")
    os.close(say)
    os.close(told)
    # The guard is a child of this process until it is waited for.
    threading.Thread(target=_wait_for, args=(pid,), daemon=True).start()


def _wait_for(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _guard(
    parent: int, serve: Sequence[Callable[[], None]], hear: int, tell: int, keep: Collection[int], restart: bool
) -> NoReturn:
    try:
        _alone(parent, {hear, tell, *keep})
        _watch(serve, hear, tell, restart)
    except BaseException:
        _complain(tell, traceback.format_exc())
    finally:
        os._exit(0)


def _alone(parent: int, keep: Collection[int]) -> None:
    """Detach the guard: end with ``parent``, ignore signals meant for the rank, close all descriptors but ``keep``."""
    die_with_parent(parent=parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Servers inherit this mask: a signal that comes before a server has its handler waits.
    signal.pthread_sigmask(signal.SIG_SETMASK, (RETIRE,))
    # No inherited object is ever finalized here: only the rank may.
    gc.freeze()
    low = 3
    for kept in sorted(keep):
        os.closerange(low, kept)
        low = kept + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else _highest() + 1)


def _highest() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def _watch(serve: Sequence[Callable[[], None]], hear: int, tell: int, restart: bool) -> None:
    running = {_start(number, serve[number], tell): number for number in range(len(serve))}
    starts = 0
    poll = select.poll()
    poll.register(hear, select.POLLIN | select.POLLHUP)
    try:
        while not poll.poll(_POLL_MS):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid not in running:
                continue
            number, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            starts += 1
            if code >= 0 or not restart or starts > _MOST_STARTS:
                said = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                _complain(tell, f"parameter server {number} {said}")
                break
            running[_start(number, serve[number], tell)] = number
        if os.read(hear, 64) == b"retire":
            for pid in running:
                os.kill(pid, RETIRE)
            while running:
                running.pop(os.waitpid(-1, 0)[0], None)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        for pid in running:
            os.waitpid(pid, 0)


def _start(number: int, serve: Callable[[], None], tell: int) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(parent=guard)
            signal.signal(RETIRE, signal.SIG_DFL)
            skip_graph_capture_checks()
            serve()
            code = 0
        except BaseException as error:
            traceback.print_exc()
            said = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
            _complain(tell, f"parameter server {number} failed: {said}")
        finally:
            sys.stderr.flush()
            os._exit(code)
    _tell(tell, {"server": number, "pid": pid})
    return pid


def _complain(tell: int, text: str) -> None:
    _tell(tell, {"failed": text})


def _tell(tell: int, said: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        os.write(tell, json.dumps(said).encode() + b"\n")
