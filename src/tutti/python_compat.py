"""Private names of CPython that tutti uses, each with its reason, and what its garbage collector knows.

No other module of the package may use a private name; ``tests/test_python_compat.py`` touches every name of
``__all__``. This module loads no torch, for the launcher and its processes; private names of PyTorch are in
``torch_compat.py``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
import threading
from collections.abc import Iterable
from typing import TypeVar

__all__ = [
    "calling_frame",
    "forget_exit_handlers",
    "import_uncollected",
    "join_threads",
    "live_objects",
    "run_exit_handlers",
]

_T = TypeVar("_T")

calling_frame = sys._getframe
"""Return the frame ``depth`` calls up the stack. Documented as specific to CPython; the public ``inspect.stack()``
reads source files at each call."""


def forget_exit_handlers() -> None:
    """Remove all functions registered with ``atexit`` from this process, without calling them.

    A forked process calls this, because it inherits its parent's functions. The public ``atexit.unregister`` removes
    one function, which the caller must have.
    """
    atexit._clear()


def run_exit_handlers() -> None:
    """Call and remove the functions registered with ``atexit``, the one registered last first.

    An exception of a function is printed to stderr and not raised, and the other functions are still called. For use
    before a process ends by ``os._exit``, which skips these functions.
    """
    atexit._run_exitfuncs()


def import_uncollected(names: Iterable[str]) -> None:
    """Import modules with Python's garbage collector suspended.

    The objects of a module stay for good, and each full collection during the import of torch visits all of them. The
    collector is on again afterwards, also after an error, if it was on before.

    Args:
        names: full names of the modules, imported in this order.

    Raises:
        ImportError: a module cannot be imported. Other errors of a module's code pass through.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        if enabled:
            gc.enable()


def join_threads() -> None:
    """Wait until all threads but daemons and the calling one have ended, as Python does at the end of a program.

    Executors of ``concurrent.futures`` are shut down first, so that their idle threads end, too; ``Thread.join`` would
    wait forever for these. ``multiprocessing`` calls the same function in its children. To be called in the main
    thread, once, before the process ends.
    """
    threading._shutdown()  # type: ignore[attr-defined]


def live_objects(kind: type[_T]) -> list[_T]:
    """Return all objects of a class in this process that the garbage collector tracks, in no particular order.

    The garbage collector tracks instances of Python classes and containers, but no ints or strings. The search looks at
    all tracked objects, which are hundreds of thousands once PyTorch is loaded.

    Args:
        kind: the class; objects of its subclasses are included.

    Returns:
        The objects themselves, which the list keeps alive.
    """
    objects = gc.get_objects()
    kinds = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [item for item in objects if type(item) in kinds] if kinds else []
