"""What one save in fifty steps costs: the same steps with a save among them and without, paired.

    python benchmarks/saving.py                     # gpt and cnn, about ten minutes on two cores
    python benchmarks/saving.py --quick             # does it run? its times mean nothing
    python benchmarks/saving.py --save              # keeps results/DATE-saving.json

Two processes train a workload of ``step_tax.py``. A block is fifty steps. In a round there is one block with a save at
its beginning and one without, in a random order, and a second one without for the noise floor. A block ends when its
last step is made and its save is complete: written, hashed, fsynced and renamed. The time of the processor is measured
besides: it holds less of what else the machine does, and nothing of waiting for the disk. Exit codes: 0, 2 usage, 9
where the 95 % interval of the time lies wholly above ``--limit`` (1.03).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contestants import WORKERS, prepared
from models import WORKLOADS, Workload
from paired import order, paired_ratio
from step_tax import WARM_UP, hardware, join_group, make_batches
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes

from tutti.errors import ExitCode
from tutti.launcher import context
from tutti.train.run_checkpoints import Checkpoints

EVERY = 50
BLOCKS = ("without", "save", "without-again")
# Launches and rounds of a launch.
LENGTHS = {"gpt": (2, 6), "cnn": (3, 10)}


def measure(rank: int, folder: str, disk: str, name: str, rounds: int, every: int, seed: int, launch: int) -> None:
    """One of the two processes; rank 0 writes ``folder/result.json``."""
    join_group(rank, folder)
    work = WORKLOADS[name]
    data, batches = make_batches(work, rank)
    run, _ = prepared(work, data)
    warned: list[str] = []
    facts = {"config_sha256": "0" * 64}
    checkpoints = Checkpoints(run, Path(disk), context.current(), facts, keep=1, warn=warned.append)

    def block(saves: bool) -> tuple[float, float]:
        """Seconds a step, and of the processor's."""
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        for step in range(every):
            run.step(batches[step % len(batches)])
            if saves and not step:
                checkpoints.save({})
        checkpoints.wait()
        return (time.perf_counter() - began) / every, (time.process_time() - worked) / every

    for step in range(WARM_UP):
        run.step(batches[step % len(batches)])
    checkpoints.save({})
    checkpoints.wait()
    gc.collect()
    gc.freeze()
    times = race(block, rounds, seed, launch)
    if warned:
        raise RuntimeError(f"a save failed: {warned}")
    if rank == 0:
        files = [file for file in Path(disk).rglob("*") if file.is_file()]
        result = {"times": times.tolist(), "checkpoint_bytes": sum(file.stat().st_size for file in files)}
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def race(block: Callable[[bool], tuple[float, float]], rounds: int, seed: int, launch: int) -> torch.Tensor:
    """Seconds a step, [rounds, blocks, 2]: those of the slower rank. Collective."""
    times = torch.zeros(rounds, len(BLOCKS), 2, dtype=torch.float64)
    for turn in range(rounds):
        for index in order(len(BLOCKS), seed, launch, turn):
            times[turn, index] = torch.tensor(block(BLOCKS[index] == "save"), dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times


def run_launch(work: Workload, disk: Path | None, rounds: int, every: int, seed: int, launch: int) -> dict[str, Any]:
    """Measures in two fresh processes and returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=disk) as saves:
        task = (folder, saves, work.name, rounds, every, seed, launch)
        start_processes(measure, task, nprocs=WORKERS, start_method="fork")  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
        return found


def summed_up(launches: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """One workload's part of the report."""
    times = np.array([found["times"] for found in launches])
    rows: dict[str, dict[str, float]] = {}
    for index, name in enumerate(BLOCKS):
        rows[name] = {}
        for clock, prefix in enumerate(("", "cpu_")):
            ratio = paired_ratio(times[:, :, index, clock], times[:, :, 0, clock], seed)
            ms = 1e3 * float(np.median(times[:, :, index, clock]))
            found = {"ms": ms, "ratio": ratio.median, "low": ratio.low, "high": ratio.high}
            rows[name] |= {prefix + key: value for key, value in found.items()}
    size = launches[0]["checkpoint_bytes"]
    return {"checkpoint_bytes": size, "launches": len(launches), "rounds": times.shape[1], "blocks": rows}


def told(row: dict[str, float], prefix: str) -> str:
    """A clock's figures of one block."""
    ms, ratio, low, high = (row[prefix + key] for key in ("ms", "ratio", "low", "high"))
    return f" {prefix or 'time_'}: {ms:9.3f} ms a step {ratio:7.3f} {low:.3f} - {high:.3f}".replace("_:", ":")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="What one save in fifty steps costs.")
    add = parser.add_argument
    add("--workloads", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    add("--launches", type=int, help="pairs of processes to measure in (default: gpt 2, cnn 3)")
    add("--rounds", type=int, help="rounds of a launch, at least 2 (default: gpt 6, cnn 10)")
    add("--folder", type=Path, help="on the disk to save to")
    add("--limit", type=float, default=1.03, help="largest allowed lower end of the interval (default: 1.03)")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="one launch, two rounds of four steps, not judged: does it run?")
    add("--save", action="store_true", help="keep results/DATE-saving.json")
    given = parser.parse_args(argv)
    if given.rounds is not None and given.rounds < 2:
        parser.error("--rounds is below 2")
    if given.save and given.quick:
        parser.error("--save keeps results, and those of --quick mean nothing")
    return given


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Runs the benchmark and returns its exit code."""
    given = arguments(argv)
    now, every = datetime.now(UTC), 4 if given.quick else EVERY
    report: dict[str, Any] = {
        "benchmark": "saving", "date": now.isoformat(timespec="seconds"), "steps_per_save": every, "seed": given.seed,
        "limit": given.limit, "processes": WORKERS, "threads_per_process": 1, "hardware": hardware(), "workloads": {},
    }  # fmt: skip
    above = False
    for name in given.workloads:
        launches, rounds = (1, 2) if given.quick else LENGTHS[name]
        found = [
            run_launch(WORKLOADS[name], given.folder, given.rounds or rounds, every, given.seed, launch)
            for launch in range(given.launches or launches)
        ]
        report["workloads"][name] = part = summed_up(found, given.seed)
        print(f"{name}: a checkpoint of {part['checkpoint_bytes'] / 2**20:.1f} MiB every {every} steps")
        for block, row in part["blocks"].items():
            print(f"  {block:14}", *(told(row, prefix) for prefix in ("", "cpu_")))
        above = above or part["blocks"]["save"]["low"] > given.limit
    if given.save:
        results = Path(__file__).parent / "results"
        (results / f"{now.date()}-saving.json").write_text(json.dumps(report, indent=1) + "\n")
    return ExitCode.THRESHOLD if above and not given.quick else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
