"""Show a run's progress: a live display on a terminal, fixed columns everywhere else.

Neither costs a step more than a few microseconds: a step only stores its record, and drawing is throttled by time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from tutti.config.train_config import TrainConfig
from tutti.config.verbosity import is_quiet
from tutti.metrics.listener import EvalRecord, Listener, Listeners, Pace, RunHeader
from tutti.metrics.throughput import MFU
from tutti.types.step_records import StepRecord

if TYPE_CHECKING:
    from rich.console import Group

REFRESH_SECONDS = 0.1
"""Seconds between two drawings of the progress line on a terminal."""
QUIET_SECONDS = 10.0
"""Fewest seconds between two lines of progress in a log, between lines that are due."""


def terminal_listener(stream: TextIO, config: TrainConfig) -> Listener:
    """Return a listener that prints a run: a live display in a terminal, plain lines elsewhere or with ``NO_COLOR``.

    The run calls the listener's methods at its start, after each step and evaluation, and at its end. With ``-q`` the
    listener prints nothing; warnings are in ``metrics.jsonl``.

    Args:
        stream: text stream to print to, such as standard error.
        config: the run's configuration, whose ``log_every`` is the number of steps between plain lines.

    Returns:
        A ``LiveDisplay`` if ``stream`` is a terminal that can redraw lines (``TERM`` is set, and neither ``dumb`` nor
        ``unknown``) and ``NO_COLOR`` is unset, else a ``PlainLines``; with ``-q`` a listener without effect.
    """
    if is_quiet(os.environ):
        return Listeners(())
    dumb = os.environ.get("TERM", "") in ("dumb", "unknown", "") or bool(os.environ.get("NO_COLOR"))
    return PlainLines(stream, config.log_every) if dumb or not stream.isatty() else LiveDisplay(stream)


class PlainLines:
    """Listener of a run's events that prints lines of text, without redrawing.

    A line is printed every ``log_every`` steps or 10 seconds, at the first and last step and at every evaluation. A
    stream that breaks (a closed pipe, a lost terminal) ends the output, not the run.

    Args:
        stream: text stream to print to, such as standard error.
        log_every: number of steps between lines.
    """

    def __init__(self, stream: TextIO, log_every: int) -> None:
        self._stream, self._log_every = stream, log_every
        self._total: int | None = None
        self._printed = float("-inf")
        self._columns: tuple[str, ...] | None = None
        self._utilised = False

    def started(self, header: RunHeader) -> None:
        """Print the run's title and, one on a line, the settings that follow from its options.

        Args:
            header: title, settings by name, and number of steps of the run.
        """
        self._total = header.total_steps
        width = max(map(len, header.derived), default=0)
        self._write(header.title, *(f"  {name:<{width}}  {value}" for name, value in header.derived.items()), "")

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        """Print a line with step, epoch, loss, metrics, speed and time, unless one was printed less than 10 s ago.

        Step 1, the last step and every ``log_every``-th step of the run are printed in any case. An error of the
        stream, such as of a closed pipe, is ignored.

        Args:
            record: loss, metrics, number and epoch of the step.
            pace: samples a second, and elapsed and remaining seconds of the run.
        """
        now = time.monotonic()
        due = record.step % self._log_every == 0 or record.step in (1, self._total)
        if not due and now - self._printed < QUIET_SECONDS:
            return
        self._printed = now
        cells = [f"{pace.samples_per_second:,.0f}", format_seconds(pace.elapsed), format_seconds(pace.remaining)]
        self._utilised = MFU in pace.device
        if self._utilised:
            cells.append(f"{pace.device[MFU]:.1%}")
        self._row("train", record.step, record.epoch, record.loss, record.metrics, cells)

    def evaluated(self, record: EvalRecord) -> None:
        """Print a line with the held-out loss and metrics of an evaluation, labelled ``eval``.

        If the run keeps an average (EMA) of the weights, the line is labelled ``ema`` and has the values of the
        average; a second line, ``raw``, has those of the weights in training.

        Args:
            record: means over all held-out samples, and step and epoch of the evaluation.
        """
        group = "eval" if record.raw is None else "ema"
        self._row(group, record.step, record.epoch, record.loss, record.metrics, [])
        if record.raw is not None:
            metrics = {name: record.raw[name] for name in record.metrics}
            self._row("raw", record.step, record.epoch, record.raw["loss"], metrics, [])

    def warned(self, text: str) -> None:
        """Print the text of a warning of the run on a line that begins with ``warning:``."""
        self._write(f"warning: {text}")

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Print nothing at the end of the run: the last step and the last evaluation are already printed.

        Args:
            summary: results of the run, the content of ``summary.json``; not used.
        """

    def close(self) -> None:
        """Flush the stream to which lines on the run's progress are printed; the stream stays open."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def _row(
        self, group: str, step: int, epoch: int, loss: float, metrics: Mapping[str, float], cells: Sequence[str]
    ) -> None:
        lines = []
        if self._columns != tuple(metrics):
            self._columns = tuple(metrics)
            names = "".join(f"{name:>{_width(name)}}" for name in metrics)
            ends = f"{'samples/s':>12}{'time':>9}{'ETA':>9}" + f"{'MFU':>8}" * self._utilised
            lines.append(f"{'group':<5} {'step':>8} {'epoch':>6} {'loss':>10}{names}{ends}")
        values = "".join(f"{format_number(value):>{_width(name)}}" for name, value in metrics.items())
        ends = "".join(f"{cell:>{width}}" for cell, width in zip(cells, (12, 9, 9, 8), strict=False))
        self._write(*lines, f"{group:<5} {step:>8} {epoch:>6} {format_number(loss):>10}{values}{ends}")

    def _write(self, *lines: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()


class LiveDisplay:
    """Listener of a run's events that redraws two lines of a terminal with the newest step.

    The run's header is printed once before; evaluations and warnings scroll above the two lines.

    Args:
        stream: the terminal to print to.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._header: RunHeader | None = None
        self._last: tuple[StepRecord, Pace] | None = None
        self._drawn = float("-inf")

    def started(self, header: RunHeader) -> None:
        """Print the run's title and derived settings, and start the live display of its progress.

        Args:
            header: title, settings by name, and number of steps of the run.
        """
        from rich.table import Table

        self._header = header
        table = Table(title=header.title, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="dim")
        table.add_column()
        for name, value in header.derived.items():
            table.add_row(name, value)
        with contextlib.suppress(OSError):
            self._console.print(table)
            self._live.start()
        self._draw()

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        """Redraw the live display with the record of one step, unless it was drawn less than 0.1 s ago.

        Args:
            record: loss, metrics, number and epoch of the step.
            pace: samples a second, and elapsed and remaining seconds of the run.
        """
        self._last = record, pace
        if time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._draw()

    def evaluated(self, record: EvalRecord) -> None:
        """Print a line with the held-out loss and metrics of an evaluation above the live display.

        If the run keeps an average (EMA) of the weights, the line has the values of the average, and a second line
        those of the weights in training.

        Args:
            record: means over all held-out samples, and step and epoch of the evaluation.
        """
        where = f"held out  epoch {record.epoch}  step {record.step}"
        which = "" if record.raw is None else "  ema"
        self._print(f"{where}{which}  {_numbers(record.loss, record.metrics)}", "green")
        if record.raw is not None:
            values = dict(record.raw)
            self._print(f"{where}  raw  {_numbers(values.pop('loss'), values)}", "green")

    def warned(self, text: str) -> None:
        """Print the text of a warning, in yellow, above the live display of the run's progress."""
        self._print(f"warning: {text}", "yellow")

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Draw the live display of the run's progress once more, with the last step.

        Args:
            summary: results of the run, the content of ``summary.json``; not shown.
        """
        self._draw()

    def close(self) -> None:
        """Stop the live display of the run's progress and show the terminal's cursor again."""
        # Stopping shows the cursor again: needed after errors too.
        with contextlib.suppress(OSError):
            self._draw()
            self._live.stop()

    def _print(self, text: str, style: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, style=style, markup=False)

    def _draw(self) -> None:
        if self._header is None or not self._live.is_started:
            return
        with contextlib.suppress(OSError):
            self._live.update(_lines(self._header, self._last), refresh=True)
        self._drawn = time.monotonic()


def _lines(header: RunHeader, last: tuple[StepRecord, Pace] | None) -> Group:
    """Return the two live lines: progress bar with ETA, and loss, metrics and speed."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    record, pace = last or (None, None)
    step, total = record.step if record else 0, header.total_steps
    bar = Table.grid(padding=(0, 2), expand=False)
    epoch = f"epoch {record.epoch}" if record else "starting"
    eta = f"ETA {format_seconds(pace.remaining)}" if pace else ""
    bar.add_row(
        Text(epoch, no_wrap=True),
        ProgressBar(total=None if total is None else max(total, 1), completed=step, width=30),
        Text(f"{step}/{total}" if total is not None else f"{step}", no_wrap=True),
        Text(eta, style="cyan", no_wrap=True),
    )
    if record is None or pace is None:
        return Group(bar)
    speed = f"{pace.samples_per_second:,.0f} samples/s"
    if MFU in pace.device:
        speed += f"  MFU {pace.device[MFU]:.1%}"
    return Group(bar, Text(f"{_numbers(record.loss, record.metrics)}  {speed}", no_wrap=True, overflow="ellipsis"))


def _numbers(loss: float, metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {format_number(value)}" for name, value in {"loss": loss, **metrics}.items())


def _width(name: str) -> int:
    return max(len(name) + 2, 12)


def format_number(value: float) -> str:
    """Format a number with four decimals; if its absolute value is below 0.001 or from 100,000 on, with an exponent.

    0, infinities and NaN have no exponent.

    >>> format_number(0.43211), format_number(2e-7), format_number(3e6), format_number(0.0), format_number(float("nan"))
    ('0.4321', '2.000e-07', '3.000e+06', '0.0000', 'nan')
    """
    return f"{value:.3e}" if value and not 1e-3 <= abs(value) < 1e5 and abs(value) != float("inf") else f"{value:.4f}"


def format_seconds(seconds: float) -> str:
    """Format seconds as ``m:ss`` or ``h:mm:ss``, ``-:--`` if negative, 10⁸ (three years) and more, or NaN.

    >>> format_seconds(7.6), format_seconds(75), format_seconds(3 * 3600 + 62), format_seconds(float("inf"))
    ('0:08', '1:15', '3:01:02', '-:--')
    """
    if not 0 <= seconds < 1e8:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
