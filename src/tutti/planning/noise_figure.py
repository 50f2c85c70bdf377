"""Draw the critical batch size by every way that was measured, and what each rests on, as an SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tutti.optim.noise_scale import mean_noise
from tutti.planning.branch_fit import BranchFit
from tutti.planning.critical_batch import CriticalBatch, NoiseEvidence
from tutti.planning.figure_file import new_figure, save_figure
from tutti.planning.recipe import TrainingRecipe

_GROUPS = 12
_NAMES = {"noise": "gradient noise", "branches": "branches", "target": "samples to the target"}


def write_noise_figure(runs: Sequence[NoiseEvidence], found: CriticalBatch, path: Path) -> None:
    """Draw an SVG with a panel for each method that estimated the critical batch size, and a panel that compares them.

    Panels: the gradient noise scale of each run over its measured steps; the held-out losses of branches, which are
    short trainings from one checkpoint with different batch sizes, over multiples of the batch size; samples to reach a
    target metric over the batch size, measured and fitted. A last panel shows each method's estimate with its 90 %
    band; it is drawn if there are two or more methods, or no other panel.

    Args:
        runs: training runs with their estimates of the gradient noise scale; each is drawn as one line.
        found: the critical batch size in samples that these runs give, with its 90 % band and each method's estimate.
        path: the SVG file to write.

    Raises:
        UsageError: matplotlib is not installed.
        DiskError: the file cannot be written.
    """
    panels: list[Callable[[Any], None]] = []
    if any(run.estimates for run in runs):
        panels.append(lambda axes: _draw_noise(axes, runs, found))
    branches, recipe = found.branches, found.recipe
    if branches is not None:
        panels.append(lambda axes: _draw_branches(axes, branches))
    if recipe is not None:
        panels.append(lambda axes: _draw_target(axes, recipe, found))
    if len(found.ways) > 1 or not panels:
        panels.append(lambda axes: _draw_ways(axes, found))
    canvas = new_figure("--svg", 6 * len(panels), 4.6)
    for draw, axes in zip(panels, canvas.subplots(1, len(panels), squeeze=False)[0], strict=True):
        draw(axes)
    save_figure(canvas, path)


def _draw_noise(axes: Any, runs: Sequence[NoiseEvidence], found: CriticalBatch) -> None:
    for run in (run for run in runs if run.estimates):
        size = max(-(-len(run.estimates) // _GROUPS), 1)
        groups = [run.estimates[start : start + size] for start in range(0, len(run.estimates), size)]
        scales = [mean_noise(group).band().scale for group in groups]
        axes.plot([size * (n + 1) for n in range(len(groups))], scales, "o-", label=f"{run.path.name}, {run.batch}")
    axes.axhspan(found.band[0], min(found.band[1], 1e3 * found.critical_batch), alpha=0.15, label="90 % band")
    axes.axhline(found.critical_batch, color="#888888", linestyle="--", label="critical batch")
    axes.set(xlabel="measured steps that count", ylabel="samples", yscale="log", title="gradient noise scale")
    axes.legend(fontsize="small")


def _draw_branches(axes: Any, branches: BranchFit) -> None:
    means = branches.means()
    largest = max(means)
    multiples = [largest ** (n / 60) for n in range(61)]
    axes.plot(multiples, [branches.loss_at(multiple) for multiple in multiples], label="fitted")
    axes.plot(
        [each.multiple for each in branches.branches], [each.loss for each in branches.branches], "o", label="runs"
    )
    axes.axhspan(means[1], means[1] + branches.tolerance, alpha=0.15, label=f"within {branches.tolerance:g}")
    axes.axvline(branches.within, color="#888888", linestyle="--", label=f"within the band: {branches.within} ×")
    axes.set(xscale="log", xlabel=f"batch ÷ {branches.batch}", ylabel="held-out loss", title="branches of a checkpoint")
    axes.minorticks_off()
    axes.set_xticks(list(means), labels=[f"{multiple} ×" for multiple in means])
    axes.legend(fontsize="small")


def _draw_target(axes: Any, recipe: TrainingRecipe, found: CriticalBatch) -> None:
    largest = 4 * max(found.critical_batch, *(each.batch for each in found.batches))
    sizes = [largest * 2 ** (-n / 8) for n in range(80)]
    axes.plot(sizes, [recipe.samples_at(size) for size in sizes], label="E(B) = E_min(1 + B/B_crit)")
    axes.plot([each.batch for each in found.batches], [each.samples for each in found.batches], "o", label="measured")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="samples to the target")
    axes.set_title(f"{recipe.metric} {recipe.value:g}")
    axes.legend(fontsize="small")


def _draw_ways(axes: Any, found: CriticalBatch) -> None:
    rows = [(_NAMES.get(way.name, way.name), way.critical_batch, way.low, way.high) for way in found.ways]
    rows.append(("all that count", found.critical_batch, *found.band))
    widest = 100 * max(row[1] for row in rows)
    for place, (name, middle, low, high) in enumerate(reversed(rows)):
        axes.plot([max(low, middle / 100), min(high, widest)], [place, place], "-", linewidth=2)
        axes.plot([middle], [place], "o", color="#333333")
        axes.annotate(name, (middle, place), textcoords="offset points", xytext=(0, 7), ha="center", fontsize="small")
    axes.set(xscale="log", xlabel="samples", yticks=[], title="critical batch by each way, with 90 % band")
    axes.set_ylim(-0.6, len(rows) - 0.4)
