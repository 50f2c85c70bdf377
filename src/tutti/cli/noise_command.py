"""``tutti noise``: how large a batch is worth it, from runs' gradient noise and samples to a target. Loads no torch."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tutti.cli.console_tables import print_table
from tutti.errors import ExitCode, UsageError
from tutti.launcher.encoding import json_text
from tutti.optim.noise_scale import NoiseBand
from tutti.planning.critical_batch import CriticalBatch, critical_batch, noise_evidence
from tutti.planning.recipe import write_recipe


def noise(
    *runs: Annotated[Path, Parameter(show=False)],
    adam: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    last: float = 0.5,
    recipe: Path | None = None,
    svg: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Estimate the critical batch size from gradient noise.

    Example: tutti noise runs/digits-20261123-101500

    RUNS are run directories of tutti train --noise-every N, with --until METRIC=VALUE for a recipe.

    Parameters
    ----------
    adam:
        take the noise of Adam's preconditioned gradient instead of the plain gradient's
    last:
        share of the measured steps that count, from the end
    recipe:
        where to write recipe.json, for tutti plan
    svg:
        where to draw the figure
    as_json:
        print JSON instead of a table
    """
    if not runs:
        raise UsageError("no run is given", remedy="write tutti noise RUN, with the directory of a run")
    if not 0 < last <= 1:
        raise UsageError(f"--last is {last:g}", remedy="give a share above 0 and up to 1")
    for run in runs:
        if not run.is_dir():
            raise UsageError(
                f"there is no run directory {run}",
                remedy="train one first, such as tutti train digits --workers 8 --noise-every 10 --until accuracy=0.9",
            )
    evidence = [noise_evidence(run, last) for run in runs]
    found = critical_batch(evidence, adam)
    if recipe is not None:
        if found.recipe is None:
            raise UsageError(
                "noise alone fixes no number of samples to a target, and a recipe needs it",
                remedy="train with --until METRIC=VALUE too, or leave out --recipe",
            )
        write_recipe(found.recipe, recipe)
    if svg is not None:
        from tutti.planning.noise_figure import write_noise_figure

        write_noise_figure(evidence, found, svg)
    if as_json:
        print(json_text(_plain(found), sys.stdout))
        return ExitCode.DONE
    print(f"critical batch {found.critical_batch:,.0f} samples [{_ends(*found.band)}], from {found.basis}")
    steps = sum(len(run.estimates) for run in evidence)
    bands = [("gradient noise", found.noise), ("of Adam's preconditioned gradient", found.scaled)]
    rows = [(name, f"{band.scale:,.1f}", _ends(band.low, band.high)) for name, band in bands if band is not None]
    if rows:
        print_table((f"noise scale, {steps} measured steps", "samples", "90 % band"), rows)
    if found.recipe is not None:
        shown = [
            (f"{batch:,}", f"{samples:,.0f}", f"{found.recipe.samples_at(batch):,.0f}", str(count))
            for batch, samples, count in found.batches
        ]
        print_table(("batch", f"samples to {found.recipe.metric} {found.recipe.value:g}", "fitted", "runs"), shown)
    return ExitCode.DONE


def _ends(low: float, high: float) -> str:
    return f"{low:,.0f} to " + (f"{high:,.0f}" if math.isfinite(high) else "no upper end")


def _plain(found: CriticalBatch) -> dict[str, Any]:
    """Return a critical batch for JSON; an end that the data do not bound is null."""

    def band(value: NoiseBand | None) -> dict[str, float | None] | None:
        return None if value is None else {name: _finite(end) for name, end in value._asdict().items()}

    recipe = found.recipe
    return {
        "critical_batch": found.critical_batch,
        "band": [_finite(end) for end in found.band],
        "basis": found.basis,
        "noise": band(found.noise),
        "adam": band(found.scaled),
        "samples_min": None if recipe is None else recipe.samples_min,
        "target": None if recipe is None else {"metric": recipe.metric, "value": recipe.value},
        "batches": [{"batch": b, "samples": samples, "runs": count} for b, samples, count in found.batches],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
