"""Run a check in a process of its own, so that a crash or hang does not affect the caller."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from tutti.errors import TuttiError

T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """Result of a child process that has ended.

    Attributes:
        code: exit code; -N if signal N killed the process.
        out: text that the process wrote to standard output.
        err: text that the process wrote to standard error.
    """

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """One line on why the child process failed, for messages.

        The last line of the process's standard error that is not blank; without any, its exit code or signal in words.
        """
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        if lines:
            return lines[-1]
        return f"ended by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"


def run_isolated(command: Sequence[str], timeout: float, environ: Mapping[str, str] | None = None) -> Ended:
    """Run a command as a child process with empty input, and wait for it.

    A crash or hang of the command does not affect this process.

    Args:
        command: program and arguments.
        timeout: seconds until the child process is killed.
        environ: environment variables of the child process; None: those of this process.

    Returns:
        An ``Ended``: ``code`` (exit code, -N if signal N killed the process), ``out`` and ``err`` (texts of standard
        output and standard error).

    Raises:
        subprocess.TimeoutExpired: the command ran longer than ``timeout``.
        OSError: the program cannot be started.
    """
    # Files, not pipes: a grandchild that outlives the process would keep a pipe open, and this function waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ)
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            # A process that hangs inside a driver survives even SIGKILL.
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(code, *texts)


def run_module(
    module: str, arguments: Sequence[str], timeout: float, environ: Mapping[str, str] | None = None
) -> Ended:
    """Run a module of tutti as ``python -m`` would, in a child process, and wait for it.

    The child has this process's import path.

    Args:
        module: dotted name of the module.
        arguments: command-line arguments.
        timeout: seconds until the child process is killed.
        environ: environment variables of the child process; None: those of this process. ``PYTHONPATH`` is replaced.

    Returns:
        An ``Ended``: ``code`` (exit code, -N if signal N killed the process), ``out`` and ``err`` (texts of standard
        output and standard error).

    Raises:
        subprocess.TimeoutExpired: the module ran longer than ``timeout``.
        OSError: the Python interpreter cannot be started.
    """
    # -P: do not import a torch.py from the current directory.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    command = [sys.executable, "-P", "-m", module, *arguments]
    return run_isolated(command, timeout, {**(os.environ if environ is None else environ), "PYTHONPATH": path})


def call_forked(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function(*arguments)`` in a forked child process, wait, and return its result or raise its exception.

    A process that has run a backward on a machine with an accelerator must not fork any more, because autograd has
    started a thread for each device. A launcher that needs a backward therefore runs the backward by this function.

    Args:
        function: the function; its result or exception is pickled.
        arguments: arguments of the function, which need no pickling, because the child is a copy of this process.

    Raises:
        TuttiError: the child process ended without an answer, for example because it was killed, or its answer cannot
            be pickled or loaded here, such as an exception whose class only the child process has imported.
        Exception: the exception that ``function`` raised, with the child's traceback as a note.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_answer, args=(there, function, arguments), daemon=True
    )
    process.start()
    there.close()
    try:
        packed, where, why = here.recv()
    except EOFError:
        process.join()
        ended = Ended(process.exitcode or 0, "", "")
        raise TuttiError(
            f"a process that tutti had forked to run {function.__name__} ended without an answer",
            why=ended.complaint,
            remedy="look at its messages above; if it was killed, free memory of this machine",
        ) from None
    process.join()
    try:
        result, error = pickle.loads(packed)
    except Exception as lost:
        raise TuttiError(
            f"a process that tutti had forked to run {function.__name__} failed", where=where, why=why
        ) from lost
    if error is not None:
        raise error
    answer: T = result
    return answer


def _answer(pipe: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Send the pickled result and exception, and in plain words where and why the function failed."""
    where, why = None, ""
    try:
        answer: tuple[Any, Exception | None] = function(*arguments), None
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where, why = f"{last.filename}:{last.lineno}", f"{type(error).__name__}: {error}"
        error.add_note(traceback.format_exc())
        answer = None, error
    try:
        packed = bytes(ForkingPickler.dumps(answer))
    except Exception as error:
        packed, why = b"", why or f"its result cannot be sent: {error}"
    pipe.send((packed, where, why))
