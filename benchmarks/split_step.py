"""What a step of a split model costs through tutti, against the same split by hand on PyTorch.

    python benchmarks/split_step.py                          # every way, about 40 minutes
    python benchmarks/split_step.py --ways pipeline,tensor   # some of them
    python benchmarks/split_step.py --quick                  # does it run? its times mean nothing

The ways written by hand are in ``split_by_hand.py``; tutti is given the same model, a GPT of 3.7 or a ViT of 3.2
million parameters, and the same cuts, and finds the split of the layers by itself; embedding and last layer stay whole
in both. Where there are replicas, four processes train two. Measured as ``step_tax.py`` measures. Exit codes: 0, 9
where tutti's 95 % interval lies wholly above ``--limit`` or weights differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from contestants import Contestant
from models import Workload, mean_loss
from paired import order, paired_ratio
from split_by_hand import GPT, MICRO_BATCHES, VIT, dtensor, layers, pipelining, shards_of_dtensors
from step_tax import TOLERANCE, WARM_UP, hardware, join_group, listed, make_batches, race, table, train
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import TensorDataset

import tutti
from tutti.errors import ExitCode
from tutti.torch_compat import FunctionModesDisabled


def through_tutti(strategy: str, work: Workload, replicas: int, data: TensorDataset) -> Contestant:
    """The same split, one call a step."""
    torch.manual_seed(0)
    model = work.build()
    optimizer = work.optimizer(model.parameters())
    size = replicas * work.samples
    run = tutti.prepare(model, optimizer, data, mean_loss, strategy=strategy, workers=replicas, batch_size=size)
    return Contestant(nn.ModuleList(run.replica.parts), run.step)


class Way(NamedTuple):
    """One way to split a model over two processes a replica: by hand, and tutti's strategy."""

    name: str
    by_hand: Callable[[Workload], Contestant]
    strategy: str
    replicas: int = 1
    work: Workload = GPT

    def contestants(self) -> dict[str, Callable[[TensorDataset], Contestant]]:
        return {self.name: self._by_hand, f"{self.name}-again": self._by_hand, "tutti": self._tutti}

    def _by_hand(self, data: TensorDataset) -> Contestant:
        return self.by_hand(self.work)

    def _tutti(self, data: TensorDataset) -> Contestant:
        return through_tutti(self.strategy, self.work, self.replicas, data)


def _pipeline(schedule: str, *cuts: int) -> Way:
    named = "+".join(map(str, cuts))
    strategy = f"pipeline:stages=2,schedule={schedule},micro_batches={MICRO_BATCHES},cuts={named}"
    return Way("pipelining", partial(pipelining, schedule, cuts), strategy)


CUT = 3
BLOCKS_ALONE = "least=1000000000"
WAYS = {
    "model_parallel": Way("send-recv", partial(layers, CUT), f"model_parallel:cuts={CUT}"),
    "gpipe": _pipeline("gpipe", CUT),
    "1f1b": _pipeline("1f1b", CUT),
    "interleaved": _pipeline("interleaved", 2, 3, 4),
    "zero_bubble": _pipeline("zero_bubble", CUT),
    "tensor": Way("dtensor", dtensor, f"tensor:{BLOCKS_ALONE}"),
    "stages_replicas": _pipeline("1f1b", CUT)._replace(replicas=2),
    "tensor_replicas": Way("dtensor", dtensor, f"tensor:tensor=2,{BLOCKS_ALONE}", 2),
    "tensor_shards": Way("fsdp-dtensor", shards_of_dtensors, f"hybrid:shards=2,stage=3,tensor=2,{BLOCKS_ALONE}", 2),
}
WAYS |= {f"vit_{name}": WAYS[name]._replace(work=VIT) for name in ("model_parallel", "gpipe", "1f1b", "tensor")}


def distance(contestant: Contestant, first: Contestant) -> float:
    """The largest |p - q| ÷ (1 + |q|) between this rank's slices of two contestants' parameters."""
    gaps = []
    for mine, theirs in zip(contestant.model.parameters(), first.model.parameters(), strict=True):
        p, q = (t.to_local() if isinstance(t, DTensor) else t.detach() for t in (mine, theirs))
        gaps.append(float(((p - q).abs() / (1 + q.abs())).max().detach()))
    return max(gaps)


def measure(rank: int, folder: str, way: str, rounds: int, launch: int) -> None:
    """One of the processes: builds the contestants, runs the race; rank 0 writes ``folder/result.json``."""
    join_group(rank, folder, 2 * WAYS[way].replicas)
    # Two ranks are of one replica, and train on the same samples.
    data, batches = make_batches(WAYS[way].work, rank // 2)
    contestants = WAYS[way].contestants()
    names = list(contestants)
    built = {names[i]: contestants[names[i]](data) for i in order(len(names), 0, launch, rounds)}
    team = [built[name] for name in names]
    for contestant in team:
        train(contestant, batches, 0, WARM_UP)
    gc.collect()
    gc.freeze()
    work = replace(WAYS[way].work, rounds=rounds)
    times = race(team, batches, work, 0, launch)
    # Outside of the model a script is not to compute with slices, which a function mode of the run refuses.
    with FunctionModesDisabled():
        far = torch.tensor([distance(contestant, team[0]) for contestant in team])
    dist.all_reduce(far, dist.ReduceOp.MAX)
    if rank == 0:
        size = sum(p.numel() for p in WAYS[way].work.build().parameters())
        Path(folder, "result.json").write_text(
            json.dumps({"parameters": size, "times": times.tolist(), "distances": far.tolist()})
        )
    dist.barrier()
    dist.destroy_process_group()


def run_launch(way: str, rounds: int, launch: int) -> dict[str, Any]:
    """Measures in fresh processes and returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        processes = 2 * WAYS[way].replicas
        start_processes(measure, (folder, way, rounds, launch), nprocs=processes, start_method="fork")  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
        return found


def run_way(way: str, launches: int, rounds: int) -> dict[str, Any]:
    """Measures one way and returns its part of the report."""
    found = [run_launch(way, rounds, launch) for launch in range(launches)]
    times = np.array([result["times"] for result in found])
    rows = {}
    for index, name in enumerate(WAYS[way].contestants()):
        ratio = paired_ratio(times[:, :, index], times[:, :, 0], 0)
        far = max(result["distances"][index] for result in found)
        rows[name] = {"ms": 1e3 * float(np.median(times[:, :, index])), "ratio": ratio.median, "low": ratio.low}
        rows[name] |= {"high": ratio.high, "weight_distance": far}
    part = {"parameters": found[0]["parameters"], "samples_per_rank": WAYS[way].work.samples, "launches": launches}
    part |= {"rounds": rounds, "steps_per_block": WAYS[way].work.steps, "contestants": rows}
    print(table(way, part).replace("ddp's", f"{WAYS[way].name}'s"), flush=True)
    return part


def main() -> ExitCode:
    """Runs the benchmark and returns its exit code."""
    parser = argparse.ArgumentParser(description="Paired cost of a step of a split model: tutti and PyTorch by hand.")
    ways = list(WAYS)
    parser.add_argument("--ways", type=lambda text: listed(ways, text), default=ways, help=f"some of {','.join(ways)}")
    parser.add_argument("--launches", type=int, default=GPT.launches, help=f"pairs of processes ({GPT.launches})")
    parser.add_argument("--rounds", type=int, default=GPT.rounds, help=f"rounds of a launch ({GPT.rounds})")
    parser.add_argument("--limit", type=float, default=1.02, help="largest allowed lower end of the interval (1.02)")
    parser.add_argument("--quick", action="store_true", help="one launch, 4 rounds, times are not judged")
    parser.add_argument("--save", action="store_true", help="write it into benchmarks/results/DATE-split-step.json")
    given = parser.parse_args()
    launches, rounds = (1, 4) if given.quick else (given.launches, given.rounds)
    now = datetime.now(UTC)
    report: dict[str, Any] = {
        "benchmark": "split_step", "date": now.isoformat(timespec="seconds"), "hardware": hardware(), "ways": {},
    }  # fmt: skip
    slow = wrong = False
    for way in given.ways:
        part = report["ways"][way] = run_way(way, launches, rounds)
        slow |= not given.quick and part["contestants"]["tutti"]["low"] > given.limit
        wrong |= any(not row["weight_distance"] <= TOLERANCE for row in part["contestants"].values())
    if given.save:
        path = Path(__file__).parent / "results" / f"{now.date()}-split-step.json"
        if path.exists():
            report["ways"] = {**json.loads(path.read_text())["ways"], **report["ways"]}
        path.write_text(json.dumps(report, indent=2) + "\n")
    return ExitCode.THRESHOLD if slow or wrong else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
