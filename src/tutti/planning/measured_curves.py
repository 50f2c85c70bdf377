"""Seconds from measured curves: between their points, and of collectives over other numbers of ranks."""

from __future__ import annotations

import numpy as np

from tutti.workload.machine_file import Curve


def curve_seconds(curve: Curve, size: float) -> float:
    """Return the seconds of a call of a given size, by interpolation in a measured curve of seconds over size.

    Between points the logarithms are interpolated; a smaller size takes the seconds of the first point, a larger one
    the rate (size a second) of the last. A curve without points is its fitted line.

    Args:
        curve: measured points of seconds over size, and a line fitted to them.
        size: work or bytes of one call, in the curve's unit.
    """
    if not curve.points:
        return curve.seconds(size)
    sizes = [point.size for point in curve.points]
    seconds = [point.seconds for point in curve.points]
    if size <= sizes[0]:
        return seconds[0]
    if size >= sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(seconds))))


def kernel_seconds(curve: Curve, size: float, least: float) -> float:
    """Return the seconds of a kernel call of a given size, by interpolation in a measured curve of seconds over size.

    From the curve's first point on they are those of ``curve_seconds``. Below it they fall on a straight line to
    ``least`` at size 0, so that small micro-batches of a small model cost less than the smallest measured call.

    Args:
        curve: measured points of seconds over size, and a line fitted to them.
        size: work or bytes of one call, in the curve's unit.
        least: seconds of a call on next to no data.

    >>> from tutti.workload.machine_file import CurvePoint
    >>> points = (CurvePoint(100.0, 1e-3, 0.0, 1), CurvePoint(200.0, 2e-3, 0.0, 1))
    >>> round(kernel_seconds(Curve("FLOP", points, 1e5, 0.0, 0.0), 10.0, 1e-5), 6)
    0.000109
    """
    if not curve.points or size >= curve.points[0].size:
        return curve_seconds(curve, size)
    first = curve.points[0]
    fixed = min(least, first.seconds)
    return fixed + (first.seconds - fixed) * size / first.size


def ring_scaled_seconds(curve: Curve, size: float, known: int, ranks: int) -> float:
    """Return the seconds of a collective over some ranks, scaled from a measurement over another number of ranks.

    The scale is that of a ring of N ranks: latency grows as N − 1, and the rest of the seconds as (N − 1)/N. The
    latency is the curve's seconds at one byte.

    Args:
        curve: measured seconds of the collective over the bytes of its whole tensor.
        size: bytes of the whole tensor.
        known: number of ranks of the measurement, at least 2.
        ranks: number of ranks for which the seconds are returned.
    """
    whole = curve_seconds(curve, size)
    if known == ranks:
        return whole
    fixed = curve_seconds(curve, 1.0)
    moved = max(whole - fixed, 0.0) * ((ranks - 1) / ranks) / ((known - 1) / known)
    return fixed * (ranks - 1) / (known - 1) + moved
