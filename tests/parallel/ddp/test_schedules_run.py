"""Schedules over processes: the sum on every rank, and exactly the messages and bytes that the schedule counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.parallel.models import trained
from tutti.comm.collective_schedules import Algorithm, Schedule, schedule_of
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.comm.scheduled_all_reduce import ScheduledAllReduce
from tutti.config.strategy_choice import parse_strategy
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.parallel import check_strategy

ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "halving", "hierarchical", "central")
# Ranks of each node; of all flat algorithms the nodes make no difference.
PLACES = {2: [(2,), (1, 1)], 3: [(3,), (2, 1), (1, 1, 1)], 4: [(4,), (2, 2), (3, 1)]}
CASES = [(a, n) for a in ALGORITHMS for nodes in PLACES.values() for n in (nodes if a == "hierarchical" else nodes[:1])]
LENGTHS = (1, 5, 1000)


def nodes_of(sizes: tuple[int, ...]) -> list[list[int]]:
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def communicators(nodes: list[list[int]]) -> Communicators:
    """As if the ranks of this machine were on several nodes."""
    world = context.current()
    own = next(index for index, ranks in enumerate(nodes) if world.identity.rank in ranks)
    there = dataclasses.replace(world, identity=dataclasses.replace(world.identity, cross_rank=own))
    return Communicators(there, RankMesh(replica=tutti.size(), rank=tutti.rank()))


def summed(algorithm: Algorithm, nodes: list[list[int]]) -> Any:
    comms = communicators(nodes)
    all_reduce = ScheduledAllReduce(comms, algorithm, 8 * max(LENGTHS))
    results = []
    for length in (*LENGTHS, *LENGTHS):
        flat = torch.arange(length, dtype=torch.float64) + 1000 * tutti.rank()
        all_reduce.start(flat, "sum").wait()
        results.append(flat.tolist())
    shared = all_reduce._segment is not None
    return results, comms.replica.traffic(), shared


@pytest.mark.parametrize(("algorithm", "sizes"), CASES)
def test_sums_and_counts_are_those_of_the_schedule(algorithm: Algorithm, sizes: tuple[int, ...]) -> None:
    ranks, nodes = sum(sizes), nodes_of(sizes)
    schedule = schedule_of(algorithm, nodes)
    want = [[ranks * i + 1000.0 * sum(range(ranks)) for i in range(n)] for n in (*LENGTHS, *LENGTHS)]
    counted: dict[tuple[int, int], list[int]] = {}
    for length in (*LENGTHS, *LENGTHS):
        for link, traffic in schedule.traffic(length, 8).items():
            messages, bytes_ = counted.get(link, [0, 0])
            counted[link] = [messages + traffic.messages, bytes_ + traffic.bytes]
    for rank, (results, traffic, shared) in enumerate(worlds.run(ranks, summed, algorithm=algorithm, nodes=nodes)):
        assert results == want
        assert {link: list(count) for link, count in traffic.items()} == counted
        beside = max(len(node) for node in nodes if rank in node)
        assert shared == (algorithm == "hierarchical" and beside > 1)


def uneven_sums(algorithm: Algorithm, nodes: list[list[int]]) -> Any:
    comms = communicators(nodes)
    flat = torch.rand(997, generator=torch.Generator().manual_seed(tutti.rank()))
    ScheduledAllReduce(comms, algorithm, flat.nbytes).sum(flat, "sum")
    return flat.tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_hold_the_same_bits(algorithm: Algorithm) -> None:
    first, *others = worlds.run(4, uneven_sums, algorithm=algorithm, nodes=nodes_of((2, 2)))
    assert all(other == first for other in others)


def published(strategy: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    data = torch.rand(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    run = tutti.prepare(model, "sgd:lr=0.1", data, lambda m, b: (m(b) ** 2).mean(), strategy=strategy, batch_size=12)
    steps = 0
    for batch in run.epoch(0):
        run.step(batch)
        steps += 1
    buckets = [bucket.flat.numel() for bucket in run.gradient_sync._reducer._buckets]
    return run.gradient_sync.facts(), steps, buckets


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_publishes_the_traffic_of_its_schedule(algorithm: Algorithm, ranks: int) -> None:
    schedule: Schedule = schedule_of(algorithm, [list(range(ranks))])
    for facts, steps, buckets in worlds.run(ranks, published, strategy=f"mirrored:algorithm={algorithm}"):
        assert facts["algorithm"] == algorithm and steps == 2
        got = {(link["from"], link["to"]): (link["messages"], link["bytes"]) for link in facts["links"]}
        want: dict[tuple[int, int], tuple[int, int]] = {}
        for elements in buckets:
            for link, (messages, bytes_) in schedule.traffic(elements, 8).items():
                before = want.get(link, (0, 0))
                want[link] = (before[0] + steps * messages, before[1] + steps * bytes_)
        assert got == want


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        ("model_parallel:stages=2,algorithm=hierarchical", 1e-12),
        ("pipeline:stages=2,schedule=1f1b,algorithm=ring", 1e-12),
        ("mirrored:algorithm=halving,wire=bf16", 5e-3),
        ("mirrored:algorithm=hierarchical,wire=fp16,bucket_mb=0.0001", 1e-3),
    ],
)
def test_replicas_of_several_ranks_and_compressed_wires(strategy: str, tolerance: float) -> None:
    want = worlds.alone(trained_by, strategy="single")
    for got in worlds.run(4, trained_by, strategy=strategy):
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def trained_by(strategy: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    data = torch.rand(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state, _, _ = trained(
        model, "sgd:lr=0.1", data, lambda m, b: (m(b) ** 2).mean(), strategy=strategy, workers=4, batch_size=12
    )
    return state


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("option", ["reproducible", "adaptive"])
def test_bits_are_not_promised(algorithm: Algorithm, option: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_strategy(parse_strategy(f"mirrored:algorithm={algorithm}"), 2, **{option: True})
    assert "addition is not associative" in str(caught.value)


def refused(strategy: str) -> str:
    try:
        trained(
            nn.Linear(2, 1),
            "sgd:lr=0.1",
            torch.rand(8, 2),
            lambda m, b: m(b).mean(),
            strategy=strategy,
            reproducible=True,
            batch_size=8,
        )
    except UsageError as error:
        return str(error)
    return ""


def test_a_script_is_refused_too() -> None:
    for said in worlds.run(2, refused, strategy="mirrored:algorithm=ring"):
        assert "cannot be combined with algorithm=ring" in said


def thawed(strategy: str) -> Any:
    """Train a model whose first layer, the largest one, is frozen until the second step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model[0].requires_grad_(False)
    data = torch.rand(36, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(
        model, optimizer, data, lambda m, b: (m(b) ** 2).mean(), strategy=strategy, workers=4, batch_size=12
    )
    for step, batch in enumerate(run.epoch(0)):
        if step == 1:
            model[0].requires_grad_(True)
        run.step(batch)
    return {name: tensor.tolist() for name, tensor in run.state().items()}


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
@pytest.mark.parametrize("layout", ["mirrored:", "model_parallel:stages=2,"])
def test_a_layer_of_one_stage_is_thawed(layout: str, algorithm: Algorithm) -> None:
    want = worlds.alone(thawed, strategy="single")
    for got in worlds.run(4, thawed, strategy=f"{layout}algorithm={algorithm}"):
        for name, value in want.items():
            assert torch.tensor(got[name]).sub(torch.tensor(value)).abs().max() <= 1e-6, name
