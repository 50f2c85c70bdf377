"""Fresh processes for tests without importing torch each time: one process has imported it, and forks at each request.

What is started is a process as any other: its own session, environment, folder and standard streams, real signals. Only
its imports were made before. Tests of other launchers and of imports start a new Python each time. Commands that are to
end before torch is imported fork from a second process, which has imported the command line alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.preloaded import MODULES

_SERVER = Path(__file__).with_name("forkserver_main.py")
_CLEARED = ("OMP_NUM_THREADS", "TUTTI_LOG_RANKS")
# What the scripts of the pages import: half a second of each of their ranks.
_OF_EXAMPLES = ("sklearn.datasets", "torch.distributed.checkpoint.state_dict")


class _Server:
    """The process that forks, of this process; it ends when this one does."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.owner = os.getpid()
        self.control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {name: value for name, value in os.environ.items() if name not in _CLEARED}
        source = Path(__file__).parents[1] / "src"
        subprocess.Popen(
            [sys.executable, str(_SERVER), str(there.fileno()), *modules],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[there.fileno()],
            env=environ | {"PYTHONPATH": str(source)}, start_new_session=True,
        )  # fmt: skip
        there.close()


_servers: dict[bool, _Server] = {}


def _server(torch: bool) -> _Server:
    """The server that has torch, or the one that has the command line alone."""
    if torch not in _servers or _servers[torch].owner != os.getpid():
        _servers[torch] = _Server([*MODULES, *_OF_EXAMPLES] if torch else ["tutti.cli.app"])
    return _servers[torch]


class Process:
    """``python words…`` in ``folder``, in a session of its own.

    Args:
        words: ``-m module …`` or ``script …``.
        folder: where it runs.
        environ: all of its environment.
        network: the name of the network namespace it is in; None for this process's own.
        torch: whether torch was imported before.
        piped: whether its standard input is a pipe; else it is empty.

    Attributes:
        pid: of the process, whose parent is the server.
        returncode: None until ``poll`` or ``wait`` has seen its end.
        stdin: the other end of its standard input; None where that is empty.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        network: str | None = None,
        torch: bool = True,
        piped: bool = False,
    ) -> None:
        pipes = [os.pipe() for _ in range(3)]
        given, other = os.pipe() if piped else (os.open(os.devnull, os.O_RDONLY), None)
        self.stdin = None if other is None else os.fdopen(other, "wb")
        request = {"words": list(words), "folder": str(folder), "environ": dict(environ), "network": network}
        theirs = [given, *(write for _, write in pipes)]
        socket.send_fds(_server(torch).control, [json.dumps(request).encode()], theirs)
        self._out, self._err, self._status = (read for read, _ in pipes)
        self._said, self._open = {self._out: b"", self._err: b""}, [self._out, self._err]
        for stream in theirs:
            os.close(stream)
        self.pid = int(self._line())
        self.returncode: int | None = None

    def _line(self) -> bytes:
        """The next line of the status pipe."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._status, 1)
            if not byte:
                raise EOFError(f"the process that forks for tests has ended; see {_SERVER.name}")
            line += byte
        return line

    def poll(self) -> int | None:
        """Its exit code once it has ended, minus the signal's number where one ended it."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._line())
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it and its descendants wrote, once none of them holds a stream. Raises subprocess.TimeoutExpired."""
        while self._open:
            ready = select.select(self._open, [], [], timeout)[0]
            if not ready:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            for stream in ready:
                part = os.read(stream, 1 << 16)
                self._said[stream] += part
                if not part:
                    self._open.remove(stream)
                    os.close(stream)
        self.wait(timeout)
        return self._said[self._out].decode(), self._said[self._err].decode()

    def line(self) -> str:
        """What it has written to its standard output up to the end of the first line."""
        while b"\n" not in self._said[self._out]:
            part = os.read(self._out, 1 << 16)
            if not part:
                break
            self._said[self._out] += part
        return self._said[self._out].decode().partition("\n")[0]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)


def run(
    words: Sequence[str], folder: Path, environ: Mapping[str, str], timeout: float, torch: bool = True
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` of ``python words…``; it is killed, and TimeoutExpired raised, where it takes longer."""
    process = Process(words, folder, environ, torch=torch)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(words), process.wait(), out, err)
