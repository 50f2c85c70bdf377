"""Progress of a measurement that makes many passes over the samples."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_REFRESH, _QUIET = 0.1, 10.0


class PassCounter:
    """Counts passes (forwards, gradients, Hessian products) over samples, and prints the progress of a measurement.

    On a terminal one line is rewritten; elsewhere a line is printed at the end of each named part, and every 10 s.

    Args:
        stream: text stream to write to, such as ``sys.stderr``.

    Attributes:
        passes: number of passes so far, by kind.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._live = stream, stream.isatty()
        self.passes: Counter[str] = Counter()
        self._name, self._total, self._begin, self._said, self._before = "", 0, 0.0, 0.0, 0

    @contextmanager
    def part(self, name: str, total: int = 0) -> Iterator[None]:
        """Report the progress of one part of a measurement while a ``with`` block runs.

        Progress is the number of passes over the samples (forwards, gradients, Hessian products) for which ``count``
        was called within the block, and the seconds since its begin. It is written to the text stream of the counter by
        ``count``, and at the end of the block, unless the block raises. The context manager gives no value; blocks must
        not be nested.

        Args:
            name: name of the part of the measurement, shown before the count.
            total: number of passes that the block will make; 0 if unknown.
        """
        self._name, self._total, self._before = name, total, self.passes.total()
        self._begin = self._said = time.monotonic()
        yield
        self._say("\n")

    def count(self, kind: str) -> None:
        """Count one pass over the samples, and write a line of progress to the counter's stream from time to time.

        On a terminal the line is rewritten if it is at least 0.1 s old; elsewhere a new line follows after 10 s. The
        counter's attribute ``passes`` holds the number of passes by kind. Call it within ``part``.

        Args:
            kind: kind of the pass, such as ``gradient``, under which it is counted.
        """
        self.passes[kind] += 1
        if time.monotonic() - self._said >= (_REFRESH if self._live else _QUIET):
            self._say("" if self._live else "\n")

    def _say(self, end: str) -> None:
        self._said = time.monotonic()
        done = self.passes.total() - self._before
        of = f" of {self._total}" if self._total else ""
        text = f"{self._name}: {done}{of} passes, {self._said - self._begin:.1f} s"
        self._stream.write(f"\r{text:<70}{end}" if self._live else f"{text}{end}")
        self._stream.flush()
