"""How far predictions of ``tutti simulate`` are off: benchmark, prediction and real steps in the same minutes.

    python benchmarks/simulate_check.py                    # real runs of several strategies; on an idle machine
    python benchmarks/simulate_check.py --clock cpu        # one device and thread, in CPU seconds; beside other work
    python benchmarks/simulate_check.py --save             # keeps results/DATE-simulate-CLOCK.json

Every round measures the machine anew, predicts every case and trains it, so that a ratio compares what ran in the same
minutes; the result has all ratios measured ÷ predicted and their median. ``--clock wall`` starts ``tutti bench`` and
``tutti train``. ``--clock cpu`` times forward, backward and update of one device on one thread with the thread's CPU
clock, which other processes disturb little; it says nothing of several devices.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti.comm.collective_schedules import LinkCost
from tutti.config.optimizer_config import check_optimizer
from tutti.data.adapt import adapt_training
from tutti.device import cpu_model, usable_cores
from tutti.distribution import VERSION
from tutti.optim.factory import from_config
from tutti.planning.cluster_network import Network
from tutti.planning.machine_choice import open_machine
from tutti.planning.measured_costs import MeasuredCosts
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_prediction import gather_sizes, predict_step
from tutti.tasks import task_registry
from tutti.workload import bench_device
from tutti.workload.bench_timing import Findings
from tutti.workload.machine_file import Machine

OPTIMIZER, BATCH = "adam:lr=0.001", 64
STRATEGIES = {
    "single": 1,
    "mirrored:algorithm=native": 2,
    "mirrored:algorithm=ring": 2,
    "sharded:stage=1": 2,
    "sharded:stage=3": 2,
    "pipeline:micro_batches=4": 2,
    "central_storage": 2,
    "parameter_server": 2,
    "parameter_server:mode=async": 2,
    "tensor": 2,
    "hybrid:stages=2,tensor=2,micro_batches=4": 4,
}
_SKIPPED = 5
"""First steps of a run, which also allocate memory."""


def config_of(strategy: str, devices: int) -> PlannedRun:
    """Return the run of a case."""
    return PlannedRun(strategy=strategy, devices=str(devices), batch_size=BATCH, optimizer=OPTIMIZER)


def predicted(task: str, config: PlannedRun, machine: Any) -> float:
    """Return the median of the predicted seconds of a step."""
    return predict_step(task, gather_sizes(task, config), config, machine, {})[0].seconds


def trained(task: str, strategy: str, devices: int, steps: int, folder: Path) -> float:
    """Return the median seconds of a real step, from the clock of rank 0."""
    words = ["train", task, "--strategy", strategy, "--devices", str(devices), "--device", "cpu"]
    words += ["--batch-size", str(BATCH), "--optimizer", OPTIMIZER, "--steps", str(steps)]
    words += ["--checkpoint-every", "none", "--out", str(folder), "--overwrite"]
    _tutti(words)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock = [line["seconds"] for line in lines if line["group"] == "train"][_SKIPPED:]
    return statistics.median(np.diff(clock).tolist())


def _tutti(words: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "tutti", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"tutti {' '.join(words)}: {done.stderr[-2000:]}")


def wall_round(
    tasks: Sequence[str], steps: int, strategies: Mapping[str, int] = STRATEGIES
) -> dict[str, tuple[float, float]]:
    """Return predicted and measured seconds of every case, from one measurement of the machine."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "machine.json"
        _tutti(
            [
                "bench",
                "device",
                "links",
                "collectives",
                "optimizer",
                "--ranks",
                str(max(strategies.values())),
                "-o",
                str(file),
            ]
        )
        for task in tasks:
            for strategy, devices in strategies.items():
                costs = open_machine(str(file), "fp32", None, None)
                seconds = predicted(task, config_of(strategy, devices), costs)
                found[f"{task} {strategy}"] = seconds, trained(task, strategy, devices, steps, Path(scratch) / "run")
                _say(f"{task} {strategy}", found[f"{task} {strategy}"])
    return found


def cpu_round(tasks: Sequence[str], steps: int) -> dict[str, tuple[float, float]]:
    """Return predicted and measured CPU seconds of a step of one device on one thread."""
    torch.set_num_threads(1)
    # Backward's operators then run on this thread, whose clock is read.
    torch.autograd.set_multithreading_enabled(False)
    clock, time.perf_counter = time.perf_counter, time.thread_time
    try:
        findings = Findings(show=False)
        bench_device.bench_device(torch.device("cpu"), findings)
        bench_device.bench_optimizer(torch.device("cpu"), findings)
        facts = {"type": "cpu", "name": cpu_model(), "threads": 1}
        machine = Machine({"name": "cpu clock", "cores": 1}, facts, ("device",), findings.figures, findings.curves)
        found = {}
        for task in tasks:
            costs = MeasuredCosts(machine, "fp32", Network(1, LinkCost(1.0, 1.0)))
            seconds = predicted(task, config_of("single", 1), costs)
            found[f"{task} single"] = seconds, statistics.median(stepped(task, steps))
            _say(f"{task} single", found[f"{task} single"])
    finally:
        time.perf_counter = clock
    return found


def stepped(name: str, steps: int) -> list[float]:
    """Return the seconds of forward, backward and update of a task, by the current clock."""
    task = task_registry.load_task(name, data=None, model=None, augment=False)
    model = task.model().train()
    optimizer = from_config(check_optimizer(OPTIMIZER))(list(model.named_parameters()))
    batch = adapt_training(task.train).fetch(np.arange(BATCH), None)
    found = []
    for _ in range(steps + _SKIPPED):
        begin = time.perf_counter()
        result = task.loss(model, batch)
        (result if isinstance(result, torch.Tensor) else result[0]).mean().backward()
        optimizer.step()
        found.append(time.perf_counter() - begin)
        model.zero_grad()
    return found[_SKIPPED:]


def _say(case: str, pair: tuple[float, float]) -> None:
    print(f"{case}: predicted {pair[0] * 1e3:.1f} ms, measured {pair[1] * 1e3:.1f} ms", file=sys.stderr, flush=True)


def summary(rounds: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, Any]:
    """Return every case's pairs and the median of its ratios.

    >>> summary([{"a": (1.0, 2.0)}, {"a": (1.0, 3.0)}, {"a": (2.0, 2.0)}])["a"]["ratio"]
    2.0
    """
    cases = {}
    for case in rounds[0]:
        pairs = [each[case] for each in rounds]
        ratios = [measured / foreseen for foreseen, measured in pairs]
        cases[case] = {
            "predicted_ms": [1e3 * foreseen for foreseen, _ in pairs],
            "measured_ms": [1e3 * measured for _, measured in pairs],
            "ratios": ratios,
            "ratio": statistics.median(ratios),
        }
    return cases


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and return its exit code."""
    parser = argparse.ArgumentParser(description="How far predictions of tutti simulate are off.")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--tasks", default="text,digits")
    parser.add_argument("--strategies", default="+".join(STRATEGIES), help="with --clock wall: NAME+NAME of the table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--save", action="store_true", help="keep results/DATE-simulate-CLOCK.json")
    given = parser.parse_args(argv)
    chosen = {name: STRATEGIES[name] for name in given.strategies.split("+")}
    play = partial(wall_round, strategies=chosen) if given.clock == "wall" else cpu_round
    cases = summary([play(given.tasks.split(","), given.steps) for _ in range(given.rounds)])
    for case, row in cases.items():
        print(f"{case}: measured ÷ predicted {row['ratio']:.2f} (median of {given.rounds})")
    if given.save:
        date = datetime.now(UTC).date().isoformat()
        path = Path(__file__).parent / "results" / f"{date}-simulate-{given.clock}.json"
        settings = {key: getattr(given, key) for key in ("clock", "rounds", "steps")}
        host = {"cpu": cpu_model(), "cores": usable_cores(), "python": platform.python_version()}
        versions = {"tutti": VERSION, "torch": torch.__version__}
        content = {"date": date, "settings": settings, "host": host, "versions": versions, "cases": cases}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"kept {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
