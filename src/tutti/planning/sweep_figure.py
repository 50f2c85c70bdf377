"""Draw predicted throughput and shares of time over the number of devices as an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.metrics.timeline import COLOURS
from tutti.planning.figure_file import new_figure, save_figure

if TYPE_CHECKING:
    from tutti.planning.step_prediction import StepPrediction

_SHADES = {
    "compute": COLOURS["backward"],
    "communication": COLOURS["communication"],
    "bubble": COLOURS["data"],
    "idling": "#BBBBBB",
}


def write_sweep_figure(found: Sequence[StepPrediction], title: str, path: Path) -> None:
    """Draw an SVG of predicted training steps over the number of devices: throughput, and shares of time.

    Throughput is samples a second, beside linear scaling from one device; shares are computing, communication, pipeline
    bubble and idling.

    Args:
        found: the predictions, at least one, sorted by number of devices.
        title: text above the figure.
        path: the SVG file to write.

    Raises:
        UsageError: matplotlib is not installed.
        DiskError: the file cannot be written.
    """
    devices = [each.devices for each in found]
    canvas = new_figure("--svg", 12, 4.6)
    canvas.suptitle(title)
    rate, shares = canvas.subplots(1, 2)
    each_alone = found[0].samples_per_second / found[0].devices / found[0].efficiency
    rate.plot(devices, [each_alone * count for count in devices], "--", color="#888888", label="linear in one device")
    rate.plot(devices, [each.samples_per_second for each in found], "o-", label="predicted")
    low = [each.batch / each.draws[1] for each in found]
    high = [each.batch / each.draws[0] for each in found]
    rate.fill_between(devices, low, high, alpha=0.25, label="draws of the constants alone")
    if all(each.band for each in found):
        bands = [each.band or each.draws for each in found]
        low, high = ([each.batch / band[side] for each, band in zip(found, bands, strict=True)] for side in (1, 0))
        rate.fill_between(devices, low, high, alpha=0.15, label="90 % band")
    else:
        rate.text(0.98, 0.03, found[0].band_text, transform=rate.transAxes, ha="right", fontsize="small")
    rate.set(xscale="log", yscale="log", xlabel="devices", ylabel="samples/s", title="throughput")
    rate.set_xticks(devices, [str(count) for count in devices])
    rate.minorticks_off()
    rate.legend(fontsize="small")
    bottom = [0.0] * len(found)
    for name, colour in _SHADES.items():
        heights = [each.shares.get(name, 0.0) for each in found]
        if any(heights):
            shares.bar([str(count) for count in devices], heights, bottom=bottom, color=colour, label=name)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    shares.set(xlabel="devices", ylabel="share of the devices' time", ylim=(0, 1), title="where the time goes")
    shares.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4)
    save_figure(canvas, path)
