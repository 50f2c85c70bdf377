"""The actor that holds one rank's process on a Ray node, by its standard input. No torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from tutti.device import VISIBLE_DEVICES
from tutti.errors import UsageError
from tutti.launcher.stdin_control import TETHER, TETHER_KILL

_LEASE = 30.0
_HEAD = 15.0
_CHUNK = 1 << 16
# More than this is not kept for a launcher that does not ask: the rank's output blocks until it does.
_MOST = 16 << 20


def head_answers() -> bool:
    """Return whether the head of this process's Ray cluster answers; blocks until the answer, for at most 15 seconds.

    To be called in a process that Ray has connected to a cluster, such as an actor.
    """
    import ray

    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(ray.nodes()), daemon=True)
    thread.start()
    thread.join(_HEAD)
    return bool(answers)


class RankSupervisor:
    """Ray actor that starts the process of one rank, and passes the process's output and exit code to the launcher.

    The process ends with this actor, because its standard input does. Ray ends the actor when the launcher is gone. A
    launcher that only sleeps, such as one stopped by Ctrl-Z, leaves the process alone. Where the cluster's head is lost
    too, Ray ends no actor: the process is then killed after ``lease`` seconds in which the launcher called no method.

    Args:
        lease: seconds without a call of a method after which ``covered`` is asked, and the process killed if the
            answer is False.
        covered: called when the launcher has been silent for ``lease`` seconds; returns whether Ray would end this
            actor if the launcher were gone.
    """

    def __init__(self, lease: float = _LEASE, covered: Callable[[], bool] = head_answers) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: tuple[list[bytes], list[bytes]] = ([], [])
        self._readers: list[threading.Thread] = []
        self._room = threading.Condition()
        self._lease, self._covered, self._heard = lease, covered, time.monotonic()

    def visible(self) -> dict[str, str]:
        """Return the environment variables by which Ray limits this actor, which starts one rank, to some accelerators.

        Returns:
            Name, such as ``CUDA_VISIBLE_DEVICES``, → value; empty where Ray has set none.
        """
        return {name: os.environ[name] for name in VISIBLE_DEVICES if os.environ.get(name)}

    def free_port(self) -> int:
        """Return a TCP port that is free on this actor's node at the moment; it is not reserved."""
        with socket.socket() as free:
            free.bind(("", 0))
            return int(free.getsockname()[1])

    def start(self, words: Sequence[str], environment: Mapping[str, str], folder: str | None) -> None:
        """Start the rank's process with this node's Python interpreter, and return at once. To be called once.

        Args:
            words: arguments of the interpreter.
            environment: environment variables of the process, which override this actor's own.
            folder: working directory; None for this actor's.

        Raises:
            UsageError: this node has no such folder.
        """
        self._heard = time.monotonic()
        if folder is not None and not os.path.isdir(folder):
            raise UsageError(
                "a node of the Ray cluster has no such working directory",
                where=f"{folder} on {socket.gethostname()}",
                remedy="mount it at the same path on every node, or leave code=shared out, so that Ray uploads it",
            )
        self._process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, TETHER: TETHER_KILL},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Not a session: Linux yields the processor to other processes of a session alone (autogroups).
            process_group=0,
        )
        for pipe, held in zip((self._process.stdout, self._process.stderr), self._held, strict=True):
            if pipe is not None:
                reader = threading.Thread(target=self._read, args=(pipe, held), daemon=True)
                reader.start()
                self._readers.append(reader)
        for work in (self._await_end, self._expire):
            threading.Thread(target=work, daemon=True).start()

    def poll(self, seconds: float = 0.0) -> tuple[int | None, bytes, bytes]:
        """Return the exit code and the new output of this actor's rank process; wait for either at most ``seconds``.

        To be called regularly: the process blocks in its output once 16 MiB of it have not been fetched. Once the
        process has ended, this method kills what is left of its process group, which may hold the output open.

        Args:
            seconds: longest time to wait for output or for the end of the process.

        Returns:
            Exit code (negative: number of the signal that ended the process; None while the process runs or before
            ``start``), and the bytes that the process has written to standard output and to standard error since the
            last call.
        """
        self._heard = time.monotonic()
        with self._room:
            self._room.wait_for(lambda: any(self._held) or self._has_ended(), seconds)
        code = None if self._process is None else self._process.poll()
        if code is not None:
            # Child processes of the rank may hold its output open.
            self._kill_group()
            for reader in self._readers:
                reader.join(1)
        with self._room:
            out, err = (b"".join(held) for held in self._held)
            for held in self._held:
                held.clear()
            self._room.notify_all()
        return code, out, err

    def signal(self, number: int) -> None:
        """Send a signal to the rank's process; do nothing if it has not been started or has ended.

        Args:
            number: number of the signal. SIGKILL goes to the whole process group, and the call blocks until the process
                has ended.
        """
        self._heard = time.monotonic()
        if self._process is None:
            return
        if number == signal.SIGKILL:
            self._kill_group()
            self._process.wait()
        elif self._process.poll() is None and self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(f"{number}\n".encode())
                self._process.stdin.flush()

    def _read(self, pipe: IO[bytes], held: list[bytes]) -> None:
        while chunk := os.read(pipe.fileno(), _CHUNK):
            with self._room:
                self._room.wait_for(lambda: sum(map(len, held)) < _MOST)
                held.append(chunk)
                self._room.notify_all()

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _await_end(self) -> None:
        """Wake the thread that waits in ``poll`` when the process has ended."""
        if self._process is not None:
            self._process.wait()
            with self._room:
                self._room.notify_all()

    def _expire(self) -> None:
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() - self._heard > self._lease:
                if self._covered():
                    self._heard = time.monotonic()
                else:
                    self._kill_group()
            time.sleep(min(5.0, self._lease / 4))

    def _kill_group(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
