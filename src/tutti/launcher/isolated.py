"""Run a check in a process of its own, so that a crash or hang does not affect the caller."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """Result of a process: exit code (negative: a signal's number), standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """Last line of standard error, or how the process ended if that is empty."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        if lines:
            return lines[-1]
        return f"ended by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"


def run_isolated(command: Sequence[str], timeout: float, environ: Mapping[str, str] | None = None) -> Ended:
    """Run ``command`` without input and return its result.

    Args:
        command: program and arguments.
        timeout: seconds until it is killed.
        environ: its environment; default: this process's.

    Raises:
        subprocess.TimeoutExpired: it ran longer than ``timeout``.
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
    """Run a module of tutti as ``python -m`` would, with this process's import path. Raises as ``run_isolated``.

    Args:
        module: its dotted name.
        arguments: command-line arguments.
        timeout: seconds until it is killed.
        environ: its environment; default: this process's.
    """
    # -P: do not import a torch.py from the current directory.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    command = [sys.executable, "-P", "-m", module, *arguments]
    return run_isolated(command, timeout, {**(os.environ if environ is None else environ), "PYTHONPATH": path})
