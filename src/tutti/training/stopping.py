"""Signals that ask a run to stop in order: finish the step, save, leave with an exit code that says so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from tutti.errors import ExitCode, Interrupted, Preempted

if TYPE_CHECKING:
    from tutti.training.run import Run

_PREEMPT = (signal.SIGTERM, signal.SIGUSR1)


class Reason:
    """Why this process was asked to stop; other ranks may have been asked instead."""

    def __init__(self) -> None:
        self.interrupted = False

    @property
    def exit_code(self) -> int:
        """What to leave with once the state is saved: 130 after Ctrl-C, else 75, which says that it can be resumed."""
        return int(ExitCode.INTERRUPTED if self.interrupted else ExitCode.PREEMPTED)

    def error(self, stop: Preempted) -> Preempted | Interrupted:
        """``stop`` with the exit code of the reason: 130 for Ctrl-C, else 75."""
        return Interrupted(stop.what, where=stop.where, remedy=stop.remedy) if self.interrupted else stop


@contextmanager
def stopping(run: Run) -> Iterator[Reason]:
    """Within the block SIGTERM, SIGUSR1 and the first Ctrl-C ask all ranks to stop; a second signal ends at once."""
    reason = Reason()
    if threading.current_thread() is not threading.main_thread():
        yield reason
        return

    def ask(number: int, frame: FrameType | None) -> None:
        reason.interrupted = number == signal.SIGINT
        run.ask_to_stop()
        for each in before:
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)

    before = {number: signal.getsignal(number) for number in (*_PREEMPT, signal.SIGINT)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield reason
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
