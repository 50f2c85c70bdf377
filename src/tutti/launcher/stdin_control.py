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
    """If ``TUTTI_TETHER`` is set, take signals from standard input; for all other readers it is empty from now on.

    The end of the input means that the launcher is gone. With ``stdin`` this process gets SIGTERM then, and SIGKILL
    after 30 seconds. With ``stdin-kill`` its process group gets SIGKILL at once, because another attempt may begin.
    """
    tether = environ.pop(TETHER, None)
    if tether is None:
        return
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
