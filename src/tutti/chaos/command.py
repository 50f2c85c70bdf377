"""Start a ``tutti train`` command line as a process, resume it, and repeat it without faults."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]

from tutti.chaos.processes import find_processes
from tutti.config.train_config import TrainConfig
from tutti.config.variables import without_settings
from tutti.errors import TuttiError
from tutti.metrics.records import config_toml, read_summary

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL for a run that does not end; a guess."""


@dataclass(frozen=True)
class Command:
    """A ``tutti train`` command line and its resolved configuration.

    Attributes:
        words: the command line, ``train …``, as the user wrote it.
        task: name of the task.
        config: configuration resolved from flags, files and environment.
        directory: run directory; passed to the process in ``TUTTI_OUT``.
    """

    words: tuple[str, ...]
    task: str
    config: TrainConfig
    directory: Path

    @property
    def devices(self) -> int:
        """Number of processes that this ``tutti train`` command line starts, one for each device."""
        return int(self.config.devices)

    def every(self) -> int | None:
        """Return the number of training steps between checkpoints of the run that a ``tutti train`` command starts.

        None if the checkpoint interval is not given in steps (epochs, for example), so that it depends on the data, or
        if there is no interval.
        """
        every = self.config.checkpoint_interval
        return int(every.value) if every is not None and every.unit == "st" else None

    def total(self) -> int | None:
        """Return the number of training steps of the whole run that a ``tutti train`` command starts.

        None if the length of the run is not given in steps (but in epochs, for example) and so depends on the data.
        """
        length = self.config.length
        return int(length.value) if length.unit == "st" else None


class Started:
    """A training run that this process starts, and starts again with ``resume``. Use in a ``with`` block.

    The constructor starts the run's process and does not wait; the end of the ``with`` block ends a run that goes on.

    Args:
        command: the ``tutti train`` command line to run.
        output: file for the run's standard output and standard error.

    Attributes:
        command, directory: the command line and its run directory.
        devices: number of the run's processes, one for each device, in the latest start.
        launcher: the process that was started.
    """

    def __init__(self, command: Command, output: IO[str]) -> None:
        self.command, self.directory, self._output = command, command.directory, output
        self.devices = command.devices
        self._process = _popen(command.words, output, os.environ | {"TUTTI_OUT": str(command.directory)})
        self.launcher: psutil.Process | None = psutil.Process(self._process.pid)

    def code(self) -> int | None:
        """Return the exit code of the training run's process without waiting; None while it runs.

        A negative code -N means that signal N ended the process, as in ``subprocess``.
        """
        return self._process.poll()

    def resume(self, devices: int | None = None) -> None:
        """Start the run again from its newest checkpoint, as ``tutti train --resume DIR`` does. Does not block.

        The process that ran before must have ended.

        Args:
            devices: number of devices of the resumed run; None: as many as before.
        """
        self.devices = devices or self.devices
        words = ("train", "--resume", str(self.directory), "--devices", str(self.devices))
        self._process = _popen(words, self._output, without_settings(os.environ))
        self.launcher = psutil.Process(self._process.pid)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        """Send SIGTERM to a run that has not ended; SIGKILL if it is still running after ``GRACE`` seconds."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Running:
    """A training run that another process has started, found by its run directory.

    The constructor searches the processes of this machine. Where it finds none, ``devices`` is 0, and ``code`` must not
    be called. The end of a ``with`` block does not end the run.

    Args:
        directory: the run directory, on this machine.

    Attributes:
        directory: the run directory.
        devices: number of ranks that were found.
        launcher: parent process of the ranks; for a run of a single process that process itself. None if no process
            was found, or if another launcher, such as torchrun, has started the single process.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        found = find_processes(directory)
        self.launcher = found.launcher
        self.devices = len(found.ranks)
        self._members = [found.launcher, *found.ranks.values()] if found.launcher else list(found.ranks.values())

    def code(self) -> int | None:
        """Return the exit code that a run of another process has written to its summary; None while the run goes on.

        A run that ended without an exit code in its summary counts as killed: ``-SIGKILL``. The run goes on while the
        process ``launcher`` exists; where ``launcher`` is None, while the first rank that was found exists. Does not
        wait. Not to be called where the constructor has found no process of the run (``devices`` is 0).
        """
        main = self._members[0]
        with suppress(psutil.NoSuchProcess):
            if main.is_running() and main.status() != psutil.STATUS_ZOMBIE:
                return None
        code = read_summary(self.directory).get("exit_code")
        return code if isinstance(code, int) else -signal.SIGKILL

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the run as it is."""


def reference(command: Command, directory: Path, output: IO[str]) -> None:
    """Run a training command once more in ``directory``, without faults, to get the weights of an uninterrupted run.

    Blocks until the run has ended. The run writes no checkpoints, on which its weights do not depend.

    Args:
        command: the command line to repeat.
        directory: run directory of the repetition.
        output: file for the run's standard output and standard error.

    Raises:
        TuttiError: the run ends with an exit code other than 0.
    """
    plain = dataclasses.replace(
        command.config,
        out=None,
        resume=None,
        overwrite=False,
        checkpoint_every="none",
        max_restarts=0,
        wait=TrainConfig.wait,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(config_toml(plain, command.task), encoding="utf-8")
        process = _popen(
            ("train", "--config", str(file), "--out", str(directory)), output, without_settings(os.environ)
        )
        try:
            code = process.wait()
        finally:
            process.kill()
    if code:
        raise TuttiError(f"the run fails without any fault, with exit code {code}", remedy="fix the command first")


def _popen(words: Sequence[str], output: IO[str], environ: Mapping[str, str]) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "tutti", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
