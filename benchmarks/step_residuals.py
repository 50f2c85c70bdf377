"""How far predicted steps of many models are off on this machine, and the bands of ``tutti plan`` that follow from it.

    python benchmarks/step_residuals.py --record FILE      # some six minutes; nothing else should run
    python benchmarks/step_residuals.py --record FILE --seconds 330     # stops in time; the same command goes on
    python benchmarks/step_residuals.py --record FILE --save    # keeps results/DATE-step-residuals.json and scores

``tutti bench`` measures the machine. Two plans of each model are then trained, on one device and on two, and predicted
from the machine's file alone, as ``tutti plan`` does. The models were fixed before the first of them was measured, and
no price of ``tutti simulate`` was changed by them. A step is measured by one run, as the median of its steps. The plans
of the four models of ``real_ranking.py`` are added; two of these were known while the prices were made.

A model at a batch size is one series, models of a kind are one set (``conformal_band``). Steps are scored twice: as
predicted, and for two devices multiplied by measured ÷ predicted of the model's step on one device, as ``tutti plan``
does where runs were trained on the machine. ``--save`` writes the scores to the package
(``planning/step_residuals.json``).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_ranking import BENCH, OPTIMIZER, Case, Plan, command, label, trained

from tutti.device import cpu_model, usable_cores
from tutti.distribution import VERSION
from tutti.errors import UsageError
from tutti.planning.conformal_band import CheckedPrediction, band_factor, collect_scores, write_residuals
from tutti.planning.device_plan import PlannedStep
from tutti.planning.machine_choice import open_machine
from tutti.planning.plan_search import StepPricer
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_prediction import TaskSizes, step_basis

ROOT = Path(__file__).parents[1]
SCORES = ROOT / "src" / "tutti" / "planning" / "step_residuals.json"
OWN = f"{Path(__file__).with_name('step_models.py')}"
ALONE: Plan = ("single", 1, None)
TWO = (
    "mirrored:algorithm=native",
    "sharded:stage=1",
    "mirrored:algorithm=ring",
    "sharded:stage=3",
    "parameter_server",
    "sharded:stage=2",
    "central_storage",
)
"""Strategies of the plans on two devices, by turns."""


@dataclass(frozen=True)
class Sized:
    """A model at a batch size.

    Attributes:
        kind: models of a kind, which are one set of the bands.
        task, model: as ``tutti train`` takes them; of ``step_models.py`` the name of the task, and no model.
        batch: samples of a global batch.
    """

    kind: str
    task: str
    model: str | None
    batch: int

    @property
    def path(self) -> str:
        """The task as ``tutti train`` takes it."""
        return self.task if self.model is not None else f"{OWN}:{self.task}"

    @property
    def name(self) -> str:
        """The model and its batch, in words."""
        return f"{self.model or self.task}, batch {self.batch}"


def _in_turn(*kinds: Sequence[Sized]) -> list[Sized]:
    """Return the models with the kinds by turns, so that a part of them has all kinds."""
    return [each[place] for place in range(max(map(len, kinds))) for each in kinds if place < len(each)]


MODELS = _in_turn(
    [
        Sized("gpt", "text", f"gpt:layers={layers},width={width},heads=4,block={block}", batch)
        for layers, width, block, batch in (
            (1, 64, 64, 16),
            (2, 32, 64, 32),
            (4, 64, 32, 16),
            (1, 128, 32, 32),
            (2, 96, 64, 8),
            (3, 48, 32, 64),
        )
    ],
    [
        Sized("mlp", "digits", f"mlp:hidden={hidden}", batch)
        for hidden, batch in ((64, 64), (256, 128), (1024, 256), (4096, 128), (512, 512), (2048, 64))
    ],
    [
        Sized("cnn", "digits", f"cnn:batch_norm={norm}", batch)
        for norm, batch in (("false", 32), ("true", 64), ("false", 256), ("true", 128))
    ],
    [Sized("residual", f"residual_{name}", None, n) for name, n in (("small", 64), ("deep", 128), ("wide", 128))],
    [Sized("convs", f"convs_{name}", None, n) for name, n in (("small", 32), ("deep", 64), ("wide", 32))],
    [Sized("separable", f"separable_{name}", None, n) for name, n in (("small", 64), ("wide", 32))],
    [Sized("mixer", f"mixer_{name}", None, n) for name, n in (("small", 64), ("wide", 64), ("deep", 128))],
    [Sized("bag", f"bag_{name}", None, n) for name, n in (("small", 64), ("wide", 128))],
    [Sized("convs", "convs_small", None, 256)],
    [Sized("residual", "residual_deep", None, 32)],
    [Sized("mixer", "mixer_wide", None, 256)],
    [Sized("separable", "separable_small", None, 256)],
    [Sized("bag", "bag_wide", None, 512)],
)


def plans(place: int) -> tuple[Plan, Plan]:
    """Return the plans of a model, by its place."""
    return ALONE, (TWO[place % len(TWO)], 2, None)


def predictions(machine: Path, each: Sized, place: int) -> list[dict[str, Any]]:
    """Return for the two plans their predicted seconds, the standard deviation of the logarithm, and the bases."""
    base = PlannedRun(optimizer=OPTIMIZER, **({} if each.model is None else {"model": each.model}))
    costs = open_machine(str(machine), "fp32", None, None)
    pricer = StepPricer(TaskSizes(each.path, base), base, costs)
    found = []
    for plan in plans(place):
        strategy, devices, _ = plan
        step = pricer.evaluate(PlannedStep(devices, each.batch, strategy, 0.0, np.zeros(0), {}, ""))
        bases = [step_basis(costs, devices, scaled) for scaled in (False, True)]
        sigma = float(np.log(step.draws).std())
        found.append({"plan": label(plan), "predicted": step.seconds, "sigma": sigma, "bases": bases})
    return found


def ranked(machine: Path) -> list[dict[str, Any]]:
    """Return the models and plans of ``real_ranking.py`` in the newest result of each case, as ``main`` makes rows.

    Their results do not have the spread of a prediction; without it a score is larger.
    """
    costs = open_machine(str(machine), "fp32", None, None)
    bases = [step_basis(costs, 2, scaled) for scaled in (False, True)]
    found = []
    for case, suffix in (("gpt", ""), ("deep", "-deep"), ("images", "-images"), ("mlp", "-mlp")):
        newest = max((ROOT / "benchmarks" / "results").glob(f"20??-??-??-real-ranking{suffix}.json"))
        rows = json.loads(newest.read_text(encoding="utf-8"))["rows"]
        rows = sorted(rows, key=lambda row: row["plan"] != label(ALONE))
        plans = [
            {
                "plan": row["plan"],
                "predicted": row["predicted"],
                "sigma": 0.0,
                "bases": bases,
                "measured": row["measured"],
            }
            for row in rows
        ]
        kind = {"deep": "gpt", "images": "cnn"}.get(case, case)
        found.append({"kind": kind, "name": f"{case} of {newest.name}", "plans": plans})
    return found


def checked(rows: Sequence[Mapping[str, Any]]) -> list[CheckedPrediction]:
    """Return the predictions of all models, as predicted and scaled, with their measurements.

    The first plan of a model is that on one device, which scales those on two.
    """
    found = []
    for row in rows:
        factor = row["plans"][0]["measured"] / row["plans"][0]["predicted"]
        for plan in row["plans"]:
            for scaled in (False, True) if "2 devices" in plan["plan"] else (False,):
                predicted = plan["predicted"] * (factor if scaled else 1.0)
                made = (1.0, row["name"], predicted, plan["sigma"], plan["measured"])
                found.append(CheckedPrediction(row["kind"], plan["bases"][scaled], *made))
    return found


def summary(made: Sequence[CheckedPrediction], basis: str) -> dict[str, Any]:
    """Return errors and bands of the predictions of a basis, those of each kind banded by the other kinds."""
    same = [one for one in made if one.basis == basis]
    residuals = collect_scores(made)
    factors = {kind: band_factor(residuals, same[0].cell, kind) for kind in {one.set_name for one in same}}
    banded = [(one, q) for one in same if (q := factors[one.set_name]) is not None]
    ratios = [one.predicted / one.measured for one in same]
    return {
        "cell": same[0].cell,
        "n": len(same),
        "series": len({one.series for one in same}),
        "kinds": len(factors),
        "median_error": statistics.median(abs(ratio - 1) for ratio in ratios),
        "worst_error": max(abs(ratio - 1) for ratio in ratios),
        "median_ratio": statistics.median(ratios),
        "coverage90": statistics.fmean(one.score <= q for one, q in banded) if banded else None,
        "factor": band_factor(residuals, same[0].cell, ""),
        "median_band_factor": float(np.exp(statistics.median(q * one.width for one, q in banded))) if banded else None,
    }


def measure(record: Path, scratch: Path, until: float) -> dict[str, Any]:
    """Measure the machine and the models that ``record`` lacks, until a time of the clock, and return all."""
    machine = record.with_suffix(".machine.json")
    if not machine.exists():
        command(["bench", *BENCH, "--ranks", "2", "-o", str(machine)])
    known: dict[str, list[float]] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    for place, each in enumerate(MODELS):
        if each.name in known or time.monotonic() > until:
            continue
        case = Case(each.path, each.model, each.batch, plans(place), "")
        known[each.name] = [trained(case, plan, 12, scratch / "run") for plan in case.plans]
        record.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return known


def main() -> int:
    """Measure, predict and score the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="file of measured steps, to which others are added")
    parser.add_argument("--seconds", type=float, default=np.inf, help="begin no further model after so many seconds")
    parser.add_argument("--save", action="store_true", help="keep the result, and the scores in the package")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as scratch:
        known = measure(given.record, Path(scratch), until)
    if not given.save:
        print(f"{len(known)} of {len(MODELS)} models")
        return 0
    rows, refused = [], {}
    for place, each in enumerate(MODELS):
        if each.name not in known:
            continue
        try:
            found = predictions(given.record.with_suffix(".machine.json"), each, place)
        except UsageError as error:
            refused[each.name] = str(error)
            continue
        both = [{**plan, "measured": seconds} for plan, seconds in zip(found, known[each.name], strict=True)]
        rows.append({"kind": each.kind, "name": each.name, "plans": both})
        print(f"{each.name:50}", *(f"{plan['plan']}: {plan['predicted'] / plan['measured']:.2f}" for plan in both))
    rows += ranked(given.record.with_suffix(".machine.json"))
    made = checked(rows)
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "host": {"cpu": cpu_model(), "cores": usable_cores(), "python": platform.python_version()},
        "versions": {"tutti": VERSION, "torch": torch.__version__},
        "models": len(rows),
        "summary": {
            name: summary(made, rows[0]["plans"][1]["bases"][scaled])
            for scaled, name in enumerate(("predicted", "scaled"))
        },
        "refused": refused,
        "rows": rows,
    }
    print(json.dumps(content["summary"], indent=1))
    path = ROOT / "benchmarks" / "results" / f"{content['date']}-step-residuals.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    SCORES.write_text(write_residuals(collect_scores(made)), encoding="utf-8")
    print(f"kept {path.name} and {SCORES.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
