"""A U-Net, or a GPT, on one device, and on two in every way: time of a step, and what each device does in it.

    python benchmarks/two_devices.py --data FOLDER            # membranes (ISBI 2012, 256×256), about ten minutes
    python benchmarks/two_devices.py --data FOLDER --quick    # does it run? its times mean nothing
    python benchmarks/two_devices.py --data FOLDER --save     # keeps results/DATE-two-devices.json
    python benchmarks/two_devices.py --task text --model gpt:layers=8,width=256,block=128 --batch 32 --steps 20

A round trains once with each strategy, in a random order, one thread a device; ratios are taken within a round. Time is
that of the run's steps (`samples_per_second` of its summary), without start, evaluation and saving. The share of idling
is read from `--trace`, and the bubble of the pipeline orders beside it is theory, for stages that take equally long.
A course on distributed training reports for one device, data parallelism and model parallelism 24.76 s, 18.98 s and
23.7 s an epoch of a U-Net on two GPUs. Exit codes: 0, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from step_tax import hardware

# name: strategy, devices
WAYS = {
    "one device": ("single", 1),
    "data parallel": ("mirrored", 2),
    "model parallel": ("model_parallel", 2),
    "pipeline, 2 micro-batches": ("pipeline:micro_batches=2", 2),
    "pipeline, 4 micro-batches": ("pipeline:micro_batches=4", 2),
    "pipeline, 8 micro-batches": ("pipeline:micro_batches=8", 2),
}


def trained(name: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train once; seconds a step of a whole batch, and each device's shares of time."""
    strategy, devices = WAYS[name]
    steps = 4 if given.quick else given.steps
    words = [sys.executable, "-m", "tutti", "train", given.task, "--model", given.model]
    words += ["--data", str(given.data)] if given.data else []
    words += ["--strategy", strategy, "--devices", str(devices), "--batch-size", str(given.batch), "--threads", "1"]
    words += ["--steps", str(steps), "--eval-every", "none", "--checkpoint-every", "none", "--trace", f"{steps - 1}:2"]
    done = subprocess.run([*words, "--out", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr}")
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "seconds_a_step": given.batch / summary["samples_per_second"],
        "loss": summary["train"]["loss"],
        "shares": (folder / "trace" / "shares.txt").read_text().splitlines(),
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="A U-Net, or a GPT, on one device and on two.")
    add = parser.add_argument
    add("--task", default="membranes", choices=("membranes", "text"))
    add("--data", type=Path, help="folder with train/image and train/label; a text file (default: the task's own)")
    add("--model", default="unet:width=16", help="default: unet:width=16")
    add("--batch", type=int, default=8, help="samples of a global batch (default: 8)")
    add("--steps", type=int, default=12, help="steps of a run (default: 12)")
    add("--rounds", type=int, default=5)
    add("--seed", type=int, default=0, help="of the order")
    add("--quick", action="store_true", help="one round of four steps")
    add("--save", action="store_true", help="write benchmarks/results/DATE-two-devices[-text].json")
    given = parser.parse_args(argv)
    if given.save and given.quick:
        parser.error("--save keeps results, and those of --quick mean nothing")
    if given.task == "membranes" and given.data is None:
        parser.error("membranes needs --data FOLDER")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints its table."""
    given = arguments(argv)
    now, draws = datetime.now(UTC), random.Random(given.seed)
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for number in range(1 if given.quick else given.rounds):
        for name in draws.sample(list(WAYS), len(WAYS)):
            with tempfile.TemporaryDirectory() as folder:
                told[name].append(trained(name, given, Path(folder) / "run"))
        print(f"round {number + 1} done", file=sys.stderr)
    print(table(told))
    if given.save:
        result = {
            "benchmark": "two-devices", "date": now.isoformat(timespec="seconds"), "hardware": hardware(),
            "task": given.task, "model": given.model, "batch": given.batch, "steps": given.steps, "runs": told,
        }  # fmt: skip
        of = "" if given.task == "membranes" else f"-{given.task}"
        path = Path(__file__).parent / "results" / f"{now.date()}-two-devices{of}.json"
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def table(told: dict[str, list[dict[str, Any]]]) -> str:
    """Median seconds a step, speed-up over one device within a round with its range, and the loss."""
    lines = [f"{'':<28}{'s a step':>12}{'speed-up':>10}{'range':>16}{'train loss':>12}"]
    for name, runs in told.items():
        times, alone = ([run["seconds_a_step"] for run in each] for each in (runs, told["one device"]))
        ratios = [one / time for one, time in zip(alone, times, strict=True)]
        seconds = statistics.median(times)
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        lines.append(
            f"{name:<28}{seconds:>12.2f}{statistics.median(ratios):>10.2f}{spread:>16}{runs[0]['loss']:>12.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
