"""Timeline of all devices: segments of time by phase, split into work, communication and idle time, and drawn.

Times are seconds of one clock. Pure: no torch, no files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from tutti.errors import counted

WAITING = "waiting"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS: Mapping[str, str] = {
    "forward": "#0072B2",
    "backward": "#009E73",
    "weight": "#56B4E9",
    "update": "#CC79A7",
    "data": "#F0E442",
    "exchange": "#999999",
    "communication": "#D55E00",
    "idle": "#EEEEEE",
    "other": "#FFFFFF",
}
WORK = ("forward", "backward", "weight")
_ENDLESS = 1e15
"""Numbers of a trace from here on, and NaN, are mistakes."""


class TimelineSegment(NamedTuple):
    """An interval of time that one device spent in one phase of training; intervals of nested phases are cut out.

    Attributes:
        phase: name of the phase, a key of ``COLOURS`` such as ``forward``; or ``WAITING``, for a wait in a collective.
        start, end: seconds, on the clock of the timeline.
        call: the collective that a waiting segment waits for; empty for others.
        ranks: the ranks that take part in this collective.
    """

    phase: str
    start: float
    end: float
    call: str = ""
    ranks: tuple[int, ...] = ()


Row = Sequence[TimelineSegment]


def resolve_waits(rows: Sequence[Row], ranks: Sequence[int] | None = None) -> list[list[TimelineSegment]]:
    """Split each wait for a collective into ``idle``, until the last rank has entered it, and ``communication``.

    Waits of different ranks belong to one collective if they have the same name and ranks (``call``, ``ranks``) and
    each is the n-th such wait on its rank. If a rank of the collective has no wait for it (it sends and goes on), the
    time of its entry is unknown, and the whole wait of the other ranks counts as idle.

    Args:
        rows: the ``TimelineSegment``s of each rank, in order and on one clock: intervals of time in one phase of
            training, such as ``forward`` or ``waiting`` (for a collective).
        ranks: the rank of each row, which differs from its index after ranks were lost; None for 0, 1, 2 ….

    Returns:
        The segments of each row, none of which has the phase ``waiting``.

    >>> a, b = TimelineSegment("waiting", 0, 5, "sum", (0, 1)), TimelineSegment("waiting", 4, 5, "sum", (0, 1))
    >>> [[(s.phase, s.start, s.end) for s in row] for row in resolve_waits([[a], [b]])]
    [[('idle', 0, 4), ('communication', 4, 5)], [('communication', 4, 5)]]
    """
    arrivals: dict[tuple[str, tuple[int, ...], int], dict[int, float]] = defaultdict(dict)
    for rank, row in zip(range(len(rows)) if ranks is None else ranks, rows, strict=True):
        for key, segment in _numbered(row):
            arrivals[key].setdefault(rank, segment.start)
    return [list(_split(row, arrivals)) for row in rows]


def _numbered(row: Row) -> Iterator[tuple[tuple[str, tuple[int, ...], int], TimelineSegment]]:
    """Yield each waiting segment with its key: call, ranks, and count of equal calls on this rank so far."""
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for segment in row:
        if segment.phase == WAITING:
            call = segment.call, segment.ranks
            seen[call] += 1
            yield (*call, seen[call]), segment


def _split(row: Row, arrivals: Mapping[tuple[str, tuple[int, ...], int], dict[int, float]]) -> Row:
    numbered = _numbered(row)
    found: list[TimelineSegment] = []
    for segment in row:
        if segment.phase != WAITING:
            found.append(segment)
            continue
        came = arrivals[next(numbered)[0]]
        everybody = came.keys() >= set(segment.ranks)
        last = max(came.values()) if everybody else segment.end
        middle = min(max(last, segment.start), segment.end)
        found += [
            part
            for part in (
                segment._replace(phase="idle", end=middle),
                segment._replace(phase="communication", start=middle),
            )
            if part.end > part.start
        ]
    return found


def span(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the start of the first and the end of the last segment of a timeline, in seconds.

    Args:
        rows: the ``TimelineSegment``s (intervals of time in one phase of training) of each device, on one clock.

    Returns:
        A pair (start, end) in seconds, on the clock of the segments.

    Raises:
        ValueError: there are no segments.
    """
    segments = [segment for row in rows for segment in row]
    if not segments:
        raise ValueError("nothing was traced")
    return min(s.start for s in segments), max(s.end for s in segments)


def shares(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Return each device's time by phase, as fractions of the time from the first to the last segment of all devices.

    Args:
        rows: the ``TimelineSegment``s (intervals of time in one phase of training, such as ``forward``) of each
            device.

    Returns:
        A dict for each device: the fraction of each of its phases by name, and ``other``, that of the time outside all
        segments; ``{"other": 1.0}`` for a device without segments. If all segments have length 0, ``other`` is 1.

    Raises:
        ValueError: no device has a segment.

    >>> shares([[TimelineSegment("forward", 0, 1)], [TimelineSegment("forward", 0, 4)]])
    [{'forward': 0.25, 'other': 0.75}, {'forward': 1.0, 'other': 0.0}]
    """
    begin, end = span(rows)
    length = end - begin or 1.0
    found = []
    for row in rows:
        spent: dict[str, float] = defaultdict(float)
        for segment in row:
            spent[segment.phase] += (segment.end - segment.start) / length
        found.append({**spent, "other": max(0.0, 1 - sum(spent.values()))})
    return found


def table(rows: Sequence[Row]) -> str:
    """Return a text table of each phase's share of a timeline's time in per cent, one line a device.

    The last line is the mean share of time that devices spend outside forward and backward.

    Args:
        rows: the ``TimelineSegment``s (intervals of time in one phase of training) of each rank, in order.

    Raises:
        ValueError: there are no segments.
    """
    begin, end = span(rows)
    parts = shares(rows)
    phases = [phase for phase in COLOURS if any(part.get(phase, 0) > 0 for part in parts)]
    lines = [f"{'device':>6} " + " ".join(f"{phase:>{max(8, len(phase))}}" for phase in phases)]
    for rank, part in enumerate(parts):
        lines.append(f"{rank:>6} " + " ".join(f"{part.get(p, 0):>{max(8, len(p))}.1%}" for p in phases))
    busy = sum(part.get(phase, 0) for part in parts for phase in WORK) / len(parts)
    lines.append(
        f"{1 - busy:.1%} of {counted(len(parts), 'device')} × {end - begin:.3f} s was neither forward nor backward"
    )
    return "\n".join(lines) + "\n"


def chrome(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a timeline as a trace in Chrome's JSON format, for ui.perfetto.dev and chrome://tracing.

    Times in the trace are microseconds from the start of the first segment.

    Args:
        rows: the ``TimelineSegment``s (intervals of time in one phase of training) of each rank, in order.

    Returns:
        A JSON object with the keys ``traceEvents`` (a list with an event for each segment, and one with each device's
        name) and ``displayTimeUnit``.

    Raises:
        ValueError: there are no segments.
    """
    begin, _ = span(rows)
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"device {rank}"}}
        for rank in range(len(rows))
    ]
    for rank, row in enumerate(rows):
        for s in row:
            event = {"name": s.phase, "ph": "X", "pid": 0, "tid": rank}
            event |= {"ts": round(1e6 * (s.start - begin), 1), "dur": round(1e6 * (s.end - s.start), 1)}
            events.append({**event, "args": {"call": s.call}} if s.call else event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def segments_of_chrome(trace: Mapping[str, Any]) -> dict[int, list[TimelineSegment]]:
    """Return the segments of a trace in Chrome's JSON format, as ``chrome`` writes it, in seconds.

    An event's thread number ``tid`` is the device, and its ``name`` the phase; ``pid`` is not read. In a trace of
    another program, such as of PyTorch's profiler, threads would pass for devices and operators for phases. Times stay
    on the trace's clock, whose zero ``chrome`` puts at the first segment. ``call`` and ``ranks`` of the segments are
    empty.

    Args:
        trace: the JSON object. Complete events (``"ph": "X"``) count if ``tid``, ``ts`` and ``dur`` are numbers below
            1e15, and ``tid`` and ``dur`` are not negative; all others are left out.

    Returns:
        The segments by number of the device, each list in the order of the events; empty without any.
    """
    events = trace.get("traceEvents")
    rows: dict[int, list[TimelineSegment]] = {}
    for event in events if isinstance(events, list) else ():
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        numbers: list[Any] = [event.get(key) for key in ("tid", "ts", "dur")]
        if not all(type(number) in (int, float) and abs(number) < _ENDLESS for number in numbers):
            continue
        device, start, length = numbers
        if device >= 0 and length >= 0:
            segment = TimelineSegment(str(event.get("name")), start / 1e6, (start + length) / 1e6)
            rows.setdefault(int(device), []).append(segment)
    return rows


_LEFT, _RIGHT, _HEIGHT, _GAP, _WIDTH = 80, 20, 26, 8, 1000


def timeline_svg(rows: Sequence[Row], title: str) -> str:
    """Draw a timeline as an SVG document: one row a device, time to the right, phases by colour.

    Args:
        rows: the ``TimelineSegment``s (intervals of time in one phase of training) of each rank, in order.
        title: text above the rows.

    Returns:
        The document as text.

    Raises:
        ValueError: there are no segments.
    """
    begin, end = span(rows)
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin or 1.0)
    phases = [phase for phase in COLOURS if any(s.phase == phase for row in rows for s in row)]
    top = 64
    bottom = top + len(rows) * (_HEIGHT + _GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 36}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{bottom + 36}" fill="#FFFFFF"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    at = _LEFT
    for phase in phases:
        out.append(f'<rect x="{at}" y="36" width="12" height="12" fill="{COLOURS[phase]}" stroke="#BBBBBB"/>')
        out.append(f'<text x="{at + 17}" y="47" font-size="12">{phase}</text>')
        at += 44 + 7 * len(phase)
    for rank, row in enumerate(rows):
        y = top + rank * (_HEIGHT + _GAP)
        out.append(f'<text x="{_LEFT - 8}" y="{y + 18}" font-size="12" text-anchor="end">device {rank}</text>')
        out.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_HEIGHT}" '
            'fill="#FFFFFF" stroke="#BBBBBB"/>'
        )
        for s in row:
            left, width = _LEFT + (s.start - begin) * scale, (s.end - s.start) * scale
            label = escape(f"{s.phase} {1e3 * (s.end - s.start):.2f} ms {s.call}".strip())
            out.append(
                f'<rect x="{left:.2f}" y="{y}" width="{max(width, 0.05):.2f}" height="{_HEIGHT}" '
                f'fill="{COLOURS.get(s.phase, "#FFFFFF")}"><title>{label}</title></rect>'
            )
    out += list(_axis(begin, end, scale, bottom))
    return "\n".join([*out, "</svg>", ""])


def _axis(begin: float, end: float, scale: float, y: float) -> Iterator[str]:
    """Yield the time axis below the rows: about ten ticks at round numbers of milliseconds."""
    length = 1e3 * (end - begin)
    step = next(s for s in (m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5)) if length / s <= 10)
    mark = 0
    while mark * step <= length:
        x = _LEFT + mark * step / 1e3 * scale
        yield f'<line x1="{x:.2f}" y1="{y - 4}" x2="{x:.2f}" y2="{y + 2}" stroke="#555555"/>'
        yield f'<text x="{x:.2f}" y="{y + 16}" font-size="11" text-anchor="middle">{mark * step:g}</text>'
        mark += 1
    yield f'<text x="{_LEFT - 8}" y="{y + 16}" font-size="11" text-anchor="end">ms</text>'
