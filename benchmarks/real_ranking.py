"""Whether ``tutti plan`` ranks plans of real computing as real runs do: one small model on this machine's cores.

    python benchmarks/real_ranking.py            # some five minutes; nothing else should run
    python benchmarks/real_ranking.py --save     # also keep results/DATE-real-ranking.json

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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plan_ranking import LEAST_TAU, MOST_REGRET, kendall_tau, regret

from tutti.device import cpu_model, usable_cores
from tutti.distribution import VERSION
from tutti.errors import ExitCode
from tutti.planning.device_plan import PlannedStep
from tutti.planning.machine_costs import open_machine
from tutti.planning.plan_search import StepPricer
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_prediction import TaskSizes

ROOT = Path(__file__).parents[1]
TASK, MODEL, OPTIMIZER, BATCH = "text", "gpt:layers=2", "adam:lr=0.001", 32
PLANS: Sequence[tuple[str, int, int | None]] = (
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
"""Strategy, devices, and largest micro-batch in samples."""
_SKIPPED = 4
"""First steps of a run, which also allocate memory."""


def label(plan: tuple[str, int, int | None]) -> str:
    """Return a plan in words."""
    strategy, devices, micro_batch = plan
    count = f"{devices} device" + "s" * (devices > 1)
    return f"{strategy}, {count}" + (f", micro-batch {micro_batch}" if micro_batch else "")


def predictions(machine: Path, plans: Sequence[tuple[str, int, int | None]]) -> dict[str, dict[str, Any]]:
    """Return the predicted seconds of every plan's step, and these by cause."""
    base = PlannedRun(model=MODEL, optimizer=OPTIMIZER)
    pricer = StepPricer(TaskSizes(TASK, base), base, open_machine(str(machine), "fp32", None, None))
    found = {}
    for strategy, devices, micro_batch in plans:
        options = () if micro_batch is None else (("micro_batch", micro_batch),)
        step = PlannedStep(devices, BATCH, strategy, 0.0, np.zeros(0), {}, "", options=options)
        priced = pricer.evaluate(step)
        found[label((strategy, devices, micro_batch))] = {"seconds": priced.seconds, "terms": dict(priced.terms)}
    return found


def trained(plan: tuple[str, int, int | None], steps: int, folder: Path) -> float:
    """Train a plan, and return the median seconds of its steps by the clock of rank 0."""
    strategy, devices, micro_batch = plan
    words = ["train", TASK, "--model", MODEL, "--strategy", strategy, "--devices", str(devices), "--device", "cpu"]
    words += ["--batch-size", str(BATCH), "--optimizer", OPTIMIZER, "--steps", str(steps + _SKIPPED + 1)]
    words += ["--checkpoint-every", "none", "--eval-every", "none", "--out", str(folder), "--overwrite"]
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each run")
    parser.add_argument("--plans", type=int, default=len(PLANS), help="the first plans only")
    parser.add_argument("--machine", type=Path, help="a machine.json of tutti bench in place of a new one")
    parser.add_argument("--note", help="words to keep with the result, such as on other work of the machine")
    parser.add_argument("--save", action="store_true", help="keep results/DATE-real-ranking.json")
    given = parser.parse_args(argv)
    plans, rounds = PLANS[: given.plans], defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as scratch:
        machine = given.machine or Path(scratch) / "machine.json"
        if given.machine is None:
            command(["bench", "device", "links", "collectives", "optimizer", "--ranks", "2", "-o", str(machine)])
        predicted = predictions(machine, plans)
        for _ in range(given.rounds):
            for plan in plans:
                rounds[label(plan)].append(trained(plan, given.steps, Path(scratch) / "run"))
    rows = rows_of(predicted, rounds)
    for row in rows:
        print(f"{row['plan']:62} measured {1e3 * row['measured']:7.1f} ms, predicted {1e3 * row['predicted']:7.1f} ms")
    tau, lost = kendall_tau(rows), regret(rows)
    every = kendall_tau([{**row, "low": row["measured"], "high": row["measured"]} for row in rows])
    errors = statistics.median(abs(row["error"]) for row in rows)
    print(f"{len(rows)} plans: tau {tau:.2f} (bar {LEAST_TAU}; all pairs {every:.2f}), regret {lost:.1f} %", end="")
    print(f" (bar {MOST_REGRET:g} %), median error of a step {errors:.1f} %")
    two = [row for row in rows if "2 devices" in row["plan"]]
    if given.save:
        content = {
            "date": datetime.now(UTC).date().isoformat(),
            "host": {"cpu": cpu_model(), "cores": usable_cores(), "python": platform.python_version()},
            "versions": {"tutti": VERSION, "torch": torch.__version__},
            "settings": {"task": TASK, "model": MODEL, "batch": BATCH, "rounds": given.rounds, "steps": given.steps},
            "note": given.note,
            "plans": len(rows),
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
        path = ROOT / "benchmarks" / "results" / f"{content['date']}-real-ranking.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"kept {path.name}")
    return int(ExitCode.THRESHOLD if tau < LEAST_TAU or lost > MOST_REGRET else ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
