"""Whether ``tutti plan`` ranks plans of real computing as real runs do: small models on this machine's cores.

    python benchmarks/real_ranking.py            # some five minutes; nothing else should run
    python benchmarks/real_ranking.py --save     # also keep results/DATE-real-ranking.json
    python benchmarks/real_ranking.py --case deep --save     # another model and other plans
    python benchmarks/real_ranking.py --record FILE --rounds 1     # adds a round to those that FILE has

The plans of ``gpt`` were known while the prices were made, those of ``images`` when Python work was measured anew.
The plans of ``deep`` prompted no change of the prices; those of ``mlp`` were fixed before the last two changes.

``tutti bench`` measures the machine, every plan is predicted from its file alone, as ``tutti plan`` does before it has
measured steps, and then all plans are trained in turn, several rounds of them. A plan's measured step is the median
over the rounds of the rounds' median steps. Printed are Kendall's τ between predicted and measured step times and the
regret, as in ``plan_ranking.py``; two plans are tied where the ranges of their rounds overlap. τ over all pairs, ties
included, is kept too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plan_ranking import LEAST_TAU, MOST_REGRET, kendall_tau, regret

from tutti.device import cpu_model, usable_cores
from tutti.distribution import VERSION
from tutti.errors import ExitCode
from tutti.planning.device_plan import PlannedStep
from tutti.planning.machine_choice import open_machine
from tutti.planning.plan_search import StepPricer
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_prediction import TaskSizes

ROOT = Path(__file__).parents[1]
OPTIMIZER = "adam:lr=0.001"
Plan = tuple[str, int, int | None]
"""Strategy, devices, and largest micro-batch in samples."""
GPT: Sequence[Plan] = (
    ("single", 1, None),
    ("single", 1, 4),
    ("mirrored:algorithm=native", 2, None),
    ("mirrored:algorithm=native", 2, 4),
    ("mirrored:algorithm=ring", 2, None),
    ("mirrored:algorithm=central", 2, None),
    ("sharded:stage=1", 2, None),
    ("sharded:stage=2", 2, None),
    ("sharded:stage=3", 2, None),
    ("sharded:stage=3", 2, 4),
    ("pipeline:stages=2,micro_batches=2", 2, None),
    ("pipeline:stages=2,micro_batches=8", 2, None),
    ("pipeline:stages=2,micro_batches=8,schedule=gpipe", 2, None),
    ("tensor:tensor=2", 2, None),
    ("central_storage", 2, None),
    ("parameter_server", 2, None),
)
DEEP: Sequence[Plan] = (
    ("single", 1, None),
    ("single", 1, 12),
    ("single", 1, 6),
    ("mirrored:algorithm=native", 2, None),
    ("mirrored:algorithm=native", 2, 6),
    ("mirrored:algorithm=halving", 2, None),
    ("sharded:stage=1", 2, 12),
    ("sharded:stage=2", 2, 12),
    ("sharded:stage=3", 2, None),
    ("sharded:stage=3", 2, 6),
    ("pipeline:stages=2,micro_batches=4", 2, None),
    ("pipeline:stages=2,micro_batches=4,schedule=interleaved", 2, None),
    ("tensor:tensor=2", 2, 24),
    ("central_storage", 2, 12),
    ("local_sgd:period=4", 2, None),
    ("parameter_server:servers=2", 2, None),
)
IMAGES: Sequence[Plan] = (
    ("single", 1, None),
    ("single", 1, 64),
    ("single", 1, 32),
    ("mirrored:algorithm=native", 2, None),
    ("mirrored:algorithm=native", 2, 16),
    ("mirrored:algorithm=ring", 2, 32),
    ("sharded:stage=1", 2, None),
    ("sharded:stage=2", 2, 32),
    ("sharded:stage=3", 2, None),
    ("pipeline:stages=2,micro_batches=4", 2, None),
    ("central_storage", 2, None),
    ("central_storage", 2, 16),
    ("parameter_server", 2, None),
)
MLP: Sequence[Plan] = (
    ("single", 1, None),
    ("single", 1, 128),
    ("single", 1, 64),
    ("mirrored:algorithm=native", 2, None),
    ("mirrored:algorithm=native", 2, 64),
    ("mirrored:algorithm=tree", 2, None),
    ("sharded:stage=1", 2, None),
    ("sharded:stage=1", 2, 64),
    ("sharded:stage=3", 2, None),
    ("pipeline:stages=2,micro_batches=4", 2, None),
    ("central_storage", 2, None),
    ("central_storage", 2, 64),
    ("local_sgd:period=4", 2, None),
    ("parameter_server", 2, None),
)


@dataclass(frozen=True)
class Case:
    """A model and the plans that are ranked for it.

    Attributes:
        task, model: as ``tutti train`` takes them; no model for a task of one's own.
        batch: samples of a global batch.
        plans: the plans.
        origin: how the plans came about beside the prices; kept with each result.
    """

    task: str
    model: str | None
    batch: int
    plans: Sequence[Plan]
    origin: str


CASES = {
    "gpt": Case("text", "gpt:layers=2", 32, GPT, "the prices were made with these plans known"),
    "deep": Case("text", "gpt:layers=6,width=96,heads=4", 48, DEEP, "these plans prompted no change of the prices"),
    "images": Case("digits", "cnn", 128, IMAGES, "these plans prompted the last change of the prices"),
    "mlp": Case("digits", "mlp:hidden=2048", 512, MLP, "these plans were fixed before the prices that they judge"),
}
BENCH = ("device", "links", "collectives", "optimizer", "strategies")
_SKIPPED = 24
"""First steps of a run, which take longer: they allocate memory, and the last batch of an epoch is smaller."""


def label(plan: Plan) -> str:
    """Return a plan in words."""
    strategy, devices, micro_batch = plan
    count = f"{devices} device" + "s" * (devices > 1)
    return f"{strategy}, {count}" + (f", micro-batch {micro_batch}" if micro_batch else "")


def predictions(machine: Path, case: Case) -> dict[str, dict[str, Any]]:
    """Return the predicted seconds of every plan's step, and these by cause."""
    base = PlannedRun(model=case.model, optimizer=OPTIMIZER)
    pricer = StepPricer(TaskSizes(case.task, base), base, open_machine(str(machine), "fp32", None, None))
    found = {}
    for strategy, devices, micro_batch in case.plans:
        options = () if micro_batch is None else (("micro_batch", micro_batch),)
        step = PlannedStep(devices, case.batch, strategy, 0.0, np.zeros(0), {}, "", options=options)
        priced = pricer.evaluate(step)
        found[label((strategy, devices, micro_batch))] = {"seconds": priced.seconds, "terms": dict(priced.terms)}
    return found


def trained(case: Case, plan: Plan, steps: int, folder: Path) -> float:
    """Train a plan, and return the median seconds of its steps by the clock of rank 0."""
    strategy, devices, micro_batch = plan
    words = ["train", case.task, *([] if case.model is None else ["--model", case.model])]
    words += ["--strategy", strategy, "--devices", str(devices)]
    words += ["--device", "cpu", "--batch-size", str(case.batch), "--optimizer", OPTIMIZER]
    words += ["--steps", str(steps + _SKIPPED + 1), "--checkpoint-every", "none", "--eval-every", "none"]
    words += ["--out", str(folder), "--overwrite"]
    command([*words, *(["--micro-batch", str(micro_batch)] if micro_batch else [])])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock = [line["seconds"] for line in lines if line["group"] == "train"][_SKIPPED:]
    return statistics.median(np.diff(clock).tolist())


def command(words: Sequence[str]) -> None:
    """Run ``tutti``; raise SystemExit where it fails."""
    done = subprocess.run([sys.executable, "-m", "tutti", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"tutti {' '.join(words)}: {done.stderr[-2000:]}")


def rows_of(predicted: Mapping[str, Mapping[str, Any]], rounds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return a row for each plan, the fastest measured one first.

    >>> rows_of({"a": {"seconds": 1.0, "terms": {}}}, {"a": [2.0, 4.0, 3.0]})[0]["error"]
    -66.667
    """
    rows = [
        {
            "plan": name,
            "predicted": predicted[name]["seconds"],
            "terms": predicted[name]["terms"],
            "measured": (middle := statistics.median(seconds)),
            "low": min(seconds),
            "high": max(seconds),
            "rounds": list(seconds),
            "error": round(100 * (predicted[name]["seconds"] / middle - 1), 3),
        }
        for name, seconds in rounds.items()
    ]
    return sorted(rows, key=lambda row: float(row["measured"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and rank the plans, and return the exit code: 9 where a bar is missed."""
    parser = argparse.ArgumentParser(description="Compare the ranking of plans by tutti plan with real runs.")
    parser.add_argument("--case", choices=CASES, default="gpt", help="model and plans [gpt]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each run")
    parser.add_argument("--machine", type=Path, help="a machine.json of tutti bench in place of a new one")
    parser.add_argument("--record", type=Path, help="file of rounds, which are added to those that it has")
    parser.add_argument("--note", help="words to keep with the result, such as on other work of the machine")
    parser.add_argument("--save", action="store_true", help="keep results/DATE-real-ranking.json")
    given = parser.parse_args(argv)
    case, rounds = CASES[given.case], defaultdict[str, list[float]](list)
    if given.record is not None and given.record.exists():
        rounds.update(json.loads(given.record.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as scratch:
        machine = given.machine or Path(scratch) / "machine.json"
        if not machine.exists():
            command(["bench", *BENCH, "--ranks", "2", "-o", str(machine)])
        for _ in range(given.rounds):
            for plan in case.plans:
                rounds[label(plan)].append(trained(case, plan, given.steps, Path(scratch) / "run"))
                if given.record is not None:
                    given.record.write_text(json.dumps(rounds, indent=1) + "\n", encoding="utf-8")
        predicted = predictions(machine, case)
    rows = rows_of(predicted, rounds)
    for row in rows:
        print(f"{row['plan']:62} measured {1e3 * row['measured']:7.1f} ms, predicted {1e3 * row['predicted']:7.1f} ms")
    tau, lost = kendall_tau(rows), regret(rows)
    every = kendall_tau([{**row, "low": row["measured"], "high": row["measured"]} for row in rows])
    apart = sum(one["high"] < two["low"] or two["high"] < one["low"] for one, two in combinations(rows, 2))
    errors = statistics.median(abs(row["error"]) for row in rows)
    print(f"{len(rows)} plans: tau {tau:.2f} (bar {LEAST_TAU}; all pairs {every:.2f}), regret {lost:.1f} %", end="")
    print(f" (bar {MOST_REGRET:g} %), median error of a step {errors:.1f} %")
    two = [row for row in rows if "2 devices" in row["plan"]]
    if given.save:
        content = {
            "date": datetime.now(UTC).date().isoformat(),
            "host": {"cpu": cpu_model(), "cores": usable_cores(), "python": platform.python_version()},
            "versions": {"tutti": VERSION, "torch": torch.__version__},
            "settings": {
                "task": case.task,
                "model": case.model,
                "batch": case.batch,
                "rounds": len(rows[0]["rounds"]),
                "steps": given.steps,
            },
            "note": "; ".join(filter(None, (case.origin, given.note))),
            "plans": len(rows),
            "pairs": len(rows) * (len(rows) - 1) // 2,
            "pairs_told_apart": apart,
            "tau": tau,
            "tau_of_all_pairs": every,
            "regret_percent": lost,
            "median_error_percent": errors,
            "of_two_devices": {
                "plans": len(two),
                "tau": kendall_tau(two),
                "regret_percent": regret(two),
                "median_error_percent": statistics.median(abs(row["error"]) for row in two),
            },
            "rows": rows,
        }
        suffix = "" if given.case == "gpt" else f"-{given.case}"
        path = ROOT / "benchmarks" / "results" / f"{content['date']}-real-ranking{suffix}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"kept {path.name}")
    return int(ExitCode.THRESHOLD if tau < LEAST_TAU or lost > MOST_REGRET else ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
