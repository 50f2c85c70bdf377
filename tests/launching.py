"""Launching real jobs from tests, not from pytest's own process: it has threads and must not fork."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import socket
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.forkserver import Process

SOURCE = Path(__file__).parents[1] / "src"
SAFETY_NET = 200
# The kernel gives ports from 32768 on to the connections of any process, and tutti chooses ports below 30000.
_FIRST_PORT, _PORTS, _SHARES = 30_000, 2768, 16
_port_numbers = itertools.count(secrets.randbelow(_PORTS // _SHARES))

_MAIN = """
import os, signal, sys, time
from pathlib import Path
from tutti.launcher.launch import launch, run_script

HERE = Path({here!r})
RANK = lambda: int(os.environ["RANK"])

def ready():
    (HERE / f"ready-{{RANK()}}").touch()

{body}

if __name__ == "__main__":
    sys.exit(launch({entry}, {args!r}, processes={processes}, logs=HERE / "logs", **{options!r}))
"""


@dataclass(frozen=True)
class Result:
    """A finished launch."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Running:
    """A launch under way, in ``folder``."""

    launcher: Process
    folder: Path
    seen: list[psutil.Process] = field(default_factory=list)

    def workers(self) -> list[psutil.Process]:
        """The launcher's descendants now; remembered, so that they can be killed even when they are orphans."""
        with suppress(psutil.NoSuchProcess):
            self.seen.extend(psutil.Process(self.launcher.pid).children(recursive=True))
        return list(self.seen)

    def wait_ready(self, ranks: int) -> None:
        until(lambda: len(list(self.folder.glob("ready-*"))) == ranks or self.launcher.poll() is not None)

    def finish(self) -> Result:
        out, err = self.launcher.communicate(timeout=SAFETY_NET)
        return Result(self.launcher.returncode, out, err)


@contextmanager
def launching(
    folder: Path,
    body: str,
    *,
    processes: int = 3,
    entry: str = "entry",
    args: tuple[object, ...] = (),
    environ: dict[str, str] | None = None,
    **options: object,
) -> Iterator[Running]:
    """Start a launcher whose ``entry`` is defined in ``body``; whatever is left at the end is killed."""
    script = folder / "launcher.py"
    script.write_text(
        _MAIN.format(
            here=str(folder), body=textwrap.dedent(body), entry=entry, args=args, processes=processes, options=options
        ),
        encoding="utf-8",
    )
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    outer = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TUTTI_LOG_RANKS")}
    environment = outer | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(temporary)} | (environ or {})
    launcher = Process([str(script)], folder, environment)
    running = Running(launcher, folder)
    try:
        yield running
    finally:
        for process in running.workers():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.kill()
        launcher.communicate()


def launched(folder: Path, body: str, **options: object) -> Result:
    """Launch and wait for the end."""
    with launching(folder, body, **options) as running:  # type: ignore[arg-type]
        return running.finish()


def free_port() -> int:
    """A free TCP port of the loopback address, which no other test of this run is given."""
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SHARES
    for number in itertools.islice(_port_numbers, _PORTS):
        port = _FIRST_PORT + share * (_PORTS // _SHARES) + number % (_PORTS // _SHARES)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {_FIRST_PORT} on is free")


def until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds; a test that waits longer than the safety net has failed."""
    end = time.monotonic() + SAFETY_NET
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.02)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run; a zombie holds nothing but its exit code."""
    return [p for p in processes if p.is_running() and status(p) != psutil.STATUS_ZOMBIE]


def status(process: psutil.Process) -> str:
    """Its state; a process that has gone is as a zombie."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def to_terminal_group(running: Running, number: signal.Signals) -> None:
    """What a terminal does on Ctrl-C: the signal goes to the whole foreground process group."""
    os.killpg(running.launcher.pid, number)
