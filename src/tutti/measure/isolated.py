"""Running a check in a process of its own: what crashes or hangs there cannot take the caller with it."""

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
    """How a process ended: its exit code (negative: a signal's number) and what it said."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """Last words on standard error, or how it ended where it said nothing."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        if lines:
            return lines[-1]
        return f"ended by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"


def run(command: Sequence[str], timeout: float, environ: Mapping[str, str] | None = None) -> Ended:
    """Run ``command`` with no input.

    Args:
        command: program and arguments.
        timeout: seconds until it is killed.
        environ: its environment; this process's own where none is given.

    Raises subprocess.TimeoutExpired, and OSError where the program cannot be started.
    """
    # Files, not pipes: a process that outlives its parent would keep a pipe open, and us waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ)
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            # A process that hangs inside a driver does not end even then.
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
    """Run a module of ours as ``python -m`` would, with the import path of this process. Raises as ``run``."""
    # -P: a torch.py that happens to lie in the current directory is not torch.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    command = [sys.executable, "-P", "-m", module, *arguments]
    return run(command, timeout, {**(os.environ if environ is None else environ), "PYTHONPATH": path})
