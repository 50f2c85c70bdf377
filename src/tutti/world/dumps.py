"""What a process that makes no progress can still be made to say: the stacks of its threads, its last collectives.

Made by the rank before its watchdog is forked, so that both hold the same descriptors; nothing of it has a name.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
_LOOK = 0.02
# A process that is stuck in the kernel answers no signal; one that never lets go of Python's lock records no flight.
_PATIENCE = 5.0
_HEADING = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.IGNORECASE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
# The main thread comes last, and its outermost frame is the program's, or one frame too many to be shown.
_COMPLETE = re.compile(r"( in <module>| in _run_module_as_main|^  \.\.\.)\n*\Z", re.MULTILINE)
_ELSEWHERE = ("<frozen ", f"{Path(os.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


class Dumps:
    """One rank's dumps. Has its stacks written by ``faulthandler``, which needs neither Python's lock nor its own."""

    def __init__(self) -> None:
        self._stacks = _unnamed()
        self._asked, self._ask = os.pipe()
        faulthandler.register(_SIGNAL, file=self._stacks, all_threads=True)

    @property
    def descriptors(self) -> tuple[int, int]:
        """What the watchdog needs."""
        return self._stacks, self._ask

    def answer(self, record: Callable[[], bytes], target: Callable[[], Path | None]) -> None:
        """In the rank: write ``record()`` to ``target()`` when the watchdog asks. The thread sleeps until then."""
        os.close(self._ask)
        threading.Thread(target=self._answer, args=(record, target), name="tutti-flight", daemon=True).start()

    def _answer(self, record: Callable[[], bytes], target: Callable[[], Path | None]) -> None:
        if os.read(self._asked, 1) and (path := target()) is not None:
            with suppress(OSError, RuntimeError):
                temporary = path.with_suffix(f".tmp-{os.getpid()}")
                temporary.write_bytes(record())
                temporary.replace(path)

    def stacks(self, pid: int) -> str:
        """In the watchdog: the stacks of all threads of ``pid``; a stopped process is woken for it."""
        start = os.fstat(self._stacks).st_size
        os.kill(pid, _SIGNAL)
        if is_stopped(pid):
            os.kill(pid, signal.SIGCONT)
        text, before = "", None
        for _ in range(int(_PATIENCE / _LOOK)):
            time.sleep(_LOOK)
            text = os.pread(self._stacks, 1 << 20, start).decode(errors="replace")
            if text == before and _COMPLETE.search(text):
                break
            before = text
        return text

    def flight(self, path: Path) -> bool:
        """In the watchdog: have the flight recorder written to ``path``; whether it was."""
        path.unlink(missing_ok=True)
        os.write(self._ask, b"?")
        for _ in range(int(_PATIENCE / _LOOK)):
            if path.exists():
                return True
            time.sleep(_LOOK)
        return False


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, so that none of its threads runs; False where that cannot be known."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == b"T"


def lines_of(stacks: str, thread: int) -> list[str]:
    """The frames of one thread, innermost first; of the last one, which is the main thread, where it is not there."""
    threads: dict[int, list[str]] = {}
    frames: list[str] = []
    for line in stacks.splitlines():
        if heading := _HEADING.match(line):
            frames = threads.setdefault(int(heading[1], 16), [])
        elif line.startswith("  "):
            frames.append(line)
    return threads.get(thread, frames)


def place_of(frames: list[str]) -> str | None:
    """The innermost frame of the user's own code, else the innermost of all, as ``loss (own.py, line 12)``.

    >>> place_of(['  File "own.py", line 12 in loss', '  File "run.py", line 3 in <module>'])
    'loss (own.py, line 12)'
    """
    found = [frame for line in frames if (frame := _FRAME.match(line))]
    own = [frame for frame in found if not frame[1].startswith(_ELSEWHERE) and "site-packages" not in frame[1]]
    for frame in own or found:
        return f"{frame[3]} ({Path(frame[1]).name}, line {frame[2]})"
    return None


def _unnamed() -> int:
    """A file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tutti-stacks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
