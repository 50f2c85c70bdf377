"""Time calls on a device, and draw the line of seconds over size."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tutti.config.verbosity import is_quiet
from tutti.device import synchronize
from tutti.workload.machine_file import Curve, CurvePoint, Figure

_LEAST, _MOST = 5, 100
_LARGE = 2**18
"""Bytes of a message that shows the rate of a link."""


@dataclass
class Findings:
    """Measured figures (single numbers) and curves (seconds over size) of a machine.

    Attributes:
        show: print each figure and curve to standard error when it is added.
        figures: figures by name, such as ``disk/read``.
        curves: curves by name, such as ``device/copy``.
    """

    show: bool = True
    figures: dict[str, Figure] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)

    def add(self, name: str, unit: str, values: Sequence[float]) -> None:
        """Add a number to the measured figures of a machine: the median of some values, with their interquartile range.

        A figure of the same name is replaced. If ``show`` is set, the figure is printed to standard error.

        Args:
            name: name of the figure, such as ``disk/read``.
            unit: unit of the values, such as ``s``, ``byte/s`` or ``ratio``.
            values: measured values, at least one.
        """
        figure = self.figures[name] = Figure(
            statistics.median(values), unit, len(values), quartile_range(values) if len(values) > 1 else None
        )
        self._say(f"{name}: {figure.value:.4g} {unit} (n = {figure.n})")

    def add_curve(self, name: str, unit: str, points: Sequence[CurvePoint]) -> None:
        """Add a curve of seconds over size to the measurements of a machine: the points, and a line fitted to them.

        A curve of the same name is replaced. If ``show`` is set, rate and fixed seconds are printed to standard error.

        Args:
            name: name of the curve, such as ``device/copy``.
            unit: unit of the sizes, such as ``byte`` or ``FLOP``.
            points: median seconds by size.
        """
        curve = self.curves[name] = fit_line(unit, points)
        self._say(f"{name}: {curve.rate:.4g} {unit}/s, {curve.fixed * 1e6:.3g} µs a call")

    def add_link_curve(self, name: str, points: Sequence[CurvePoint]) -> None:
        """Add a curve of a link's seconds over bytes to the measurements of a machine: the points, latency and rate.

        ``fit_link`` computes latency and rate: the rate from large messages, the latency from the smallest message. A
        curve of the same name is replaced. If ``show`` is set, rate and latency are printed to standard error.

        Args:
            name: name of the curve, such as ``links/0-1``.
            points: median seconds of messages by bytes.
        """
        curve = self.curves[name] = fit_link(points)
        self._say(f"{name}: {curve.rate:.4g} byte/s, {curve.fixed * 1e6:.3g} µs a message")

    def _say(self, text: str) -> None:
        if self.show and not is_quiet(os.environ):
            print(f"  {text}", file=sys.stderr, flush=True)

    def content(self) -> dict[str, Any]:
        """Return all measured numbers and curves of a machine as a JSON object.

        Returns:
            ``figures``: name → ``value`` (median), ``unit``, ``n`` (number of measurements), ``spread`` (interquartile
            range) and ``basis`` (where the number comes from: ``measured``). ``curves``: name → ``unit`` of the sizes,
            ``points`` (each ``size``, ``seconds``, ``spread`` and ``n``), and the fitted line's ``rate``, ``fixed``
            seconds and ``error``.
        """
        return {
            "figures": {name: asdict(figure) for name, figure in self.figures.items()},
            "curves": {name: asdict(curve) for name, curve in self.curves.items()},
        }


def fastest(rounds: Sequence[Findings], name: Callable[[str], str], found: Findings) -> None:
    """Add the curves and figures of several rounds of a measurement, each point and figure from its fastest round.

    A round is one measurement of all curves and figures. A process that disturbs one round for seconds, all sizes of a
    curve together, need not disturb a later one. Measures nothing itself.

    Args:
        rounds: the findings of each round, all of seconds and with the same names.
        name: function that maps the name of a curve or figure in ``rounds`` to the name under which it is added.
        found: receives the curves and figures.
    """
    for curve, first in rounds[0].curves.items():
        points = [point for each in rounds for point in each.curves[curve].points]
        sizes = dict.fromkeys(point.size for point in points)
        best = [min((p for p in points if p.size == size), key=lambda point: point.seconds) for size in sizes]
        found.add_curve(name(curve), first.unit, best)
    for figure in rounds[0].figures:
        found.figures[name(figure)] = min((each.figures[figure] for each in rounds), key=lambda one: one.value)


def time_calls(call: Callable[[], object], device: torch.device, seconds: float = 0.15, calls: int = 1) -> list[float]:
    """Measure the seconds of a call several times, after two calls that warm up.

    Args:
        call: function that is timed.
        device: device whose kernels each measurement waits for.
        seconds: time after which no further measurement begins. At least 5 and at most 100 measurements are made.
        calls: number of calls in one measurement, above 1 for a call that is short beside the clock's resolution.

    Returns:
        Seconds of one call, for each measurement.
    """
    found: list[float] = []
    for _ in range(2):
        call()
    synchronize(device)
    end = time.perf_counter() + seconds
    while len(found) < _LEAST or (len(found) < _MOST and time.perf_counter() < end):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        found.append((time.perf_counter() - begin) / calls)
    return found


def curve_point(size: float, seconds: Sequence[float]) -> CurvePoint:
    """Summarise the measurements of one size as a point of a curve of seconds over size.

    Args:
        size: size of one call: FLOP, bytes or parameters.
        seconds: seconds of each measurement, at least two.

    Returns:
        A ``CurvePoint``: ``size``; ``seconds``, the median; ``spread``, the interquartile range in seconds; ``n``, the
        number of measurements.
    """
    return CurvePoint(size, statistics.median(seconds), quartile_range(seconds), len(seconds))


def quartile_range(values: Sequence[float]) -> float:
    """Return the interquartile range (third minus first quartile) of at least two measured values, in their unit.

    >>> quartile_range([1, 2, 3, 4, 5])
    2.0
    """
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return float(high - low)


def fit_line(unit: str, points: Sequence[CurvePoint]) -> Curve:
    """Fit the line seconds = fixed + size / rate to measured points, with least squares of relative errors; fixed ≥ 0.

    Args:
        unit: unit of the sizes, such as ``byte`` or ``FLOP``.
        points: measured seconds by size.

    Returns:
        A ``Curve``: ``unit`` as given, ``points`` sorted by size, ``rate`` (size a second), ``fixed`` (seconds), and
        ``error``, the largest relative error of the line at a point.

    >>> line = fit_line("byte", [CurvePoint(size, 1e-5 + size / 1e9, 0.0, 5) for size in (1e3, 1e5, 1e7)])
    >>> round(line.rate), round(line.fixed * 1e6, 6), round(line.error, 9)
    (1000000000, 10.0, 0.0)
    """
    fixed, slope = _least_squares(points)
    if fixed < 0 or slope <= 0:
        fixed, slope = 0.0, _proportional(points)
    return _curve(unit, points, fixed, slope)


def fit_link(points: Sequence[CurvePoint]) -> Curve:
    """Compute latency (seconds) and rate (bytes a second) of a network link from the times of messages.

    The rate is fitted to messages of 256 KiB and more, if at least two sizes are that large, and to all messages
    otherwise. The latency is the time of the smallest message less its bytes over the rate, 0 at least. Small messages
    do not show the rate: a link that is limited by a token bucket, as in virtual machines, sends a short burst faster.

    Args:
        points: measured seconds by bytes of a message.

    Returns:
        A ``Curve``: ``unit`` (``byte``), ``points`` sorted by size, ``rate``, ``fixed`` (the latency), and ``error``,
        the largest relative error of the line ``fixed + size / rate`` at a point.

    >>> burst = [CurvePoint(size, 1e-4 + max(size - 65536, 0) / 1e7, 0.0, 5) for size in (2**10, 2**16, 2**20, 2**24)]
    >>> round(fit_link(burst).rate / 1e7, 2), round(fit_link(burst).fixed, 6)
    (1.0, 0.0)
    """
    large = [point for point in points if point.size >= _LARGE]
    large = large if len(large) > 1 else list(points)
    # Below 0 where a burst was free.
    _, slope = _least_squares(large)
    slope = slope if slope > 0 else _proportional(large)
    smallest = min(points, key=lambda point: point.size)
    return _curve("byte", points, max(0.0, smallest.seconds - smallest.size * slope), slope)


def _least_squares(points: Sequence[CurvePoint]) -> tuple[float, float]:
    """Return fixed part and slope of the line with the least relative errors."""
    rows = [(1 / point.seconds, point.size / point.seconds) for point in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    return ((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant) if determinant else (0.0, b / bb)


def _proportional(points: Sequence[CurvePoint]) -> float:
    """Return the slope of the line through 0 with the least relative errors."""
    rates = [point.size / point.seconds for point in points]
    return sum(rates) / sum(rate * rate for rate in rates)


def _curve(unit: str, points: Sequence[CurvePoint], fixed: float, slope: float) -> Curve:
    error = max(abs((fixed + point.size * slope) / point.seconds - 1) for point in points)
    return Curve(unit, tuple(sorted(points, key=lambda point: point.size)), 1 / slope, fixed, error)
