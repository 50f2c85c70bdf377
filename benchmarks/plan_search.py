"""Time `tutti plan` over at least 10,000 plans on one core: the whole command, and the search within it.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/plan_search.py            # keeps results/DATE-plan-search.json

The machine is published hardware, so that any computer can search. The command runs in a process of its own: its CPU
seconds include imports, traces of the model, the search, and the printed answer. Within this process two searches are
timed, with a limit of memory that makes recomputation and micro-batches worth it. The first traces the model on fake
tensors, once for each number of tensor ranks and choice of recomputation, and cuts it into stages; the second finds
all of that. `reasons` say why each plan lost.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch

from tutti.distribution import VERSION
from tutti.planning.device_plan import (
    MeasuredTarget,
    TargetData,
    best_by_devices,
    device_plans,
    lost_reason,
)
from tutti.planning.machine_choice import open_machine
from tutti.planning.plan_candidates import PlanCandidates
from tutti.planning.plan_search import STRATEGIES, StepPricer, plan_choices, search_plans
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_prediction import TaskSizes

ROOT = Path(__file__).parents[1]
DEVICES = tuple(1 << power for power in range(7))
BATCHES = tuple(64 << power for power in range(6))
MEMORY = 0.5 * (1 << 30)
RECIPE = {
    "format": 1,
    "target": {"metric": "accuracy", "value": 0.5},
    "samples_min": 600_000,
    "critical_batch": 512,
    "draws": [[600_000, 512], [610_000, 455], [580_000, 600]],
    "basis": "stated",
}


def whole_command() -> dict[str, float]:
    """Run ``tutti plan`` in a process of its own, and return its plans, CPU seconds and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.json"
        recipe.write_text(json.dumps(RECIPE), encoding="utf-8")
        words = ["text", "--recipe", str(recipe), "--machine", "a100x8", "--precision", "bf16", "--max-devices", "64"]
        before, start = os.times(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "tutti", "plan", *words], capture_output=True, text=True, check=True
        )
        after, seconds = os.times(), time.perf_counter() - start
    used = after.children_user + after.children_system - before.children_user - before.children_system
    searched = re.search(r"searched +([0-9,]+) plans", done.stdout)
    plans = int(searched[1].replace(",", "")) if searched else 0
    return {"plans": plans, "cpu_seconds": used, "seconds": seconds, "seconds_for_10_000_plans": used / plans * 1e4}


def main() -> None:
    torch.set_num_threads(1)
    command = whole_command()
    base = PlannedRun(precision="bf16", optimizer="adamw:lr=0.001")
    data = TargetData([MeasuredTarget(64, 640_000, 3), MeasuredTarget(256, 900_000, 3)], None, {}, "digits")
    sizes = TaskSizes("text", base, ("blocks", "selective"))
    marks, found = [time.process_time()], PlanCandidates()
    for _ in range(2):
        pricer, found = StepPricer(sizes, base, open_machine("a100x8", "bf16", None, None)), PlanCandidates()
        choices = plan_choices(DEVICES, BATCHES, STRATEGIES, pricer.checkpointing())
        search_plans(choices, (), pricer, data, MEMORY, found)
        marks.append(time.process_time())
    plans = device_plans(found.steps, data, 2.0)
    best = {plan.devices: plan for plan in best_by_devices(plans)}
    reasons = [lost_reason(plan, best[plan.devices]) for plan in plans if plan is not best[plan.devices]]
    marks.append(time.process_time())
    first, search, why = (after - before for before, after in pairwise(marks))
    value = {
        "tutti": VERSION,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "processor": platform.processor() or platform.machine(),
        "task": "text",
        "devices": DEVICES,
        "batches": BATCHES,
        "command": command,
        "plans": found.searched,
        "evaluated": found.evaluated,
        "bounded": sum(plan.step.least for plan in plans),
        "refused": sum(found.refusals().values()),
        "cpu_seconds": {"first_search": first, "second_search": search, "reasons": why},
        "seconds_for_10_000_plans": (search + why) / found.searched * 1e4,
        "best": {devices: plan.step.label + f", batch {plan.step.batch}" for devices, plan in best.items()},
        "terms": dict(Counter(reason.term or "tie" for reason in reasons)),
    }
    path = ROOT / "benchmarks" / "results" / f"{value['date']}-plan-search.json"
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
