"""Tether of a process to a remote launcher: standard input carries signals; its end ends the process. No torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import MutableMapping

TETHER = "TUTTI_TETHER"
TETHER_KILL = "stdin-kill"
_ALLOWED = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL))
_GRACE = 30.0


def control_by_stdin(environ: MutableMapping[str, str]) -> None:
    """Take signals for this process from its standard input if ``TUTTI_TETHER`` is set; otherwise do nothing.

    A launcher, perhaps on another node, so controls this process: it writes the number of a signal as a line, which a
    thread reads. SIGINT, SIGTERM, SIGUSR1, SIGUSR2 and SIGKILL are taken, other lines are ignored. The end of the input
    means that the launcher is gone: with the value ``stdin`` this process then gets SIGTERM, and SIGKILL after 30
    seconds; with ``stdin-kill`` its process group gets SIGKILL at once, because a launcher may start the job's ranks
    again. From now on standard input is empty for all other readers, and SIGTTOU is ignored, because a rank is no
    foreground process of the launcher's terminal. To be called in the main thread.

    Args:
        environ: environment variables; ``TUTTI_TETHER`` is removed.
    """
    tether = environ.pop(TETHER, None)
    if tether is None:
        return
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    line = os.dup(sys.stdin.fileno())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    threading.Thread(target=_listen, args=(line, tether == TETHER_KILL), name="tether", daemon=True).start()


def _listen(line: int, at_once: bool) -> None:
    with os.fdopen(line, "rb") as lines:
        for word in lines:
            number = int(word) if word.strip().isdigit() else 0
            if number in _ALLOWED:
                os.kill(os.getpid(), number)
    if at_once:
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
