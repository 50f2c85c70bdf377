"""A ladder while it runs: a table that is drawn over in a terminal, a line a run everywhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from tutti.compare import table
from tutti.compare.ladder import Ladder
from tutti.compare.runs import Progress, Trial
from tutti.compare.verdict import Row

if TYPE_CHECKING:
    from rich.live import Live

_QUIET_SECONDS = 30.0


class Board:
    """Shows which run is under way and what has finished.

    Args:
        stream: where to.
        ladder: what runs.
        metric: the held-out figure.
        total: runs in all.
    """

    def __init__(self, stream: TextIO, ladder: Ladder, metric: str, total: int) -> None:
        self._stream, self._ladder, self._metric, self._total = stream, ladder, metric, total
        dumb = os.environ.get("TERM", "") in ("dumb", "unknown", "") or bool(os.environ.get("NO_COLOR"))
        self._live: Live | None = None if dumb or not stream.isatty() else _live(stream)
        self._rows: Mapping[str, Row] = {}
        self._now = ""
        self._said = 0.0

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, trial: Trial, number: int, rows: Mapping[str, Row]) -> None:
        """The run that begins, and the rungs that have finished runs."""
        self._rows, self._now = rows, f"run {number + 1} of {self._total}: {trial.rung}, seed {trial.seed}"
        self._said = time.monotonic()
        if self._live is None:
            print(self._now, file=self._stream, flush=True)
        else:
            self._draw("")

    def progress(self, progress: Progress) -> None:
        """Where the run is."""
        text = _words(progress, self._metric)
        if self._live is not None:
            self._draw(text)
        elif text and time.monotonic() - self._said >= _QUIET_SECONDS:
            self._said = time.monotonic()
            print(f"  {text}", file=self._stream, flush=True)

    def _draw(self, text: str) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        drawn = Table(box=None, header_style="bold")
        for place, heading in enumerate(table.HEADINGS):
            drawn.add_column(heading, justify="left" if place == 0 else "right", no_wrap=place > 0)
        for line in table.cells(self._ladder, self._rows):
            drawn.add_row(*(Text(cell) for cell in line))
        if self._live is not None:
            self._live.update(Group(drawn, Text(f"{self._now}  {text}", style="cyan")), refresh=True)


def _live(stream: TextIO) -> Live:
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(file=stream, highlight=False), auto_refresh=False)


def _words(progress: Progress, metric: str) -> str:
    step, evaluated = progress.step, progress.evaluated
    parts: list[Any] = []
    if step:
        parts.append(f"step {step['step']}, epoch {step['epoch']}, loss {step['loss']:.4f}" if step["loss"] else "")
    if evaluated and evaluated.get(metric) is not None:
        parts.append(f"held out {evaluated[metric]:.1%}")
    return ", ".join(filter(None, parts))
