"""Dumps of a stuck rank: the stacks of its threads, and its last collectives.

The rank makes a ``Dumps`` before it forks its watchdog, so that both hold the same unnamed descriptors.
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

# SIGUSR1 and SIGUSR2 ask a run to stop.
_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGIO
_LOOK = 0.02
# A process that is stuck in the kernel handles no signal; one that never releases the GIL dumps no collectives.
_PATIENCE = 5.0
_HEADING = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.IGNORECASE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
# End of a complete dump: the main thread comes last, and ends with the program's outermost frame or an ellipsis.
_COMPLETE = re.compile(r"( in <module>| in _run_module_as_main|^  \.\.\.)\n*\Z", re.MULTILINE)
_ELSEWHERE = ("<frozen ", f"{Path(os.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


class Dumps:
    """Dumps of one rank for its watchdog: the stacks of the rank's threads, and the rank's last collectives.

    The rank creates this object before it forks its watchdog process, so that both processes share its descriptors:
    an unnamed file for the stacks, and a pipe for requests. ``faulthandler`` writes the stacks; it needs neither the
    GIL nor a lock of its own. The constructor registers it for the signal SIGRTMAX - 2 of this process.
    """

    def __init__(self) -> None:
        self._stacks = _unnamed()
        self._asked, self._ask = os.pipe()
        faulthandler.register(_SIGNAL, file=self._stacks, all_threads=True)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Two file descriptors that a rank and its forked watchdog process share; the watchdog must keep them open.

        The first belongs to the unnamed file to which the rank dumps its stacks. The second is the writing end of the
        pipe through which the watchdog requests the rank's recorded collectives.
        """
        return self._stacks, self._ask

    def answer(self, record: Callable[[], bytes], target: Callable[[], Path | None]) -> None:
        """Start a thread in the rank that writes the rank's recorded collectives to a file on the watchdog's request.

        Called once in the rank, after the watchdog process was forked. The thread answers a single request of the
        watchdog (``flight``) and ends: the file is written at most once, atomically. An ``OSError`` or ``RuntimeError``
        of ``record`` or of the writing is ignored, and the file is then not written.

        Args:
            record: returns the recording, as the bytes of the file.
            target: returns the path to write; None: write nothing.
        """
        os.close(self._ask)
        threading.Thread(target=self._answer, args=(record, target), name="tutti-flight", daemon=True).start()

    def _answer(self, record: Callable[[], bytes], target: Callable[[], Path | None]) -> None:
        if os.read(self._asked, 1) and (path := target()) is not None:
            with suppress(OSError, RuntimeError):
                temporary = path.with_suffix(f".tmp-{os.getpid()}")
                temporary.write_bytes(record())
                temporary.replace(path)

    def stacks(self, pid: int) -> str:
        """Make the rank dump the stacks of all its threads, and return them as text. Called in the watchdog.

        The text is what ``faulthandler`` writes. Waits up to five seconds; the text is incomplete or empty if the rank
        handles no signal. A rank that was stopped by a signal is continued.

        Args:
            pid: process id of the rank.

        Raises:
            ProcessLookupError: there is no such process.
        """
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
        """Make the rank write its recorded collectives to a file; return whether the file appeared within five seconds.

        Called in the watchdog process, at most once, because the rank answers a single request. The rank must have
        called ``answer`` before; otherwise, or if the rank never releases the GIL, without which the thread of
        ``answer`` cannot write, the result is False. Blocks for up to five seconds.

        Args:
            path: the path that the function ``target``, which the rank has given to ``answer``, returns in the rank; a
                file there is deleted first.

        Raises:
            OSError: the old file cannot be deleted, or the rank has ended (BrokenPipeError).
        """
        path.unlink(missing_ok=True)
        os.write(self._ask, b"?")
        for _ in range(int(_PATIENCE / _LOOK)):
            if path.exists():
                return True
            time.sleep(_LOOK)
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process ``pid``.

    The state is read from ``/proc/PID/stat``; False if there is no such process, or no ``/proc``.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == b"T"


def lines_of(stacks: str, thread: int) -> list[str]:
    """Select the stack frames of one thread from a dump that ``faulthandler`` has written.

    Args:
        stacks: text of the dump, with all threads.
        thread: identifier of the thread, as ``threading.get_ident`` returns it; if the dump does not have it, the
            frames of the last thread, the main thread, are returned.

    Returns:
        One line for each frame, such as ``  File "own.py", line 12 in loss``, innermost frame first; empty if the dump
        has no frames.
    """
    threads: dict[int, list[str]] = {}
    frames: list[str] = []
    for line in stacks.splitlines():
        if heading := _HEADING.match(line):
            frames = threads.setdefault(int(heading[1], 16), [])
        elif line.startswith("  "):
            frames.append(line)
    return threads.get(thread, frames)


def place_of(frames: list[str]) -> str | None:
    """Return the innermost stack frame in the user's own code, as ``FUNCTION (FILE, line N)``.

    Code of tutti, the standard library and installed packages is not the user's. If no frame is in the user's code,
    the innermost frame of all is returned; without frames, None.

    Args:
        frames: lines of one thread in a dump of ``faulthandler``, innermost first.

    >>> place_of(['  File "own.py", line 12 in loss', '  File "run.py", line 3 in <module>'])
    'loss (own.py, line 12)'
    """
    found = [frame for line in frames if (frame := _FRAME.match(line))]
    own = [frame for frame in found if not frame[1].startswith(_ELSEWHERE) and "site-packages" not in frame[1]]
    for frame in own or found:
        return f"{frame[3]} ({Path(frame[1]).name}, line {frame[2]})"
    return None


def _unnamed() -> int:
    """Return a descriptor of an unnamed file, in memory if the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tutti-stacks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
