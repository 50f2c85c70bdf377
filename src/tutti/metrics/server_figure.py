"""Plot the statistics of a run's parameter servers: staleness, updates a second, bytes. Needs the extra ``plot``."""

from __future__ import annotations

import importlib.util
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_BLUE, _GREEN, _ORANGE = "#0072B2", "#009E73", "#D55E00"
_MOST_BARS, _MOST_POINTS = 32, 80


def can_draw() -> bool:
    """Return whether matplotlib, which ``server_figure`` needs, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def total_staleness(servers: Sequence[Mapping[str, Any]]) -> Counter[int]:
    """Return the number of updates of parameter servers by their staleness, summed over the servers.

    Staleness is the number of updates made between a logical worker's read of the parameters and its own update.

    Args:
        servers: the statistics of each server; ``staleness`` maps a staleness to its number of updates.

    >>> total_staleness([{"staleness": {"0": 2, "3": 1}}, {"staleness": {"3": 4}}, {}])
    Counter({3: 5, 0: 2})
    """
    total: Counter[int] = Counter()
    for server in servers:
        total.update({int(tau): int(count) for tau, count in server.get("staleness", {}).items()})
    return total


def staleness_bars(seen: Mapping[int, int]) -> list[tuple[str, int]]:
    """Divide updates of parameter servers into at most 32 bars of a histogram over staleness.

    Args:
        seen: number of updates by their staleness, which is the number of other updates between a logical worker's read
            of the parameters and its own update; at least one entry.

    Returns:
        A pair for each bar, by growing staleness from 0: its label, the least staleness in the bar as text, and its
        number of updates, which may be 0. Bars are of equal width, and cover staleness up to the 99 % quantile plus 1.
        The last bar also counts all updates of larger staleness, and its label then ends in ``+``.

    Raises:
        ValueError: ``seen`` is empty.

    >>> staleness_bars({0: 600, 1: 400, 2: 3, 700: 1})
    [('0', 600), ('1', 400), ('2+', 4)]
    """
    largest = max(seen)
    end = min(largest, _quantile(seen, 0.99) + 1)
    wide = math.ceil((end + 1) / _MOST_BARS)
    bars: Counter[int] = Counter()
    for tau, count in seen.items():
        bars[min(tau, end) // wide] += count
    more = "+" if end < largest else ""
    return [(f"{bar * wide}{more if bar == max(bars) else ''}", bars[bar]) for bar in range(max(bars) + 1)]


def update_rates(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """Return the rate of updates over time, as means over at most ``most`` intervals between the given points.

    An interval begins where the one before it ends, and ends at the first point that is at least 1/``most`` of the
    whole time later. A last interval that would be shorter is left out.

    Args:
        points: pairs (seconds, updates so far), in order of time.
        most: largest number of intervals.

    Returns:
        A list with a pair for each interval: the middle of the interval in seconds, and updates a second; empty for
        fewer than two points.

    >>> update_rates([(0, 0), (1, 10), (2, 30), (4, 40)])
    [(0.5, 10.0), (1.5, 20.0), (3.0, 5.0)]
    """
    if len(points) < 2:
        return []
    marks, width = [points[0]], (points[-1][0] - points[0][0]) / most
    for point in points[1:]:
        if point[0] > marks[-1][0] and point[0] - marks[-1][0] >= width:
            marks.append(point)
    return [((a + b) / 2, (done - before) / (b - a)) for (a, before), (b, done) in pairwise(marks)]


def server_figure(servers: Sequence[Mapping[str, Any]], points: Sequence[tuple[float, float]], title: str) -> bytes:
    """Draw statistics of parameter servers as an SVG file: staleness (if measured), updates a second, and bytes.

    Args:
        servers: the statistics of each server, of which any may be missing: ``staleness`` (number of updates by their
            staleness, a number as text), ``bytes`` (read from the server and pushed to it, together), and
            ``updates_per_second``.
        points: pairs (seconds of training, updates so far) of the run, in order.
        title: text above all panels.

    Returns:
        The file's bytes; equal for equal arguments. For fewer than two points the panel of rates has only a text.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    seen = total_staleness(servers)
    number = 3 if seen else 2
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "tutti", "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(4.2 * number, 3.6), layout="constrained", facecolor="white")
        *first, rates, moved = figure.subplots(1, number)
        for axes in first:
            _draw_staleness(axes, seen)
        _draw_rates(rates, points)
        _draw_bytes(moved, servers)
        figure.suptitle(title, fontsize=12)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _draw_staleness(axes: Axes, seen: Mapping[int, int]) -> None:
    bars, total = staleness_bars(seen), sum(seen.values())
    axes.bar(range(len(bars)), [100 * count / total for _, count in bars], color=_BLUE)
    every = math.ceil(len(bars) / 10)
    axes.set_xticks(range(0, len(bars), every), [label for label, _ in bars[::every]])
    mean = sum(tau * count for tau, count in seen.items()) / total
    stated = f"mean {mean:.1f}, 99 % at most {_quantile(seen, 0.99)}, largest {max(seen)}"
    axes.set_title(f"staleness of updates\n{stated}", fontsize=9)
    axes.set(xlabel="updates between reading and pushing", ylabel="% of updates")


def _draw_rates(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    found = update_rates(points)
    stated = "too short a run"
    if found:
        (begin, before), (end, done) = points[0], points[-1]
        stated = f"mean {(done - before) / (end - begin):,.0f}"
        axes.plot([at for at, _ in found], [rate for _, rate in found], color=_GREEN, linewidth=2)
        axes.set_ylim(bottom=0)
    axes.set_title(f"updates a second\n{stated}", fontsize=9)
    axes.set(xlabel="seconds of training", ylabel="updates/s")


def _draw_bytes(axes: Axes, servers: Sequence[Mapping[str, Any]]) -> None:
    moved = [int(server.get("bytes", 0)) for server in servers]
    bars = axes.barh([f"server {number}" for number in range(len(servers))], [count / 2**20 for count in moved])
    rates = [server.get("updates_per_second") for server in servers]
    labels = [
        _binary(count) + (f", {rate:,.0f} updates/s" if rate else "") for count, rate in zip(moved, rates, strict=True)
    ]
    for bar in bars:
        bar.set_color(_ORANGE)
    axes.bar_label(bars, labels, fontsize=8, padding=3)
    axes.margins(x=0.5)
    axes.invert_yaxis()
    axes.set_title(f"bytes of each server\n{_binary(sum(moved))} in all, read and pushed", fontsize=9)
    axes.set(xlabel="MiB")


def _quantile(seen: Mapping[int, int], part: float) -> int:
    left = part * sum(seen.values())
    for tau, count in sorted(seen.items()):
        left -= count
        if left <= 0:
            return tau
    return max(seen)


def _binary(count: float) -> str:
    """
    >>> _binary(3 << 20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
