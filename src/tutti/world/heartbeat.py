"""What a rank is doing, in a few bytes of memory that its watchdog reads. No torch.

A beat is a handful of stores into memory that both processes see: no system call, no lock, a fraction of a microsecond.
A rank without a watchdog writes into memory that nobody reads.
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
    """What a thread of a rank does; how long each phase may last is ``tutti.world.watchdog``'s to say.

    Plain numbers, because to look up and store a member of an enumeration takes longer than all the rest of a beat.

    IDLE: the caller's own code, nobody knows how long it may take. START: all before the first step, and that step,
    which may compile. WAITING: for other ranks, and looking around meanwhile. MEETING: for other ranks, in native code
    that gives no sign of life.
    """

    NAMES = ("idle", "start", "data", "compute", "waiting", "meeting", "evaluate", "save", "report", "end")
    IDLE, START, DATA, COMPUTE, WAITING, MEETING, EVALUATE, SAVE, REPORT, END = range(10)


class Seen(NamedTuple):
    """A lane as the watchdog reads it: equal for as long as nothing moves."""

    phase: int
    step: int
    beats: int
    thread: int
    text: str


class _Block:
    """A stretch of memory: eight 64-bit words, the first of them the length of the text that follows."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_BLOCK))
        self._words = self._memory[:_TEXT].cast("q")

    def place(self, memory: memoryview) -> None:
        """Write there from now on, beginning with what was written so far."""
        memory[:] = self._memory
        self._memory, self._words = memory, memory[:_TEXT].cast("q")

    def _write_text(self, raw: bytes) -> None:
        length = min(len(raw), _BLOCK - _TEXT)
        self._memory[_TEXT : _TEXT + length] = raw[:length]
        self._words[0] = length

    def _read_text(self) -> bytes:
        return bytes(self._memory[_TEXT : _TEXT + self._words[0]])


class Lane(_Block):
    """What one thread of a rank does."""

    def enter(self, phase: int, step: int | None = None) -> int:
        """Begin a phase; returns the one before, for the caller to go back to. A rank given up comes no further."""
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
        """The block is ``phase``; what was before goes on after it."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def beat(self, text: str | None = None) -> None:
        """Say that the phase goes on; ``text``: in which call."""
        if text is not None:
            self._write_text(text.encode())
        self._words[_BEATS] += 1

    def give_up(self) -> None:
        """In the watchdog: let the rank begin no further phase, even if being asked what it does has woken it."""
        self._words[_GIVEN_UP] = 1

    def seen(self) -> Seen:
        """What is there now."""
        words = self._words
        text = self._read_text().decode(errors="replace")
        return Seen(words[_PHASE], words[_STEP], words[_BEATS], words[_THREAD], text)


class Process(_Block):
    """What holds for a whole rank."""

    def set_timeout(self, seconds: float) -> None:
        """Say how long ranks wait for each other."""
        self._words[_TIMEOUT] = int(seconds * 1000)

    def timeout(self) -> float | None:
        """How long ranks wait for each other; None before anybody has said so."""
        return self._words[_TIMEOUT] / 1000 or None

    def set_recorder(self) -> None:
        """Say that the collectives can be asked for."""
        self._words[_RECORDER] = 1

    def has_recorder(self) -> bool:
        """Whether the collectives can be asked for."""
        return bool(self._words[_RECORDER])

    def report_to(self, directory: Path) -> None:
        """Say where logs and dumps belong."""
        self._write_text(os.fsencode(directory))

    def directory(self) -> Path | None:
        """Where logs and dumps belong; None where nobody has said so."""
        return Path(os.fsdecode(raw)) if (raw := self._read_text()) else None


def _stay() -> NoReturn:
    """Wait for the end: others may have been told already that this rank has failed."""
    while True:
        time.sleep(1)


process = Process()
"""This rank."""
training = Lane()
"""Its thread that trains."""
saving = Lane()
"""Its thread that writes checkpoints."""


def share(memory: memoryview) -> None:
    """Beat in these ``SIZE`` bytes from now on."""
    for number, block in enumerate((process, training, saving)):
        block.place(memory[number * _BLOCK : (number + 1) * _BLOCK])
