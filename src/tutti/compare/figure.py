"""Draw the learning curves of a ladder, one line a seed, as SVG. Needs the extra ``plot``."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Mapping
from pathlib import Path

from tutti.compare.ladder import Ladder
from tutti.compare.verdict import RungResult, format_metric, is_fraction
from tutti.config.metric_direction import Metric

# Okabe and Ito's palette, which colour-blind readers can distinguish; markers differ as well.
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999")
_MARKERS = "osD^vPX*"

_WIDTH = 170
"""Characters in a line of the caption."""


def available() -> bool:
    """Return whether matplotlib, which ``draw_curves`` needs, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_curves(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric, caption: str, path: Path) -> None:
    """Draw each training configuration's held-out metric by epoch, and write it as SVG. Needs matplotlib.

    A thin line shows each seed, a thick line the mean over the seeds at the epochs at which all of them were evaluated.
    Equal data give equal bytes. Changes matplotlib's settings in this process: the backend becomes ``svg``.

    Args:
        ladder: the ladder, a series of training configurations (rungs).
        rows: results by rung name; rungs without finished runs are left out.
        metric: the metric that is drawn.
        caption: text below the figure.
        path: file to write; an older one is replaced.

    Raises:
        ImportError: matplotlib is not installed (see ``available``).
        OSError: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "tutti"
    fraction = is_fraction(rows, metric)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for place, rung in enumerate(ladder.rungs):
        row = rows.get(rung.name)
        if row is None:
            continue
        colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
        for outcome in row.outcomes:
            axes.plot(*zip(*outcome.curve, strict=True), color=colour, alpha=0.3, linewidth=1)
        epochs = sorted(set.intersection(*(set(dict(outcome.curve)) for outcome in row.outcomes)))
        means = [sum(dict(o.curve)[epoch] for o in row.outcomes) / len(row.outcomes) for epoch in epochs]
        label = f"{rung.name}: {format_metric(row.mean, fraction)}"
        axes.plot(epochs, means, color=colour, marker=marker, markersize=4, linewidth=2, label=label)
    axes.set_xlabel("epoch")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(f"held-out {metric.name} ({metric.direction} is better)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    lines = textwrap.wrap(caption, _WIDTH, break_on_hyphens=False)
    figure.text(0.01, 0.01, "\n".join(lines), fontsize=6, color="#555555")
    figure.tight_layout(rect=(0, 0.01 + 0.02 * len(lines), 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
