"""A ``tutti train`` command line as processes: started as it is, continued, and repeated without interruption."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]

from tutti.chaos.processes import crew
from tutti.errors import TuttiError
from tutti.training.config import TrainConfig
from tutti.training.records import config_toml, read_summary

GRACE = 30.0


@dataclass(frozen=True)
class Command:
    """What is started.

    Attributes:
        words: ``train …`` as the user has written it.
        task: what it trains.
        config: what its words, files and environment come to.
        directory: its run directory; told to it through ``TUTTI_OUT`` where its words name none.
    """

    words: tuple[str, ...]
    task: str
    config: TrainConfig
    directory: Path

    @property
    def devices(self) -> int:
        """Processes of the run."""
        return int(self.config.devices)

    def every(self) -> int | None:
        """Steps between checkpoints, where that is known without the data."""
        every = self.config.every("checkpoint_every")
        return int(every.value) if every is not None and every.unit == "st" else None

    def total(self) -> int | None:
        """Steps of the whole run, where that is known without the data."""
        length = self.config.length()
        return int(length.value) if length.unit == "st" else None


class Started:
    """A run that this process has started, and starts again with ``resume``. Use in a ``with`` block.

    Args:
        command: what to run.
        output: where all that it prints goes.
    """

    def __init__(self, command: Command, output: IO[str]) -> None:
        self.command, self.directory, self._output = command, command.directory, output
        self.devices = command.devices
        self._process = _popen(command.words, output, os.environ | {"TUTTI_OUT": str(command.directory)})
        self.launcher: psutil.Process | None = psutil.Process(self._process.pid)

    def code(self) -> int | None:
        """Its exit code (negative: the signal that ended it); None while it runs."""
        return self._process.poll()

    def resume(self, devices: int | None = None) -> None:
        """Go on, on as many ``devices`` as before or on others, as ``tutti train --resume DIR`` does."""
        self.devices = devices or self.devices
        words = ("train", "--resume", str(self.directory), "--devices", str(self.devices))
        self._process = _popen(words, self._output, _without_settings())
        self.launcher = psutil.Process(self._process.pid)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        """End it if it still runs: in order if it can be, and its ranks with it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Running:
    """A run that somebody else has started, in ``directory``; it is left to itself afterwards."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        found = crew(directory)
        self.launcher = found.launcher
        self.devices = len(found.ranks)
        self._members = [found.launcher, *found.ranks.values()] if found.launcher else list(found.ranks.values())

    def code(self) -> int | None:
        """The exit code that it left in its summary (``KILLED`` where it could not); None while it runs."""
        main = self._members[0]
        if main.is_running() and main.status() != psutil.STATUS_ZOMBIE:
            return None
        code = read_summary(self.directory).get("exit_code")
        return code if isinstance(code, int) else -signal.SIGKILL

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave it as it is."""


def reference(command: Command, directory: Path, output: IO[str]) -> None:
    """Make the same run without any fault in ``directory``; without checkpoints, which change nothing.

    Raises TuttiError where even that fails.
    """
    plain = dataclasses.replace(
        command.config, out=None, resume=None, overwrite=False, checkpoint_every="none", max_restarts=0
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(config_toml(plain, command.task), encoding="utf-8")
        process = _popen(("train", "--config", str(file), "--out", str(directory)), output, _without_settings())
        try:
            code = process.wait()
        finally:
            process.kill()
    if code:
        raise TuttiError(f"the run fails without any fault, with exit code {code}", remedy="mend that first")


def _popen(words: Sequence[str], output: IO[str], environ: Mapping[str, str]) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "tutti", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)


def _without_settings() -> dict[str, str]:
    """The environment without ``TUTTI_*``: those settings are in the configuration file, with others that must win."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TUTTI_")}
