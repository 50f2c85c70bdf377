"""Hold signals back while modules are imported, or the process forks. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_signals(numbers: Iterable[int] = (signal.SIGINT,)) -> Iterator[list[int]]:
    """Return a context manager that delays the first signal that arrives within its block until the block's end.

    A further signal within the block is handled at once by its own handler. For code that would drop the exception of a
    signal's handler: the native modules of torch while they are imported, and functions of ``os.register_at_fork``.
    Only signals with a Python function as handler are delayed, not those that are ignored or have the default action.
    Outside the main thread, which handles all signals, nothing is delayed.

    Args:
        numbers: the signals to delay.

    Yields:
        A list that gets the number of the delayed signal. At the block's end the signal is raised; a caller that
        empties the list before drops it.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in numbers}
    held = {number: handler for number, handler in before.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        held = {}

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        restore()

    def restore() -> None:
        for number, handler in held.items():
            signal.signal(number, handler)

    for number in held:
        signal.signal(number, note)
    try:
        yield came
    finally:
        restore()
        if came:
            signal.raise_signal(came[0])
