"""Hold signals back while modules are imported, or the process forks. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_signals(numbers: Iterable[int] = (signal.SIGINT,)) -> Iterator[list[int]]:
    """Within the block, the first signal waits for the block's end, and the next one is handled at once.

    For code that would drop the exception of a signal's handler: the native modules of torch while they are imported,
    and functions of ``os.register_at_fork``. Outside the main thread, which handles all signals, and for handlers that
    Python has not installed, nothing is held.

    Args:
        numbers: the signals; ignored ones stay ignored.

    Yields:
        A list, to which the number of a signal that has come is added; if it is empty at the end, none is handled.
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
