"""Preemption: signals after which a run finishes its step, saves a checkpoint and exits with its own exit code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from tutti.errors import ExitCode, Interrupted, Preempted

if TYPE_CHECKING:
    from tutti.train.run import Run

_PREEMPT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopReason:
    """Record of the signal by which this process was asked to stop, and the exit code that belongs to it.

    All ranks stop together, so that a rank may stop that has got no signal itself.

    Attributes:
        interrupted: whether this process has got Ctrl-C (SIGINT); False after another signal, and without one.
    """

    def __init__(self) -> None:
        self.interrupted = False

    @property
    def exit_code(self) -> int:
        """Exit code for a process that a signal has asked to stop: 130 after Ctrl-C, else 75.

        The process writes its checkpoint first. 75 says that the run can be resumed.
        """
        return int(ExitCode.INTERRUPTED if self.interrupted else ExitCode.PREEMPTED)

    def error(self, stop: Preempted) -> Preempted | Interrupted:
        """Return the exception that ends a process, asked to stop by a signal, with the exit code for that signal.

        Args:
            stop: the exception of a preempted run (exit code 75).

        Returns:
            ``stop`` itself, or an ``Interrupted`` (130) after Ctrl-C.
        """
        return Interrupted(stop.what, where=stop.where, remedy=stop.remedy) if self.interrupted else stop


@contextmanager
def stop_on_signals(run: Run) -> Iterator[StopReason]:
    """Return a context manager within which signals ask all ranks of a run to stop training after the next step.

    The signals are SIGTERM, SIGUSR1, SIGUSR2 and the first Ctrl-C. Entering installs handlers on this rank, leaving
    restores the earlier ones, except for signals that are ignored by then (Slurm); neither is collective. The steps
    carry the request to the other ranks. After the next step ``run.stats.stop`` is true on all ranks. A second signal
    ends the process at once; in a job of Slurm a second SIGTERM, SIGUSR1 or SIGUSR2 is ignored, because Slurm sends a
    signal both to the ranks and to the process that started them, which passes it on, and itself kills a job that does
    not end. Outside of the main thread no signal handler is installed.

    Args:
        run: the run to stop.

    Yields:
        A ``StopReason``, whose ``interrupted`` says after a signal whether the signal was Ctrl-C.
    """
    reason = StopReason()
    if threading.current_thread() is not threading.main_thread():
        yield reason
        return

    def ask(number: int, frame: FrameType | None) -> None:
        reason.interrupted = number == signal.SIGINT
        run.ask_to_stop()
        for each in before:
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else second)

    second = signal.SIG_IGN if "SLURM_JOB_ID" in os.environ else signal.SIG_DFL
    before = {number: signal.getsignal(number) for number in (*_PREEMPT, signal.SIGINT)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield reason
    finally:
        for number, handler in before.items():
            # The copy of a signal that Slurm repeats may come later than the end of a short save.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
