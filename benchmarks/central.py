"""Central storage against mirrored: memory of all processes, time of a step, and what still fits into a budget.

    python benchmarks/central.py                    # memory, time and budget, about four minutes on two cores
    python benchmarks/central.py --quick            # does it run? its times mean nothing
    python benchmarks/central.py --parts memory,budget
    python benchmarks/central.py --save             # keeps results/DATE-central.json

*memory*: N processes train a model with Adam; each reads its proportional set size (PSS: shared pages are divided by
those who share them) before the model is made and after three steps. The sums over processes are given in units of the
parameters' bytes. *time*: two processes hold both strategies and run them in turn, as in ``step_tax.py``; the ratio is
paired within rounds. *budget*: every process is forbidden (RLIMIT_DATA) to take more memory of its own than its part of
a budget for all, from which what they share is taken off first. Exit codes: 0, 2 usage, 9 where central storage does
not train within the budget, or mirrored does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import WORKLOADS, mean_loss
from paired import order, paired_ratio
from step_tax import hardware
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

import tutti
from tutti.errors import ExitCode

PAIR = ("mirrored", "central_storage")
PARTS = ("memory", "time", "budget")
LAUNCHES, ROUNDS = {"mlp": 3, "gpt": 3, "cnn": 3}, {"mlp": 60, "gpt": 8, "cnn": 12}
BUDGET = 12
"""Copies of the parameters that all processes together may hold. Mirrored needs 5 a process with Adam: the model, its
gradients, their slot in shared memory, two moments."""


def join(rank: int, size: int, folder: str) -> None:
    """Makes this process one of ``size``, with one thread."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()}, GLOO_SOCKET_IFNAME="lo")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))


def started(function: Callable[..., None], size: int, *arguments: Any) -> dict[str, Any]:
    """What rank 0 leaves in ``result.json`` of a folder that all are given; ``{"failed": why}`` where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            task = (size, folder, *arguments)
            start_processes(function, task, nprocs=size, start_method="fork")  # type: ignore[no-untyped-call]
        except (ProcessRaisedException, ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]
            return {"failed": last}
        found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
        return found


def leave(folder: str, result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def proc(name: str, key: str) -> int:
    """Bytes that ``/proc/self`` tells of this process."""
    lines = Path("/proc/self", name).read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def wide(width: int) -> nn.Module:
    """Eight square layers: 8 · width² parameters in tensors of one size."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(width, width, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def own_loss(model: Any, batch: Any) -> Any:
    return (model(batch) - batch).square().mean()


def prepared(strategy: str, width: int, size: int) -> tuple[tutti.Run, torch.Tensor]:
    torch.manual_seed(0)
    data = torch.randn(8 * size, width)
    optimizer = "adam:lr=0.0001"
    run = tutti.prepare(wide(width), optimizer, data, own_loss, strategy=strategy, batch_size=8 * size)
    return run, data[8 * dist.get_rank() : 8 * dist.get_rank() + 8]


def settle(strategy: str, size: int) -> None:
    """Load and start all that a run of this strategy needs, with a model of no size."""
    run, batch = prepared(strategy, 8, size)
    run.step(batch)
    dist.barrier()


def memory(rank: int, size: int, folder: str, strategy: str, width: int) -> None:
    join(rank, size, folder)
    settle(strategy, size)
    before = proc("smaps_rollup", "Pss")
    dist.barrier()
    run, batch = prepared(strategy, width, size)
    losses = [run.step(batch) for _ in range(3)]
    gc.collect()
    dist.barrier()
    grown = torch.tensor([proc("smaps_rollup", "Pss") - before])
    dist.barrier()
    dist.all_reduce(grown)
    states = [tensor for o in run.gradient_sync.optimizers for state in o.state.values() for tensor in state.values()]
    kept = torch.tensor([sum(tensor.nbytes for tensor in states if tensor.dim())])
    dist.all_reduce(kept)
    parameters = sum(p.nbytes for p in run.model.parameters())
    units = {"grown": int(grown) / parameters, "optimizer_state": int(kept) / parameters}
    leave(folder, {"parameter_bytes": parameters, **units, "losses": losses})


def race(rank: int, size: int, folder: str, name: str, rounds: int, seed: int, launch: int) -> None:
    join(rank, size, folder)
    work = WORKLOADS[name]
    inputs, labels = work.batch(work.samples * size, torch.Generator().manual_seed(1))
    mine = slice(rank * work.samples, (rank + 1) * work.samples)
    batch = inputs[mine].contiguous(), labels[mine].contiguous()
    runs = []
    for strategy in (*PAIR, PAIR[0]):
        torch.manual_seed(0)
        model = work.build()
        made = tutti.prepare(
            model,
            work.optimizer(model.parameters()),
            (inputs, labels),
            mean_loss,
            strategy=strategy,
            batch_size=len(inputs),
        )
        runs.append(made)
    for run in runs:
        for _ in range(5):
            run.step(batch)
    gc.collect()
    gc.freeze()
    times = torch.zeros(rounds, len(runs), dtype=torch.float64)
    for turn in range(rounds):
        for index in order(len(runs), seed, launch, turn):
            dist.barrier()
            for _ in range(work.lead):
                runs[index].step(batch)
            began = time.perf_counter()
            for _ in range(work.steps):
                runs[index].step(batch)
            times[turn, index] = (time.perf_counter() - began) / work.steps
    dist.all_reduce(times, dist.ReduceOp.MAX)
    leave(folder, {"times": times.tolist(), "equal": len({run.weights_sha256() for run in runs}) == 1})


def within(rank: int, size: int, folder: str, strategy: str, width: int, own: int) -> None:
    """Train with at most ``own`` bytes of one's own more than a process has that has trained a model of no size."""
    join(rank, size, folder)
    settle(strategy, size)
    limit = proc("status", "VmData") + own
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    run, batch = prepared(strategy, width, size)
    losses = [run.step(batch) for _ in range(5)]
    leave(folder, {"losses": losses})


def measure_memory(width: int) -> dict[str, Any]:
    found = {f"{s}, {n} processes": started(memory, n, s, width) for n in (1, 2, 4) for s in PAIR}
    print(f"memory, {8 * width * width * 4 / 2**20:.0f} MiB of parameters, Adam; in units of them")
    for name, row in found.items():
        print(f"  {name:32} all processes +{row['grown']:5.2f}   optimizer state {row['optimizer_state']:5.2f}")
    return found


def measure_time(names: Sequence[str], seed: int, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    print("time of a step / mirrored's, two processes")
    for name in names:
        launches, rounds = (1, 4) if quick else (LAUNCHES[name], ROUNDS[name])
        parts = [started(race, 2, name, rounds, seed, launch) for launch in range(launches)]
        times = np.array([part["times"] for part in parts])
        reference = times[:, :, 0]
        rows = {"ms": 1e3 * float(np.median(reference)), "equal": all(part["equal"] for part in parts)}
        for index, label in ((1, "central_storage"), (2, "mirrored again")):
            ratio = paired_ratio(times[:, :, index], reference, seed)
            rows[label] = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
            print(f"  {name:5} {label:16} {ratio.median:6.3f}   {ratio.low:.3f} - {ratio.high:.3f}")
        found[name] = rows
    return found


def measure_budget(width: int, size: int = 4) -> dict[str, Any]:
    """Both strategies within one budget; of central storage's, what is shared is taken off before it is divided."""
    parameters = 8 * width * width * 4
    whole = BUDGET * parameters
    # Shared: the slots of all ranks' gradients, and in central storage the parameters.
    shared = {"mirrored": size * parameters, "central_storage": (size + 1) * parameters}
    found: dict[str, Any] = {"parameter_bytes": parameters, "budget_bytes": whole, "processes": size}
    print(f"budget of {BUDGET} times the parameters ({whole / 2**20:.0f} MiB) for {size} processes, Adam")
    for strategy in PAIR:
        own = (whole - shared[strategy]) // size
        found[strategy] = started(within, size, strategy, width, own)
        said = found[strategy]
        outcome = f"does not fit: {said['failed']}" if "failed" in said else f"trains, losses {said['losses']}"
        print(f"  {strategy:16} {own / 2**20:6.0f} MiB of its own a process: {outcome}")
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="Central storage against mirrored: memory, time, and a budget.")
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    add("--workloads", default="mlp,gpt,cnn", help="for time: some of mlp,gpt,cnn")
    add("--width", type=int, default=1448, help="of the model for memory and budget: 8 · width² parameters")
    add("--seed", type=int, default=0, help="of the order and the resampling")
    add("--quick", action="store_true", help="a small model and few rounds: does it run?")
    add("--save", action="store_true", help="write benchmarks/results/DATE-central.json")
    given = parser.parse_args(argv)
    given.parts, given.workloads = given.parts.split(","), given.workloads.split(",")
    if not set(given.parts) <= set(PARTS) or not set(given.workloads) <= set(LAUNCHES):
        parser.error("there is no such part or workload")
    if given.save and given.quick:
        parser.error("--save keeps results, and those of --quick mean nothing")
    return given


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Runs the benchmark and returns its exit code."""
    given = arguments(argv)
    now = datetime.now(UTC)
    report: dict[str, Any] = {"benchmark": "central", "date": now.isoformat(timespec="seconds"), "hardware": hardware()}
    width = 512 if given.quick else given.width
    if "memory" in given.parts:
        report["memory"] = measure_memory(width)
    if "time" in given.parts:
        report["time"] = measure_time(given.workloads, given.seed, given.quick)
    if "budget" in given.parts:
        report["budget"] = measure_budget(max(width, 1024))
    if given.save:
        (Path(__file__).parent / "results" / f"{now.date()}-central.json").write_text(
            json.dumps(report, indent=2) + "\n"
        )
    budget = report.get("budget", {"mirrored": {"failed": ""}, "central_storage": {}})
    kept = "failed" in budget["mirrored"] and "failed" not in budget["central_storage"]
    return ExitCode.DONE if kept else ExitCode.THRESHOLD


if __name__ == "__main__":
    sys.exit(main())
