"""What one training step costs through tutti, against the same step by hand and through others.

    python benchmarks/step_tax.py                          # all workloads, about eight minutes
    python benchmarks/step_tax.py --quick                  # does it run? its times mean nothing
    python benchmarks/step_tax.py --workloads mlp --json out.json
    python benchmarks/step_tax.py --device cuda --processes 4

Two processes (``--processes``) with one thread each hold every contestant at once and run them in turn, in short
blocks of random order. Ratios are taken within a round, so that a drift of the machine cancels; several launches
average out where a process happened to place its tensors. Exit codes: 0, 2 usage, 9 where tutti's 95 % interval lies
wholly above ``--limit`` times the hand-written loop, or the weights differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contestants import AGAINST, CONTESTANTS, JUDGED, REFERENCE, WORKERS, Contestant, missing
from models import WORKLOADS, Batch, Workload
from paired import order, paired_ratio
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import TensorDataset

import tutti
from tutti.device import choose, collective_backend, is_device_choice, synchronize
from tutti.errors import ExitCode

TOLERANCE = 1e-5
WARM_UP = 5
BATCHES = 8


def join_group(rank: int, folder: str, size: int = WORKERS, device: str = "cpu") -> None:
    """Makes this process one of ``size`` on the loopback interface, with one thread and one device. Collective."""
    torch.set_num_threads(1)
    # Accelerate sets a number of threads of its own where OMP_NUM_THREADS is not set.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
        ACCELERATE_USE_CPU=str(int(device == "cpu")),
    )  # fmt: skip
    place = choose(device, rank, size, f"rank {rank}")
    backend = collective_backend(place)
    dist.init_process_group(
        "gloo" if backend is None else f"cpu:gloo,{place.type}:{backend}",
        init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=120),
    )  # fmt: skip
    tutti.init(device)


def make_batches(work: Workload, rank: int) -> tuple[TensorDataset, list[Batch]]:
    """The whole data set, the same on all ranks, and this rank's batches of it on its device."""
    generator = torch.Generator().manual_seed(1)
    whole = [work.batch(work.samples * work.processes, generator) for _ in range(BATCHES)]
    mine = slice(rank * work.samples, (rank + 1) * work.samples)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*whole, strict=True)))
    return data, [tuple(part[mine].contiguous().to(work.device) for part in batch) for batch in whole]


def train(contestant: Contestant, batches: Sequence[Batch], first: int, steps: int) -> None:
    """Steps ``first`` … ``first + steps`` over the batches in turn."""
    for step in range(first, first + steps):
        contestant.step(batches[step % len(batches)])


def race(team: Sequence[Contestant], batches: Sequence[Batch], work: Workload, seed: int, launch: int) -> Tensor:
    """Seconds a step, [rounds, contestants]: those of the slowest rank. Collective."""
    times, place = torch.zeros(work.rounds, len(team), dtype=torch.float64), tutti.init(work.device).device
    for turn in range(work.rounds):
        first = WARM_UP + turn * (work.lead + work.steps)
        for index in order(len(team), seed, launch, turn):
            dist.barrier()
            train(team[index], batches, first, work.lead)
            synchronize(place)
            began = time.perf_counter()
            train(team[index], batches, first + work.lead, work.steps)
            synchronize(place)
            times[turn, index] = (time.perf_counter() - began) / work.steps
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times


def distances(team: Sequence[Contestant]) -> list[float]:
    """For each contestant, the largest |p - q| ÷ (1 + |q|) to the first one's parameters q, on any rank. Collective."""
    far = torch.zeros(len(team), dtype=torch.float64)
    for index, contestant in enumerate(team):
        for mine, theirs in zip(contestant.model.parameters(), team[0].model.parameters(), strict=True):
            mine, theirs = _whole(mine), _whole(theirs)
            gap = ((mine - theirs).abs() / (1 + theirs.abs())).max().detach()
            # A NaN compares false with everything; it must not pass for agreement.
            far[index] = max(far[index].item(), gap.nan_to_num(nan=float("inf")).item())
    dist.all_reduce(far, dist.ReduceOp.MAX)
    return [float(value) for value in far]


def _whole(parameter: Tensor) -> Tensor:
    """All of a parameter of which this rank may hold rows. Collective where it does."""
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole


def measure(rank: int, folder: str, work: Workload, names: Sequence[str], seed: int, launch: int) -> None:
    """One of the processes: builds the contestants, runs the race; rank 0 writes ``folder/result.json``."""
    join_group(rank, folder, work.processes, work.device)
    data, batches = make_batches(work, rank)
    # Built in random order too: who comes first has another share of the memory.
    built = {names[i]: CONTESTANTS[names[i]](work, data) for i in order(len(names), seed, launch, work.rounds)}
    team = [built[name] for name in names]
    for contestant in team:
        train(contestant, batches, 0, WARM_UP)
    if torch.get_num_threads() != 1:
        raise RuntimeError(f"a contestant of {list(names)} changed the number of threads to {torch.get_num_threads()}")
    gc.collect()
    # What exists now lives to the end; the collector need not visit it within somebody's block.
    gc.freeze()
    times = race(team, batches, work, seed, launch)
    far = distances(team)
    if rank == 0:
        size = sum(parameter.numel() for parameter in team[0].model.parameters())
        result = {"parameters": size, "times": times.tolist(), "distances": far}
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run_launch(work: Workload, names: Sequence[str], seed: int, launch: int) -> dict[str, Any]:
    """Measures in fresh processes and returns what rank 0 wrote. Raises where either of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that torch is imported once: the parent has started no thread that a fork would lose.
        task = (folder, work, names, seed, launch)
        start_processes(measure, task, nprocs=work.processes, start_method="fork")  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
        return found


def run_workload(work: Workload, names: Sequence[str], seed: int) -> dict[str, Any]:
    """Measures one workload in all its launches and returns its part of the report."""
    launches = [run_launch(work, names, seed, launch) for launch in range(work.launches)]
    times = np.array([found["times"] for found in launches])
    rows = {}
    for index, name in enumerate(names):
        reference = times[:, :, list(names).index(AGAINST.get(name, REFERENCE))]
        ratio = paired_ratio(times[:, :, index], reference, seed)
        rows[name] = {
            "ms": 1e3 * float(np.median(times[:, :, index])),
            "ratio": ratio.median, "low": ratio.low, "high": ratio.high,
            "weight_distance": max(found["distances"][index] for found in launches),
        }  # fmt: skip
    return {
        "parameters": launches[0]["parameters"], "samples_per_rank": work.samples, "launches": work.launches,
        "rounds": work.rounds, "blocks": work.launches * work.rounds * len(names),
        "steps_per_block": work.steps, "untimed_steps_per_block": work.lead, "contestants": rows,
    }  # fmt: skip


def failures(workloads: Mapping[str, Mapping[str, Any]], limit: float | None) -> list[str]:
    """What is wrong with the results: one sentence each. ``limit`` None: times are not judged."""
    found = []
    for workload, part in workloads.items():
        for name, row in part["contestants"].items():
            if not row["weight_distance"] <= TOLERANCE:
                gap = f"{row['weight_distance']:.1e} from {REFERENCE}'s"
                found.append(f"{workload}: {name} trained other weights, {gap}")
            if limit is not None and name in JUDGED and row["low"] > limit:
                other = AGAINST.get(name, REFERENCE)
                found.append(f"{workload}: {name} takes {row['low']:.3f} to {row['high']:.3f} of {other}'s time")
    return found


def hardware() -> dict[str, Any]:
    """The machine and the versions; the load average says how quiet it was before."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    versions: dict[str, str | None] = {}
    for package in ("torch", "numpy", "accelerate", "lightning_fabric"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": (models or [platform.processor()])[0], "cores": os.cpu_count(), "system": platform.platform(),
        "python": platform.python_version(), "load_average": os.getloadavg()[0], "versions": versions,
    }  # fmt: skip


def table(workload: str, part: Mapping[str, Any]) -> str:
    """One workload's rows as text."""
    lines = [
        f"{workload}: {part['parameters']:,} parameters, {part['samples_per_rank']} samples a rank, "
        f"{part['launches']} launches x {part['rounds']} rounds x {part['steps_per_block']} timed steps",
        f"  {'':13} {'ms/step':>9} {'ratio':>7}   95 % interval   weights from {REFERENCE}'s",
    ]
    for name, row in part["contestants"].items():
        interval = f"{row['low']:.3f} - {row['high']:.3f}"
        lines.append(f"  {name:13} {row['ms']:9.3f} {row['ratio']:7.3f}   {interval:15} {row['weight_distance']:.1e}")
    return "\n".join(lines)


def listed(choices: Sequence[str], text: str) -> list[str]:
    """A comma-separated list of ``choices``, in their order, each once. Raises ArgumentTypeError for any other."""
    words = text.split(",")
    for word in words:
        if word not in choices:
            raise argparse.ArgumentTypeError(f"'{word}' is none of {', '.join(choices)}")
    return [choice for choice in choices if choice in words]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="Paired cost of a training step: tutti, DDP, Accelerate, Fabric.")
    add = parser.add_argument
    works, names = list(WORKLOADS), list(CONTESTANTS)
    add("--workloads", type=lambda text: listed(works, text), default=works, help=f"some of {','.join(works)}")
    add("--contestants", type=lambda text: listed(names, text), default=names, help=f"some of {','.join(names)}")
    add("--launches", type=int, help="pairs of processes to measure in (default: mlp 5, gpt 4, cnn 4)")
    add("--rounds", type=int, help="rounds of a launch, at least 2 (default: mlp 200, gpt 20, cnn 30)")
    add("--limit", type=float, default=1.02, help="largest allowed lower end of tutti's interval (default: 1.02)")
    add("--device", default="cpu", help="type of the device of each process, such as cuda (default: cpu)")
    add("--processes", type=int, default=WORKERS, help="processes that train together (default: 2)")
    add("--seed", type=int, default=0, help="of the order and the resampling")
    add("--quick", action="store_true", help="one launch, 4 rounds, times are not judged: does it run?")
    add("--json", type=Path, help="write the report there")
    add("--save", action="store_true", help="write it to benchmarks/results/DATE-step-tax.json as well")
    given = parser.parse_args(argv)
    if given.rounds is not None and given.rounds < 2:
        parser.error("--rounds is below 2")
    if given.launches is not None and given.launches < 1:
        parser.error("--launches is below 1")
    if given.processes < 1:
        parser.error("--processes is below 1")
    if not is_device_choice(given.device) or given.device == "auto":
        parser.error(f"--device {given.device} is no type of a device, such as cuda")
    if given.save and given.quick:
        parser.error("--save keeps results, and those of --quick mean nothing")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.parent}")
    for name in given.contestants:
        if AGAINST.get(name, name) not in given.contestants:
            parser.error(f"--contestants has no {AGAINST[name]}, which {name} is compared with")
    if REFERENCE not in given.contestants:
        parser.error(f"--contestants has no {REFERENCE}, which all are compared with")
    return given


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Runs the benchmark and returns its exit code."""
    given = arguments(argv)
    skipped = missing(given.contestants, given.device)
    for name, why in skipped.items():
        print(f"{name} is skipped: {why}", file=sys.stderr)
    names = [name for name in given.contestants if name not in skipped]
    now = datetime.now(UTC)
    report: dict[str, Any] = {
        "benchmark": "step_tax", "date": now.isoformat(timespec="seconds"), "quick": given.quick, "seed": given.seed,
        "limit": given.limit, "processes": given.processes, "threads_per_process": 1, "device": given.device,
        "backend": collective_backend(torch.device(given.device)) or "gloo",
        "hardware": hardware(), "skipped": list(skipped), "workloads": {},
    }  # fmt: skip
    for name in given.workloads:
        work = WORKLOADS[name]
        launches = given.launches or (1 if given.quick else work.launches)
        rounds = given.rounds or (4 if given.quick else work.rounds)
        work = replace(work, launches=launches, rounds=rounds, processes=given.processes, device=given.device)
        report["workloads"][name] = run_workload(work, names, given.seed)
        print(table(name, report["workloads"][name]), flush=True)
    report["failures"] = failures(report["workloads"], None if given.quick else given.limit)
    text = json.dumps(report, indent=2) + "\n"
    if given.json:
        given.json.write_text(text)
    if given.save:
        results = Path(__file__).parent / "results"
        results.mkdir(exist_ok=True)
        (results / f"{now.date()}-step-tax.json").write_text(text)
    for line in report["failures"]:
        print(line, file=sys.stderr)
    return ExitCode.THRESHOLD if report["failures"] else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
