"""Draw a landscape as an SVG: density of the Hessian's eigenvalues, loss and accuracy on lines, contours of a plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tutti.planning.figure_file import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = {"training": "-", "held-out": "--"}
_SMALLEST = 1e-6


def write_landscape_figure(found: Mapping[str, Any], path: Path) -> None:
    """Draw an SVG with a panel for each measured part of a loss landscape: Hessian spectrum, lines, and a plane.

    Args:
        found: the content of ``landscape.json``: ``run``, ``step``, ``samples`` for the title, and a panel for each of
            ``density`` (with ``eigenvalues``), ``line``, ``plane`` and ``between`` (with ``to``) that it holds.
        path: the SVG to write.

    Raises:
        UsageError: matplotlib is not installed.
        DiskError: the file cannot be written.
    """
    names = [name for name in ("density", "line", "plane", "between") if name in found]
    columns = min(2, max(len(names), 1))
    rows = max(-(-len(names) // columns), 1)
    canvas = new_figure("the figure of a landscape", 6.2 * columns, 4.4 * rows)
    canvas.suptitle(f"{found['run']} · step {found['step']} · {found['samples']['training']:,} samples")
    for place, name in enumerate(names, 1):
        panel = canvas.add_subplot(rows, columns, place)
        if name == "density":
            _draw_density(panel, found)
        elif name == "plane":
            _draw_plane(panel, found["plane"])
        elif name == "line":
            _draw_line(panel, found["line"], "distance along a filter-normalised direction")
        else:
            _draw_line(panel, found["between"], f"from this run (0) to {found['to']} (1)")
    save_figure(canvas, path)


def _draw_density(panel: Axes, found: Mapping[str, Any]) -> None:
    curve = found["density"]["curve"]
    panel.semilogy(curve["eigenvalues"], np.maximum(curve["density"], _SMALLEST), linewidth=1.4)
    for each in found["eigenvalues"]:
        panel.axvline(each["value"], color="#888888", linewidth=0.8, linestyle=":")
    panel.set(xlabel="eigenvalue of the Hessian (dotted: the largest)", ylabel="density")
    panel.set_ylim(bottom=_SMALLEST)


def _draw_line(panel: Axes, line: Mapping[str, Any], label: str) -> None:
    sets = [name for name in line if name != "offsets"]
    names = [name for name in line[sets[0]] if name != "loss"]
    for of in sets:
        panel.plot(line["offsets"], _numbers(line[of]["loss"]), _DASHES[of], color="C0", label=f"{of} loss")
    panel.set(xlabel=label, ylabel="loss")
    panel.yaxis.label.set_color("C0")
    handles, labels = panel.get_legend_handles_labels()
    if names:
        right = panel.twinx()
        for of in sets:
            right.plot(line["offsets"], _numbers(line[of][names[0]]), _DASHES[of], color="C1", label=f"{of} {names[0]}")
        right.set_ylabel(names[0])
        right.yaxis.label.set_color("C1")
        more = right.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    panel.legend(handles, labels, fontsize="small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_plane(panel: Axes, plane: Mapping[str, Any]) -> None:
    from matplotlib import colormaps

    loss = np.array([_numbers(row) for row in plane["training"]["loss"]])
    levels = plane["levels"]
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(levels)))
    lines = panel.contour(plane["offsets"], plane["offsets"], loss, levels=levels, colors=colours)
    panel.clabel(lines, fontsize=7)
    panel.plot([0], [0], "+", color="#888888")
    panel.set(xlabel="first direction", ylabel="second direction", title="training loss", aspect="equal")


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]
