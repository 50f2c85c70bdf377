"""Draw a report's charts as SVG that takes its colours from the page, light or dark. Needs the extra ``report``.

Matplotlib is given colours that stand for the page's: text and axes become ``currentColor``, series ``var(--seriesN)``,
parts of a stack ``var(--part-NAME)``. Nothing in the SVG refers to a network.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

SERIES = 6
"""Colours of runs, after which they are repeated."""

PARTS = (
    *("data", "compute", "forward", "backward", "weight", "update", "exchange", "communication", "bubble", "idle"),
    *("evaluation", "save", "start", "restart", "failure", "stopped", "skipped steps", "slow steps", "straggler"),
    *("productive", "other"),
)
"""Parts of a stack that have a colour in the page."""

_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
_MOST_POINTS = 400
_TEXT = "#010203"
_GRID = "#010204"

Point = tuple[float, float]


@dataclass(frozen=True)
class ReportChart:
    """A chart of an HTML report, as SVG.

    Attributes:
        caption: description of the chart in a sentence, which screen readers read.
        svg: the ``<svg>`` element as text.
        wide: whether the chart needs the whole width of the page.
        parts: names of the stacked parts that the chart's legend lists, such as ``forward``; empty for other charts.
    """

    caption: str
    svg: str
    wide: bool = False
    parts: Sequence[str] = ()


@dataclass(frozen=True)
class ChartSeries:
    """One run's line in a chart.

    Attributes:
        number: index of the run in the report, from 0, which gives the line its colour and dashes.
        points: (x, y) in order.
        band: (x, low, high) in order, of the range in which y lies; ``high`` is infinite where nothing bounds it. Empty
            for a line without a band.
        thin: whether the line is drawn thin and with crosses, as of held-out values beside those in training.
    """

    number: int
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    thin: bool = False


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Thin a curve for drawing, by averaging groups of neighbouring points.

    The sizes of two groups differ by at most one point. A curve of at most ``most`` points is copied unchanged.

    Args:
        points: (x, y), in order.
        most: largest number of points, at least 1.

    Returns:
        At most ``most`` points (x, y), each the mean of its group, in order.

    >>> thinned([(0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0)], 2)
    [(0.5, 2.0), (2.5, 6.0)]
    """
    if len(points) <= most:
        return list(points)
    edges = [len(points) * part // most for part in range(most + 1)]
    groups = [points[low:high] for low, high in itertools.pairwise(edges)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def line_chart(
    series: Sequence[ChartSeries],
    x: str,
    y: str,
    caption: str,
    *,
    scale: str = "linear",
) -> ReportChart:
    """Draw a line chart as SVG, one line for each run, thinned to a readable number of points. Needs matplotlib.

    Args:
        series: for each run its number in the report, from 0, which selects colour and dashes, and its (x, y) points,
            at least one. May be empty only for a linear scale.
        x, y: labels of the axes, with units.
        caption: description of the chart in a sentence, which screen readers read.
        scale: scale of the vertical axis, ``linear`` or ``log``; a logarithmic axis shows six decades.

    Returns:
        A ``ReportChart``: ``caption`` as given, and ``svg``, the text of the ``<svg>`` element.
    """

    def draw(axes: Axes) -> None:
        for each in series:
            points = thinned(each.points)
            style: dict[str, Any] = {"color": _series(each.number), "linestyle": _DASHES[each.number % len(_DASHES)]}
            marker = "" if len(points) >= 25 else "x" if each.thin else "o"
            axes.plot(*zip(*points, strict=True), linewidth=0.8 if each.thin else 1.6, marker=marker, ms=3, **style)
        axes.set(xlabel=x, ylabel=y, yscale=scale)
        if scale == "log":
            axes.yaxis.set_major_formatter(lambda height, _: f"{height:g}")
            axes.set_ylim(bottom=max(height for each in series for _, height in each.points) / 1e6)

    return ReportChart(caption, _svg(draw, caption))


def band_chart(
    series: Sequence[ChartSeries], x: str, y: str, caption: str, levels: Sequence[tuple[str, float]] = ()
) -> ReportChart:
    """Draw one line with its band for each run as SVG, and horizontal lines of reference; the vertical axis is log.

    Ends of bands outside of [smallest value / 10, largest value · 10] do not extend the axis, and are cut at its end.
    Needs matplotlib.

    Args:
        series: for each run its number in the report, from 0, which selects colour and dashes, its (x, y) points and
            its band. Values of y that are not above 0 are not drawn; at least one is above 0.
        x, y: labels of the axes, with units.
        caption: description of the chart in a sentence, which screen readers read.
        levels: label and height, above 0, of each horizontal line.

    Returns:
        A ``ReportChart``: ``caption`` as given, and ``svg``, the text of the ``<svg>`` element.
    """
    heights = [height for each in series for _, height in each.points if height > 0]
    heights += [height for _, height in levels]
    ends = [end for each in series for _, *both in each.band for end in both]
    near = [end for end in ends if min(heights) / 10 <= end <= max(heights) * 10]
    bottom, top = min(heights + near) / 1.3, max(heights + near) * 1.3

    def draw(axes: Axes) -> None:
        for each in series:
            points = [(place, height) for place, height in thinned(each.points) if height > 0]
            colour, dashes = _series(each.number), _DASHES[each.number % len(_DASHES)]
            if points:
                marker = "o" if len(points) < 25 else ""
                axes.plot(
                    *zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.6, marker=marker, ms=3
                )
            if each.band:
                lows = thinned([(place, low) for place, low, _ in each.band])
                highs = [min(high, top) for _, high in thinned([(place, high) for place, _, high in each.band])]
                places, floors = zip(*((place, max(low, bottom)) for place, low in lows), strict=True)
                axes.fill_between(places, floors, highs, color=colour, alpha=0.18, linewidth=0)
        for label, height in levels:
            axes.axhline(height, color=_TEXT, linewidth=1, linestyle=":")
            axes.text(0.99, height, label, transform=axes.get_yaxis_transform(), ha="right", va="bottom")
        axes.set(xlabel=x, ylabel=y, yscale="log", ylim=(bottom, top))
        _label_decades(axes.yaxis)

    return ReportChart(caption, _svg(draw, caption))


def law_chart(
    law: Sequence[tuple[float, float, float, float]],
    measured: Sequence[tuple[int | None, float, float]],
    y: str,
    caption: str,
    level: tuple[str, float] | None = None,
) -> ReportChart:
    """Draw a quantity over the batch size as SVG, by a law with its band and as measured. Both axes are logarithmic.

    Needs matplotlib.

    Args:
        law: (batch, value, low, high) along the law's line, in rising order; empty where no law is known.
        measured: (number of the run in the report, from 0, which selects its colour; batch; value) of each measured
            point; None for the number of a run that the report does not show. May be empty if ``law`` is not.
        y: label of the vertical axis, with its unit.
        caption: description of the chart in a sentence, which screen readers read.
        level: label and batch of a vertical line; None for none.

    Returns:
        A ``ReportChart``: ``caption`` as given, and ``svg``, the text of the ``<svg>`` element.
    """

    def draw(axes: Axes) -> None:
        if law:
            batches, values, lows, highs = zip(*law, strict=True)
            axes.plot(batches, values, color=_TEXT, linewidth=1.4)
            axes.fill_between(batches, lows, highs, color=_TEXT, alpha=0.15, linewidth=0)
        for number, batch, value in measured:
            colour, filled = (_TEXT, "none") if number is None else (_series(number), "full")
            axes.plot([batch], [value], "o", ms=7, color=colour, fillstyle=filled)
        if level is not None:
            axes.axvline(level[1], color=_TEXT, linewidth=1, linestyle=":")
            place = axes.get_xaxis_transform()
            axes.text(level[1], 0.98, f" {level[0]}", transform=place, ha="left", va="top")
        axes.set(xscale="log", yscale="log", xlabel="batch, samples", ylabel=y)
        axes.margins(0.08)
        _label_decades(axes.xaxis)
        _label_decades(axes.yaxis)

    return ReportChart(caption, _svg(draw, caption))


def contour_chart(
    offsets: Sequence[float], values: Sequence[Sequence[float]], levels: Sequence[float], caption: str
) -> ReportChart:
    """Draw lines of equal loss, or of another value, over a square plane as SVG; every second line is labelled.

    Needs matplotlib.

    Args:
        offsets: coordinates of the grid on both axes, in rising order.
        values: a row for each offset of the vertical axis, with a value for each offset of the horizontal one.
        levels: values of the lines, in rising order.
        caption: description of the chart in a sentence, which screen readers read.

    Returns:
        A ``ReportChart``: ``caption`` as given, and ``svg``, the text of the ``<svg>`` element.
    """

    def draw(axes: Axes) -> None:
        lines = axes.contour(offsets, offsets, values, levels=levels, colors=_series(0), linewidths=1.0)
        # Levels lie close together around the minimum, where labels of all would overlap.
        axes.clabel(lines, list(lines.levels)[::2], fontsize=7, colors=_TEXT)
        axes.plot([0], [0], "+", color=_TEXT)
        axes.set(xlabel="first direction", ylabel="second direction", aspect="equal")

    return ReportChart(caption, _svg(draw, caption, (4.6, 4.2)))


def scaling_chart(points: Sequence[tuple[int, int, float]], unit: str, caption: str) -> ReportChart:
    """Draw throughput over the number of devices as SVG, beside linear scaling from the run with the fewest devices.

    Needs matplotlib.

    Args:
        points: (number of the run in the report, from 0, which selects its colour; number of devices; throughput of all
            devices together) of each run, at least one.
        unit: unit of the throughput, the label of the vertical axis.
        caption: description of the chart in a sentence, which screen readers read.

    Returns:
        A ``ReportChart``: ``caption`` as given, and ``svg``, the text of the ``<svg>`` element.
    """
    counts = sorted({devices for _, devices, _ in points})
    least = min(points, key=lambda point: (point[1], -point[2]))

    def draw(axes: Axes) -> None:
        each = least[2] / least[1]
        axes.plot(counts, [each * count for count in counts], "--", color=_TEXT, linewidth=1)
        axes.annotate("linear", (counts[-1], each * counts[-1]), (-4, 4), textcoords="offset points", ha="right")
        for number, devices, rate in points:
            axes.plot([devices], [rate], "o", ms=7, color=_series(number))
        axes.set(xlabel="devices", ylabel=unit, ylim=(0, 1.15 * max([each * counts[-1], *(p[2] for p in points)])))
        axes.set_xlim(0, counts[-1] * 1.08)
        axes.set_xticks(counts, [str(count) for count in counts])

    return ReportChart(caption, _svg(draw, caption))


def stack_chart(
    rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, caption: str, *, share: bool = False
) -> ReportChart:
    """Draw a horizontal bar for each run as SVG, stacked from named parts, such as seconds of forward and backward.

    Needs matplotlib.

    Args:
        rows: (label of the bar, length of each part by name), one a run. Names are those of ``PARTS``, phases
            of a training step such as ``forward``; others are not drawn. Negative lengths count as 0.
        unit: unit of the lengths as drawn, for the label of the axis.
        caption: description of the chart in a sentence, which screen readers read.
        share: whether to show each part as per cent of the sum of its bar's lengths, those not drawn included; a bar
            whose sum is not positive is empty.

    Returns:
        A ``ReportChart``: ``caption`` as given; ``svg``, the text of the ``<svg>`` element; and ``parts``, the names of
        the drawn parts for a legend.
    """
    parts = [name for name in PARTS if any(row.get(name, 0) > 0 for _, row in rows)]
    height = 1.0 + 0.36 * len(rows)

    def draw(axes: Axes) -> None:
        starts = [0.0] * len(rows)
        places = range(len(rows))
        for name in parts:
            widths = []
            for _, row in rows:
                total = sum(row.values()) if share else 1.0
                widths.append(max(row.get(name, 0.0), 0.0) / total * (100 if share else 1) if total > 0 else 0.0)
            axes.barh(places, widths, left=starts, color=_part(name), height=0.62)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_yticks(places, [label for label, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.set_xlim(0, max([*starts, 1e-9]) * 1.02)
        axes.grid(visible=False, axis="y")

    return ReportChart(caption, _svg(draw, caption, (4.6, height)), parts=parts)


def themed_timeline(svg: str, caption: str) -> ReportChart:
    """Turn the SVG of a timeline of training phases into a chart of an HTML report, as wide as the page.

    Args:
        svg: timeline of the traced steps, from ``tutti.metrics.timeline.timeline_svg``.
        caption: description of the chart in a sentence, which screen readers read.

    Returns:
        A ``ReportChart``: ``caption`` as given; ``svg``, the given text with attributes for the page; and ``wide``,
        which is True.
    """
    found = svg.replace("<svg ", f'<svg role="img" aria-label="{_attribute(caption)}" class="timeline" ', 1)
    found = found.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    return ReportChart(caption, found, wide=True)


def _label_decades(axis: Axis) -> None:
    """Label the powers of ten of a logarithmic axis, and within few decades also twice and five times of them."""
    low, high = axis.get_view_interval()

    def minor(number: float, place: object) -> str:
        return f"{number:,.6g}" if high / low < 30 and f"{number:.0e}"[0] in "25" else ""

    axis.set_major_formatter(lambda number, _: f"{number:,.6g}")
    axis.set_minor_formatter(minor)


def _series(number: int) -> str:
    return f"#0102{0x10 + number % SERIES:02x}"


def _part(name: str) -> str:
    return f"#0102{0x40 + PARTS.index(name):02x}"


def page_colours() -> Iterable[tuple[str, str]]:
    """Yield pairs (colour in an SVG drawn by matplotlib, CSS value that replaces this colour in the report's page).

    The colour is a hexadecimal text such as ``#010203``, which no chart uses for anything else; the CSS value is
    ``currentColor`` or a variable such as ``var(--series0)``, so that charts follow the page's light or dark theme.
    """
    yield _TEXT, "currentColor"
    yield _GRID, "var(--grid)"
    for number in range(SERIES):
        yield _series(number), f"var(--series{number})"
    for name in PARTS:
        yield _part(name), f"var(--part-{name.replace(' ', '-')})"


def _svg(draw: Callable[[Axes], None], caption: str, size: tuple[float, float] = (4.6, 3.0)) -> str:
    """Draw on new axes and return the ``<svg>`` element, without a size of its own and without metadata."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colours = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    style: Any = {name: _TEXT for name in colours}
    style |= {"grid.color": _GRID, "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.6}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "tutti", "text.parse_math": False, "font.size": 9}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.formatter.useoffset": False}
    with mpl.rc_context(style), warnings.catch_warnings():
        # Names in scripts that matplotlib's font lacks: the browser has them.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return _inline(file.getvalue(), caption, f"c{zlib.crc32(f'{caption}{file.getvalue()}'.encode()):08x}-")


def _inline(text: str, caption: str, prefix: str) -> str:
    """Return the ``<svg>`` element of a file for a page: its ids begin with ``prefix``, its colours are the page's."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    head, rest = body[: body.index(">") + 1], body[body.index(">") + 1 :]
    box = re.search(r'viewBox="[^"]*"', head)
    opening = f'<svg role="img" aria-label="{_attribute(caption)}" {box[0] if box else ""}>'
    rest = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>{prefix}", rest).replace("xlink:href", "href")
    for drawn, page in page_colours():
        rest = rest.replace(drawn, page)
    return opening + rest.strip()


def _attribute(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))
