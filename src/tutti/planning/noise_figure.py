"""Draw the noise of runs over their measured steps, and samples to the target over the batch size, as an SVG."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tutti.distribution import pip_install
from tutti.errors import DiskError, UsageError
from tutti.optim.noise_scale import mean_noise
from tutti.planning.critical_batch import CriticalBatch, NoiseEvidence

_GROUPS = 12


def write_noise_figure(runs: Sequence[NoiseEvidence], found: CriticalBatch, path: Path) -> None:
    """Draw an SVG of runs' gradient noise scale over their measured steps, with the critical batch size and its band.

    Where runs reached a target, a second panel has the samples to it over the batch size, measured and fitted.

    Args:
        runs: the runs, each a line of its noise scale.
        found: the critical batch over these runs, with its band.
        path: the SVG file to write.

    Raises:
        UsageError: matplotlib is not installed.
        DiskError: the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--svg needs the package matplotlib", remedy=f"run {pip_install('plot')}, or leave it out")
    from matplotlib.figure import Figure as Canvas

    panels = 2 if found.recipe is not None else 1
    canvas = Canvas(figsize=(6 * panels, 4.6), layout="constrained")
    noise, *rest = canvas.subplots(1, panels, squeeze=False)[0]
    for run in runs:
        size = max(-(-len(run.estimates) // _GROUPS), 1)
        groups = [run.estimates[start : start + size] for start in range(0, len(run.estimates), size)]
        scales = [mean_noise(group).band().scale if group else None for group in groups]
        noise.plot([size * (n + 1) for n in range(len(groups))], scales, "o-", label=f"{run.path.name}, {run.batch}")
    noise.axhspan(found.band[0], min(found.band[1], 1e3 * found.critical_batch), alpha=0.15, label="90 % band")
    noise.axhline(found.critical_batch, color="#888888", linestyle="--", label="critical batch")
    noise.set(xlabel="measured steps that count", ylabel="samples", yscale="log", title="gradient noise scale")
    noise.legend(fontsize="small")
    for panel in rest:
        if found.recipe is None:
            continue
        largest = 4 * max(found.critical_batch, *(batch for batch, _, _ in found.batches))
        sizes = [largest * 2 ** (-n / 8) for n in range(80)]
        panel.plot(sizes, [found.recipe.samples_at(size) for size in sizes], label="E(B) = E_min(1 + B/B_crit)")
        panel.plot([row[0] for row in found.batches], [row[1] for row in found.batches], "o", label="measured")
        panel.set(xscale="log", yscale="log", xlabel="batch size", ylabel="samples to the target")
        panel.set_title(f"{found.recipe.metric} {found.recipe.value:g}")
        panel.legend(fontsize="small")
    try:
        canvas.savefig(path, format="svg")
    except OSError as error:
        raise DiskError("cannot write the figure", where=str(path), why=error.strerror) from error
