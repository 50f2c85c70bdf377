"""What a step of a split model costs through tutti, against the same split by hand on PyTorch.

    python benchmarks/split_step.py                    # two processes, a GPT of 3.7 M parameters, about five minutes
    python benchmarks/split_step.py --ways pipeline    # one of tensor, pipeline
    python benchmarks/split_step.py --quick            # does it run? its times mean nothing

*tensor*, by hand: ``parallelize_module`` of attention and feed-forward by columns and rows, as PyTorch's tutorial does
it; the model is written so that DTensor can split it (a matrix each for queries, keys and values, views without the
number of heads). Through tutti: the same model, its plan found; embedding and last layer stay whole in both.
*pipeline*, by hand: ``PipelineStage`` and ``Schedule1F1B`` of ``torch.distributed.pipelining`` over two stages and four
micro-batches; through tutti the same model, cut in the same place. Measured as ``step_tax.py`` measures. Exit codes: 0,
9 where tutti's 95 % interval lies wholly above ``--limit`` or weights differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from contestants import Contestant
from models import Workload, _adamw, _text, mean_loss
from paired import order, paired_ratio
from step_tax import TOLERANCE, WARM_UP, hardware, join_group, listed, make_batches, race, table, train
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tutti.errors import ExitCode

MICRO_BATCHES, CUT = 4, 3


class Attention(nn.Module):
    """Causal attention that works for any number of heads that its linear layers give."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [m(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in (self.query, self.key, self.value)]
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        mixed: Tensor = self.mix(seen.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.feed(self.norm2(x))
        return x


def build() -> nn.Module:
    """[samples, 128] tokens to [samples, 128, 1024] logits."""
    width = 256
    blocks = (Block(width, heads=4) for _ in range(4))
    return nn.Sequential(nn.Embedding(1024, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 1024, bias=False))


WORK = Workload("split gpt", build, _text, _adamw, samples=8, launches=4, rounds=20, steps=1, lead=0)


def dtensor(data: TensorDataset) -> Contestant:
    """DTensor, from PyTorch's tutorial on tensor parallelism."""
    torch.manual_seed(0)
    model = WORK.build()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    columns = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan = {**columns, "attention.mix": RowwiseParallel(), "feed.0": ColwiseParallel(), "feed.2": RowwiseParallel()}
    for block in model.children():
        if isinstance(block, Block):
            parallelize_module(block, mesh, plan)
    # A fused optimizer does not take plain and distributed tensors together.
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
    optimizers = [WORK.optimizer(group) for group in groups]

    def step(batch: tuple[Tensor, Tensor]) -> None:
        mean_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return Contestant(model, step)


def pipelining(data: TensorDataset) -> Contestant:
    """Two stages of ``torch.distributed.pipelining``."""
    torch.manual_seed(0)
    children, rank = list(WORK.build().children()), dist.get_rank()
    part = nn.Sequential(*(children[CUT:] if rank else children[:CUT]))
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, -2), labels.flatten())

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss)
    optimizer = WORK.optimizer(part.parameters())

    def step(batch: tuple[Tensor, Tensor]) -> None:
        inputs, labels = batch
        if rank:
            schedule.step(target=labels)
        else:
            schedule.step(inputs)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(part, step)


def through_tutti(strategy: str, data: TensorDataset) -> Contestant:
    """The same split, one call a step."""
    torch.manual_seed(0)
    model = WORK.build()
    optimizer = WORK.optimizer(model.parameters())
    run = tutti.prepare(model, optimizer, data, mean_loss, strategy=strategy, workers=1, batch_size=WORK.samples)
    return Contestant(nn.ModuleList(run.replica.parts), run.step)


class Way(NamedTuple):
    """One way to split a model: by hand, and tutti's strategy."""

    name: str
    by_hand: Callable[[TensorDataset], Contestant]
    strategy: str

    def contestants(self) -> dict[str, Callable[[TensorDataset], Contestant]]:
        return {self.name: self.by_hand, f"{self.name}-again": self.by_hand, "tutti": self.tutti}

    def tutti(self, data: TensorDataset) -> Contestant:
        return through_tutti(self.strategy, data)


WAYS = {
    "tensor": Way("dtensor", dtensor, "tensor:least=1000000000"),
    "pipeline": Way("pipelining", pipelining, f"pipeline:schedule=1f1b,micro_batches={MICRO_BATCHES},cuts={CUT}"),
}


def distance(contestant: Contestant, first: Contestant) -> float:
    """The largest |p - q| ÷ (1 + |q|) between this rank's slices of two contestants' parameters."""
    gaps = []
    for mine, theirs in zip(contestant.model.parameters(), first.model.parameters(), strict=True):
        p, q = (t.to_local() if isinstance(t, DTensor) else t.detach() for t in (mine, theirs))
        gaps.append(float(((p - q).abs() / (1 + q.abs())).max().detach()))
    return max(gaps)


def measure(rank: int, folder: str, way: str, rounds: int, launch: int) -> None:
    """One of the two processes: builds the contestants, runs the race; rank 0 writes ``folder/result.json``."""
    join_group(rank, folder)
    # Both ranks are of one replica, and train on the same samples.
    data, batches = make_batches(WORK, 0)
    contestants = WAYS[way].contestants()
    names = list(contestants)
    built = {names[i]: contestants[names[i]](data) for i in order(len(names), 0, launch, rounds)}
    team = [built[name] for name in names]
    for contestant in team:
        train(contestant, batches, 0, WARM_UP)
    gc.collect()
    gc.freeze()
    work = Workload(**{**vars(WORK), "rounds": rounds})
    times = race(team, batches, work, 0, launch)
    far = torch.tensor([distance(contestant, team[0]) for contestant in team])
    dist.all_reduce(far, dist.ReduceOp.MAX)
    if rank == 0:
        size = sum(p.numel() for p in WORK.build().parameters())
        Path(folder, "result.json").write_text(
            json.dumps({"parameters": size, "times": times.tolist(), "distances": far.tolist()})
        )
    dist.barrier()
    dist.destroy_process_group()


def run_launch(way: str, rounds: int, launch: int) -> dict[str, Any]:
    """Measures in two fresh processes and returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(measure, (folder, way, rounds, launch), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
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
    part = {"parameters": found[0]["parameters"], "samples_per_rank": WORK.samples, "launches": launches}
    part |= {"rounds": rounds, "steps_per_block": WORK.steps, "contestants": rows}
    print(table(way, part).replace("ddp's", f"{WAYS[way].name}'s"), flush=True)
    return part


def main() -> ExitCode:
    """Runs the benchmark and returns its exit code."""
    parser = argparse.ArgumentParser(description="Paired cost of a step of a split model: tutti and PyTorch by hand.")
    ways = list(WAYS)
    parser.add_argument("--ways", type=lambda text: listed(ways, text), default=ways, help=f"some of {','.join(ways)}")
    parser.add_argument("--limit", type=float, default=1.02, help="largest allowed lower end of the interval (1.02)")
    parser.add_argument("--quick", action="store_true", help="one launch, 4 rounds, times are not judged")
    parser.add_argument("--save", action="store_true", help="keep the result")
    given = parser.parse_args()
    launches, rounds = (1, 4) if given.quick else (WORK.launches, WORK.rounds)
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
        path.write_text(json.dumps(report, indent=2) + "\n")
    return ExitCode.THRESHOLD if slow or wrong else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
