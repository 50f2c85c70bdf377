"""Draw the curves of a machine file as an SVG: rate over size, points and the line through them."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.distribution import pip_install
from tutti.errors import DiskError, UsageError
from tutti.workload.bench_scaling import scaling_rows

if TYPE_CHECKING:
    from tutti.workload.machine_file import Machine


def write_machine_figure(machine: Machine, path: Path) -> None:
    """Draw the measured curves of a machine as an SVG: rate (size ÷ seconds) over size, as points and fitted line.

    A panel shows the curves whose names have the same first part, such as ``collectives``, and whose sizes have the
    same unit. Each task with measured throughputs gets a panel: samples a second over the number of devices, beside
    linear scaling from the fewest devices.

    Args:
        machine: measurements of ``tutti bench`` on one machine; read are its curves, throughputs, device and date.
        path: the SVG to write.

    Raises:
        UsageError: matplotlib is not installed.
        DiskError: the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--svg needs the package matplotlib", remedy=f"run {pip_install('plot')}, or leave it out")
    from matplotlib.figure import Figure as Canvas

    groups: dict[tuple[str, str], list[str]] = {}
    for name, curve in machine.curves.items():
        groups.setdefault((name.partition("/")[0], curve.unit), []).append(name)
    scaling = scaling_rows(machine.figures)
    panels = len(groups) + len(scaling)
    columns = min(2, max(panels, 1))
    rows = max(math.ceil(panels / columns), 1)
    canvas = Canvas(figsize=(6.5 * columns, 4.2 * rows), layout="constrained")
    canvas.suptitle(f"{machine.device.get('name', '')} · {machine.measured}")
    for place, ((group, unit), names) in enumerate(groups.items(), 1):
        panel = canvas.add_subplot(rows, columns, place)
        for name in names:
            curve = machine.curves[name]
            sizes = [point.size for point in curve.points]
            (drawn,) = panel.plot(sizes, [point.size / point.seconds for point in curve.points], "o", markersize=4)
            label = name.partition("/")[2] or name
            panel.plot(sizes, [size / curve.seconds(size) for size in sizes], color=drawn.get_color(), label=label)
        panel.set(title=group, xscale="log", yscale="log", xlabel=f"{unit} of a call", ylabel=f"{unit}/s")
        panel.legend(fontsize="small")
    for place, (task, measured) in enumerate(scaling.items(), len(groups) + 1):
        panel = canvas.add_subplot(rows, columns, place)
        counts = [count for count, *_ in measured]
        spreads = [(figure.spread or 0.0) / 2 for _, figure, _ in measured]
        panel.errorbar(counts, [figure.value for _, figure, _ in measured], spreads, fmt="o-", label="measured")
        linear = [figure.value / efficiency for _, figure, efficiency in measured]
        panel.plot(counts, linear, "--", color="grey", label="linear")
        panel.set(title=f"scaling of {task}", xlabel="devices", ylabel="sample/s", xticks=counts)
        panel.set_ylim(bottom=0)
        panel.legend(fontsize="small")
    try:
        canvas.savefig(path, format="svg")
    except OSError as error:
        raise DiskError("cannot write the figure", where=str(path), why=error.strerror) from error
