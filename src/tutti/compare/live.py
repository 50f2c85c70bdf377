"""Show the progress of a ladder: a live table in a terminal, one line a run elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from tutti.compare import convergence_table
from tutti.compare.ladder import Ladder
from tutti.compare.runs import Progress, Trial
from tutti.compare.verdict import ACCURACY, RungResult
from tutti.config.metric_direction import Metric
from tutti.config.verbosity import is_quiet

if TYPE_CHECKING:
    from rich.live import Live

_QUIET_SECONDS = 30.0


class Board:
    """Display of a comparison's current run and of the results of its finished runs, as a context manager.

    In a terminal a table is redrawn while the ``with`` block runs; elsewhere, with ``NO_COLOR`` and in a terminal that
    cannot redraw (``TERM=dumb``), lines are printed. With ``-q`` (``TUTTI_VERBOSITY=quiet``) nothing is shown.

    Args:
        stream: stream to write to.
        ladder: the series of training configurations (rungs) that are compared.
        total: number of runs.
    """

    def __init__(self, stream: TextIO, ladder: Ladder, total: int) -> None:
        self._stream, self._ladder, self._total = stream, ladder, total
        self._metric: Metric | None = None
        dumb = os.environ.get("TERM", "") in ("dumb", "unknown", "") or bool(os.environ.get("NO_COLOR"))
        self._quiet = is_quiet(os.environ)
        self._live: Live | None = None if dumb or self._quiet or not stream.isatty() else _live(stream)
        self._rows: Mapping[str, RungResult] = {}
        self._now = ""
        self._said = 0.0

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, trial: Trial, number: int, rows: Mapping[str, RungResult], metric: Metric | None) -> None:
        """Show that a run of the comparison begins: a redrawn table in a terminal, one printed line elsewhere.

        To be called within the ``with`` block of this object, before ``progress`` is called for the same run.

        Args:
            trial: the run, one rung (configuration) with one seed.
            number: index of the run, from 0.
            rows: results by rung name, of rungs with finished runs.
            metric: the metric that is compared; None while its direction is unknown.
        """
        self._metric = metric
        self._rows, self._now = rows, f"run {number + 1} of {self._total}: {trial.rung}, seed {trial.seed}"
        self._said = time.monotonic()
        if self._quiet:
            return
        if self._live is None:
            print(self._now, file=self._stream, flush=True)
        else:
            self._draw("")

    def progress(self, progress: Progress) -> None:
        """Show step, loss and held-out value of the comparison's current run; outside a terminal at most every 30 s.

        Args:
            progress: the run's newest records: ``progress.step`` (a training step) and ``progress.evaluated`` (an
                evaluation), each a dict, empty if there is none yet.
        """
        text = _words(progress, self._metric)
        if self._live is not None:
            self._draw(text)
        elif text and not self._quiet and time.monotonic() - self._said >= _QUIET_SECONDS:
            self._said = time.monotonic()
            print(f"  {text}", file=self._stream, flush=True)

    def _draw(self, text: str) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        drawn = Table(box=None, header_style="bold")
        for place, heading in enumerate(convergence_table.headings(self._ladder)):
            drawn.add_column(heading, justify="left" if place == 0 else "right", no_wrap=place > 0)
        for line in convergence_table.cells(self._ladder, self._rows, self._metric or ACCURACY):
            drawn.add_row(*(Text(cell) for cell in line))
        if self._live is not None:
            self._live.update(Group(drawn, Text(f"{self._now}  {text}", style="cyan")), refresh=True)


def _live(stream: TextIO) -> Live:
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(file=stream, highlight=False), auto_refresh=False)


def _words(progress: Progress, metric: Metric | None) -> str:
    step, evaluated = progress.step, progress.evaluated
    parts: list[Any] = []
    if step:
        parts.append(f"step {step['step']}, epoch {step['epoch']}, loss {step['loss']:.4f}" if step["loss"] else "")
    if metric is not None and evaluated and evaluated.get(metric.name) is not None:
        value = evaluated[metric.name]
        parts.append(f"held out {value:.1%}" if metric.higher and 0 <= value <= 1 else f"held out {value:.4f}")
    return ", ".join(filter(None, parts))
