"""Private names of CPython that tutti uses, each with its reason.

No other module of the package may use one; ``tests/test_python_compat.py`` touches every name of ``__all__``. This
module loads no torch, for the launcher and its processes; private names of PyTorch are in ``torch_compat.py``.
"""

from __future__ import annotations

import atexit
import sys
import threading

__all__ = ["calling_frame", "forget_exit_handlers", "join_threads", "run_exit_handlers"]

calling_frame = sys._getframe
"""Return the frame ``depth`` calls up the stack. Documented as specific to CPython; the public ``inspect.stack()``
reads source files at each call."""


def forget_exit_handlers() -> None:
    """Remove all functions registered with ``atexit``; a forked process inherits its parent's.

    The public ``atexit.unregister`` needs each function.
    """
    atexit._clear()


def run_exit_handlers() -> None:
    """Call and remove the functions registered with ``atexit``, before a process ends by ``os._exit``, which skips
    them."""
    atexit._run_exitfuncs()


def join_threads() -> None:
    """Join all threads, idle threads of executors included, as Python does at the end of a program.

    ``multiprocessing`` calls the same function in its children. ``Thread.join`` would wait forever for the threads of
    an executor that has not been shut down.
    """
    threading._shutdown()  # type: ignore[attr-defined]
