"""``tutti plan --law``: fit the loss of runs over model size and data. Loads no torch."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tutti.cli.console_tables import print_table
from tutti.distribution import pip_install
from tutti.errors import ExitCode, UsageError
from tutti.launcher.encoding import json_text
from tutti.planning.loss_evidence import LossEvidence, loss_evidence
from tutti.planning.loss_law import (
    FittedLoss,
    fit_loss,
    larger_run_spread,
    largest_tenth,
    loss_band,
    loss_regions,
    loss_spread,
)
from tutti.planning.run_evidence import find_runs

_CONSTANTS = {
    "irreducible": "E, irreducible loss",
    "size_factor": "A, of parameters",
    "size_exponent": "α, of parameters",
    "data_factor": "B, of samples",
    "data_exponent": "β, of samples",
}


def fit_law_of_runs(runs: Sequence[Path], as_json: bool) -> int:
    """Fit a scaling law of the loss to finished runs, and print its constants and a check on the largest runs.

    The law is L = E + A/N^α + B/D^β (Hoffmann et al. 2022, arXiv 2203.15556, eq. 2) for the loss L (held-out, if it
    was evaluated) after training N parameters on D samples, and L = E + B/D^β if all runs have one N. The check
    predicts the losses of the largest tenth of the runs, by N · D, from the rest.

    Args:
        runs: run directories, or folders of them.
        as_json: print JSON in place of tables.

    Returns:
        0, the exit code of the command.

    Raises:
        UsageError: no scipy, unusable runs, or fewer runs than the law's constants need.
        NonFiniteError: a run has diverged.
    """
    if importlib.util.find_spec("scipy") is None:
        raise UsageError("--law needs the package scipy", remedy=f"run {pip_install('planning')}")
    evidence = loss_evidence(find_runs(runs))
    size, data, loss = (
        np.array([getattr(run, name) for run in evidence]) for name in ("parameters", "samples", "loss")
    )
    fitted = fit_loss(size, data, loss)
    regions = loss_regions(fitted.law, size, data, loss)
    found = {
        "law": "L = E + A/N^alpha + B/D^beta" if fitted.law.size_factor else "L = E + B/D^beta",
        "runs": len(evidence),
        "constants": _constants(fitted),
        "spread": loss_spread(fitted.law, size, data, loss),
        "held_out": _held_out(evidence, size, data, loss),
        "regions": {str(run.path): region for run, region in zip(evidence, regions, strict=True)},
        "loss_at_twice_the_data": float(fitted.law.loss(size.max(), 2 * data.max())),
    }
    if as_json:
        print(json_text(found, sys.stdout))
    else:
        _show(found, fitted, regions)
    return ExitCode.DONE


def _constants(fitted: FittedLoss) -> dict[str, dict[str, float]]:
    names = [name for name in _CONSTANTS if fitted.law.size_factor or not name.startswith("size")]
    ends = {name: fitted.interval(name) for name in names}
    return {name: {"value": getattr(fitted.law, name), "low": ends[name][0], "high": ends[name][1]} for name in names}


def _held_out(evidence: Sequence[LossEvidence], size: Any, data: Any, loss: Any) -> list[dict[str, Any]] | str:
    """Return the largest tenth of the runs by N · D as the law of the others predicts them, or why it cannot."""
    rest, last = largest_tenth(size, data)
    try:
        fitted = fit_loss(size[rest], data[rest], loss[rest])
    except UsageError as error:
        return f"not checked on the largest runs: without them, {error.what}"
    spread = larger_run_spread(fitted, size[rest], data[rest], loss[rest])
    low, high = loss_band(fitted, spread, size[last], data[last])
    predicted = fitted.law.loss(size[last], data[last])
    return [
        {"run": str(evidence[row].path), "loss": float(loss[row]), "predicted": float(p), "band": [float(a), float(b)]}
        for row, p, a, b in zip(last, predicted, low, high, strict=True)
    ]


def _show(found: dict[str, Any], fitted: FittedLoss, regions: Sequence[str]) -> None:
    print(f"{found['law']}, fitted to {found['runs']} runs; intervals of 90 % over {len(fitted.draws)} draws of runs")
    rows = [
        (_CONSTANTS[name], f"{each['value']:.5g}", _band([each["low"], each["high"]]))
        for name, each in found["constants"].items()
    ]
    print_table(("constant", "value", "interval"), rows)
    checked = found["held_out"]
    bands = [[each["low"], each["high"]] for each in found["constants"].values()]
    if not np.isfinite(bands + [each["band"] for each in checked if isinstance(each, dict)]).all():
        print("none: the runs are too few for their draws to determine the law; give more, of further sizes")
    counts = Counter(regions)
    print("regions: " + ", ".join(f"{name} {counts[name]}" for name in ("small data", "power law", "irreducible")))
    if isinstance(checked, str):
        print(checked)
        return
    print_table(
        ("largest runs, predicted from the others", "loss", "predicted", "90 % band"),
        [
            (Path(each["run"]).name, f"{each['loss']:.5g}", f"{each['predicted']:.5g}", _band(each["band"]))
            for each in checked
        ],
    )
    bounded = [each for each in checked if math.isfinite(each["band"][0])]
    inside = sum(each["band"][0] <= each["loss"] <= each["band"][1] for each in bounded)
    print(f"{inside} of {len(bounded)} within the band; twice the data: loss {found['loss_at_twice_the_data']:.5g}")


def _band(band: Sequence[float]) -> str:
    if not math.isfinite(band[0]):
        return "none"
    return f"{band[0]:.5g} to {band[1]:.5g}"
