"""Heartbeats: a rank writes its phase, step and current call into memory shared with its watchdog. No torch.

A beat is a handful of stores into shared memory: no system call, no lock, a fraction of a microsecond.
A rank without a watchdog writes into private memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import NamedTuple, NoReturn

_BLOCK, _TEXT = 4096, 64
_TIMEOUT, _RECORDER = 1, 2
_PHASE, _STEP, _BEATS, _THREAD, _GIVEN_UP = 1, 2, 3, 4, 5
SIZE = 3 * _BLOCK
"""Bytes that a rank and its watchdog share."""


class Phase:
    """Constants for the activity of a rank's thread, such as computing or saving, whose time the watchdog limits.

    Plain integers: looking up and storing an enum member takes longer than the rest of a heartbeat.

    IDLE: the caller's own code, without a limit. START: everything up to and including the first step, which may
    compile. DATA and COMPUTE: loading and computing in later steps. EVALUATE: an evaluation or a prediction. SAVE and
    REPORT: writing a checkpoint or a record. END: the end of the run. WAITING: waiting for other ranks, with polling.
    CONNECTING: making process groups with the other ranks in native code, which records no heartbeats. ``NAMES``: name
    of each phase, in the order of the integers.
    """

    NAMES = ("idle", "start", "data", "compute", "waiting", "connecting", "evaluate", "save", "report", "end")
    IDLE, START, DATA, COMPUTE, WAITING, CONNECTING, EVALUATE, SAVE, REPORT, END = range(10)


class Seen(NamedTuple):
    """State of one thread of a rank, as its watchdog reads it; two equal readings mean no progress.

    Attributes:
        phase: activity of the thread, as an integer of ``Phase``.
        step: the training step.
        beats: number of heartbeats so far.
        thread: identifier of the thread, as ``threading.get_ident`` returns it.
        text: description of the current call, such as a collective.
    """

    phase: int
    step: int
    beats: int
    thread: int
    text: str


class _Block:
    """A block of memory: eight 64-bit words, then a text; the first word is the text's length in bytes."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_BLOCK))
        self._words = self._memory[:_TEXT].cast("q")

    def place(self, memory: memoryview) -> None:
        """Move the block to ``memory``, with its contents."""
        memory[:] = self._memory
        self._memory, self._words = memory, memory[:_TEXT].cast("q")

    def _write_text(self, raw: bytes) -> None:
        length = min(len(raw), _BLOCK - _TEXT)
        self._memory[_TEXT : _TEXT + length] = raw[:length]
        self._words[0] = length

    def _read_text(self) -> bytes:
        return bytes(self._memory[_TEXT : _TEXT + self._words[0]])


class Lane(_Block):
    """Heartbeats of one thread of a rank, in memory that the rank may share with its watchdog process.

    The thread that trains (lane ``training``) or writes checkpoints (``saving``) records its phase and its progress by
    ``enter``, ``during`` and ``beat``; the watchdog process reads them by ``seen``. Without a watchdog the memory is
    private.
    """

    def enter(self, phase: int, step: int | None = None) -> int:
        """Record that this thread begins a phase of training, such as a save, whose duration the watchdog limits.

        Counts as a heartbeat, and clears the description of the current call. Blocks for ever if the watchdog has
        already decided to kill this rank.

        Args:
            phase: an integer of ``Phase``, such as ``Phase.COMPUTE``.
            step: the training step; None: unchanged.

        Returns:
            The former phase, as an integer of ``Phase``, which the caller can enter again later.
        """
        words = self._words
        if words[_GIVEN_UP]:
            _stay()
        before = words[_PHASE]
        words[0] = 0
        words[_PHASE] = phase
        if step is not None:
            words[_STEP] = step
        words[_THREAD] = get_ident()
        words[_BEATS] += 1
        return before

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Return a context manager that records for the rank's watchdog that this thread is in a phase of training.

        After its block the former phase is recorded again. Entering and leaving the block blocks for ever if the
        watchdog has already decided to kill this rank. The context manager gives no value.

        Args:
            phase: an integer of ``Phase``, such as ``Phase.SAVE``.
        """
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def beat(self, text: str | None = None) -> None:
        """Record for the watchdog that this thread makes progress, which restarts the time limit of its present phase.

        Args:
            text: description of the current call, for the watchdog's report; None: unchanged.
        """
        if text is not None:
            self._write_text(text.encode())
        self._words[_BEATS] += 1

    def give_up(self) -> None:
        """Make the rank's thread block for ever when it next enters a phase, such as its next training step.

        Called in the watchdog process, before it kills the rank. The watchdog may have woken a stuck rank by asking for
        its stacks; the rank then does not train on while the watchdog reports it as failed.
        """
        self._words[_GIVEN_UP] = 1

    def seen(self) -> Seen:
        """Return the thread's last recorded heartbeat. Called in the watchdog process, which shares the memory.

        Returns:
            A ``Seen``: ``phase`` (an integer of ``Phase``), ``step`` (the training step), ``beats`` (number of
            heartbeats so far), ``thread`` (its identifier) and ``text`` (description of the current call, such as a
            collective). Two equal results mean that the thread made no progress between them.
        """
        words = self._words
        text = self._read_text().decode(errors="replace")
        return Seen(words[_PHASE], words[_STEP], words[_BEATS], words[_THREAD], text)


class ProcessHeartbeat(_Block):
    """Facts about a rank's process for its watchdog, in memory that both share: job's timeout and log directory.

    The rank writes them when it starts and joins the job (``set_timeout``, ``set_recorder``, ``report_to``); the
    watchdog process reads them. Without a watchdog the memory is private.
    """

    def set_timeout(self, seconds: float) -> None:
        """Record the job's timeout for this rank's watchdog.

        Args:
            seconds: time after which ranks stop waiting for each other in a collective; stored in milliseconds.
        """
        self._words[_TIMEOUT] = int(seconds * 1000)

    def timeout(self) -> float | None:
        """Return the seconds after which ranks stop waiting for each other in a collective; None if not recorded yet.

        Called in the watchdog process, which uses this time where no limit of its own is set.
        """
        return self._words[_TIMEOUT] / 1000 or None

    def set_recorder(self) -> None:
        """Record for this rank's watchdog that the rank can write its last collectives to a file on request."""
        self._words[_RECORDER] = 1

    def has_recorder(self) -> bool:
        """Return whether the rank can write its last collectives to a file when its watchdog asks for it."""
        return bool(self._words[_RECORDER])

    def report_to(self, directory: Path) -> None:
        """Record for this rank's watchdog in which directory the rank's log and failure record lie."""
        self._write_text(os.fsencode(directory))

    def directory(self) -> Path | None:
        """Return the directory of the rank's log and failure record, for its watchdog.

        None if the rank has not recorded the directory, by ``report_to``.
        """
        return Path(os.fsdecode(raw)) if (raw := self._read_text()) else None


def _stay() -> NoReturn:
    """Block until this process is killed: other ranks may already know that it has failed."""
    while True:
        time.sleep(1)


process = ProcessHeartbeat()
"""Heartbeat block of this rank."""
training = Lane()
"""Lane of the thread that trains."""
saving = Lane()
"""Lane of the thread that writes checkpoints."""


def beat_into(memory: memoryview) -> None:
    """Move this process's heartbeats (its threads' phases and progress) into memory that its watchdog reads.

    Called before the watchdog process is forked. Later heartbeats are written to this memory.

    Args:
        memory: writable memory of ``SIZE`` (12,288) bytes that a forked process shares.
    """
    for number, block in enumerate((process, training, saving)):
        block.place(memory[number * _BLOCK : (number + 1) * _BLOCK])
