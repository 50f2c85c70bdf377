"""What parameter servers saw in a run, as one picture: staleness, updates a second, bytes. Pure: no torch, no files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import escape

# Okabe and Ito's colours, told apart by people who do not see all of them.
_BLUE, _GREEN, _ORANGE, _INK, _FAINT = "#0072B2", "#009E73", "#D55E00", "#333333", "#DDDDDD"
_PANEL, _HEIGHT, _LEFT, _TOP, _SPACE, _HEAD = 300, 190, 74, 84, 60, 30
_MOST_BARS, _MOST_POINTS = 32, 80


def staleness(servers: Sequence[Mapping[str, Any]]) -> Counter[int]:
    """How often which staleness was seen, over all servers.

    >>> staleness([{"staleness": {"0": 2, "3": 1}}, {"staleness": {"3": 4}}, {}])
    Counter({3: 5, 0: 2})
    """
    total: Counter[int] = Counter()
    for server in servers:
        total.update({int(tau): int(count) for tau, count in server.get("staleness", {}).items()})
    return total


def rates(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """Updates a second over time, from (seconds, updates so far) in order: means over at most ``most`` stretches.

    >>> rates([(0, 0), (1, 10), (2, 30), (4, 40)])
    [(0.5, 10.0), (1.5, 20.0), (3.0, 5.0)]
    """
    if len(points) < 2:
        return []
    marks, width = [points[0]], (points[-1][0] - points[0][0]) / most
    for point in points[1:]:
        if point[0] > marks[-1][0] and point[0] - marks[-1][0] >= width:
            marks.append(point)
    return [((a + b) / 2, (done - before) / (b - a)) for (a, before), (b, done) in pairwise(marks)]


def svg(servers: Sequence[Mapping[str, Any]], points: Sequence[tuple[float, float]], title: str) -> str:
    """Panels side by side: staleness where there is any, updates a second, bytes of each server.

    Args:
        servers: what each tells of itself: ``staleness``, ``bytes``, ``updates_per_second``.
        points: (seconds, updates so far) of the run, in order.
        title: above all.
    """
    panels = [
        *([_histogram(staleness(servers))] if staleness(servers) else []),
        _curve(points),
        _bytes(servers),
    ]
    width, height = len(panels) * (_LEFT + _PANEL) + _HEAD, _TOP + _HEIGHT + _SPACE
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>',
        f'<text x="{_LEFT}" y="{_HEAD}" font-size="15">{escape(title)}</text>',
    ]
    for place, panel in enumerate(panels):
        out += [f'<g transform="translate({place * (_LEFT + _PANEL) + _LEFT}, {_TOP})">', *panel, "</g>"]
    return "\n".join([*out, "</svg>", ""])


def _histogram(seen: Counter[int]) -> Iterator[str]:
    total, largest = sum(seen.values()), max(seen)
    # The last bar has all of a long tail.
    end = min(largest, _quantile(seen, 0.99) + 1)
    wide = math.ceil((end + 1) / _MOST_BARS)
    bars: Counter[int] = Counter()
    for tau, count in seen.items():
        bars[min(tau, end) // wide] += count
    mean = sum(tau * count for tau, count in seen.items()) / total
    yield _heading("staleness of updates", f"mean {mean:.1f}, 99 % at most {_quantile(seen, 0.99)}, largest {largest}")
    top, number = 100 * max(bars.values()) / total, max(bars) + 1
    yield from _grid(top, "% of updates")
    slot = _PANEL / number
    for bar, count in sorted(bars.items()):
        first, last = bar * wide, bar * wide + wide - 1
        high = _HEIGHT * 100 * count / total / _ceiling(top)
        said = f"{first} or more" if last >= end < largest else f"{first}" if wide == 1 else f"{first} to {last}"
        yield (
            f'<rect x="{(bar + 0.08) * slot:.2f}" y="{_HEIGHT - high:.2f}" width="{0.84 * slot:.2f}" '
            f'height="{high:.2f}" fill="{_BLUE}"><title>{said}: {count} updates</title></rect>'
        )
    for bar in range(0, number, math.ceil(number / 10)):
        more = "+" if end < largest and bar == number - 1 else ""
        yield _under((bar + 0.5) * slot, f"{bar * wide}{more}")
    yield _label("updates between reading and pushing")


def _curve(points: Sequence[tuple[float, float]]) -> Iterator[str]:
    found = rates(points)
    said = "too short a run"
    if found:
        (begin, before), (end, done) = points[0], points[-1]
        said = f"mean {(done - before) / (end - begin):,.0f}"
    yield _heading("updates a second", said)
    top, end = max((rate for _, rate in found), default=1.0) or 1.0, points[-1][0] if found else 1.0
    yield from _grid(top, "updates/s")
    line = " ".join(f"{_PANEL * at / end:.2f},{_HEIGHT * (1 - rate / _ceiling(top)):.2f}" for at, rate in found)
    yield f'<polyline points="{line}" fill="none" stroke="{_GREEN}" stroke-width="2" stroke-linejoin="round"/>'
    for mark in _marks(end, 6):
        yield _under(_PANEL * mark / end, f"{mark:g}")
    yield _label("seconds of training")


def _bytes(servers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    moved = [int(server.get("bytes", 0)) for server in servers]
    yield _heading("bytes of each server", f"{_binary(sum(moved))} in all, read and pushed")
    slot = min(_HEIGHT / len(moved), 46)
    for number, (server, count) in enumerate(zip(servers, moved, strict=True)):
        y, wide = number * slot, (_PANEL - 110) * count / max(*moved, 1)
        middle = f"{y + slot / 2 + 4:.2f}"
        yield f'<rect x="0" y="{y + 0.14 * slot:.2f}" width="{wide:.2f}" height="{0.72 * slot:.2f}" fill="{_ORANGE}"/>'
        yield f'<text x="-8" y="{middle}" font-size="11" text-anchor="end">server {number}</text>'
        rate = server.get("updates_per_second")
        said = _binary(count) + (f", {rate:,.0f} updates/s" if rate else "")
        yield f'<text x="{wide + 6:.2f}" y="{middle}" font-size="11">{said}</text>'


def _heading(name: str, said: str) -> str:
    return (
        f'<text x="0" y="-30" font-size="13" font-weight="bold">{name}</text>'
        f'<text x="0" y="-13" font-size="11" fill="#666666">{said}</text>'
    )


def _grid(top: float, unit: str) -> Iterator[str]:
    """Lines at round numbers up to what ``_ceiling`` makes of ``top``."""
    ceiling = _ceiling(top)
    for mark in _marks(ceiling, 5):
        y = _HEIGHT * (1 - mark / ceiling)
        yield f'<line x1="0" y1="{y:.2f}" x2="{_PANEL}" y2="{y:.2f}" stroke="{_FAINT}"/>'
        yield f'<text x="-6" y="{y + 4:.2f}" font-size="11" text-anchor="end">{mark:,g}</text>'
    yield f'<text x="{-_HEIGHT / 2}" y="-46" font-size="11" text-anchor="middle" transform="rotate(-90)">{unit}</text>'


def _under(x: float, text: str) -> str:
    return f'<text x="{x:.2f}" y="{_HEIGHT + 16}" font-size="11" text-anchor="middle">{text}</text>'


def _label(text: str) -> str:
    return f'<text x="{_PANEL / 2}" y="{_HEIGHT + 36}" font-size="11" text-anchor="middle">{text}</text>'


def _step(length: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10 … that cuts ``length`` into at most ``most``."""
    return next(s for s in (m * 10.0**e for e in range(-9, 15) for m in (1, 2, 5)) if length / s <= most)


def _marks(length: float, most: int) -> list[float]:
    """
    >>> _marks(37, 5)
    [0.0, 10.0, 20.0, 30.0]
    """
    step = _step(length, most)
    return [round(number * step, 9) for number in range(int(length / step + 1e-9) + 1)]


def _ceiling(top: float) -> float:
    step = _step(top, 5)
    return step * math.ceil(top / step - 1e-9)


def _quantile(seen: Counter[int], part: float) -> int:
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
