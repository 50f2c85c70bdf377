"""A step's program: max-plus against hand-made cases, closed forms against schedules, traffic against counted runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tutti.comm.collective_schedules import Algorithm, LinkCost, schedule_of
from tutti.errors import UsageError
from tutti.planning.collective_laws import schedule_seconds
from tutti.planning.monte_carlo import DRAWS, slowest_factor
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_builders import check_buildable
from tutti.planning.step_facts import TensorFacts, gradient_vectors, local_sgd_collectives
from tutti.planning.step_prediction import step_shares
from tutti.planning.step_program import StepAction, StepProgram, collective_totals, evaluate_program

ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "halving", "hierarchical", "central")


def seconds(value: float) -> np.ndarray:
    return np.full(3, value)


def test_a_step_of_no_time_computes_alone() -> None:
    program = StepProgram(devices=1)
    program.add(StepAction(0, "forward", seconds(0)))
    times = evaluate_program(program, 3)
    assert step_shares(times, np.ones(3), pipeline=False) == {"compute": 1, "communication": 0, "idling": 0}


def test_links_overlap_computing_and_devices_wait_for_messages() -> None:
    program = StepProgram(devices=2)
    first = program.add(StepAction(0, "forward", seconds(2)))
    sent = program.add(StepAction(0, "communication", seconds(3), (first,), link=True))
    program.add(StepAction(0, "backward", seconds(4)))
    program.add(StepAction(1, "forward", seconds(1), (sent,)))
    times = evaluate_program(program, 3)
    assert times.end[:, 0].tolist() == [2, 5, 6, 6]
    # 6 + 1 of 12 device-seconds compute; the message is hidden on device 0; device 1 idles 5 s.
    assert times.shares() == pytest.approx({"compute": 7 / 12, "communication": 0, "idling": 5 / 12})
    assert [[(s.phase, s.start, s.end) for s in row] for row in times.rows()] == [
        [("forward", 0, 2), ("backward", 2, 6)],
        [("forward", 5, 6)],
    ]


def test_an_action_cannot_need_a_later_one() -> None:
    with pytest.raises(ValueError, match="needs a later one"):
        StepProgram().add(StepAction(0, "forward", seconds(1), (0,)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nodes", [(1, 1), (3, 3), (4, 4), (2, 2, 2), (1,) * 8, (1,) * 13, (4,)])
def test_closed_forms_are_the_prices_of_the_schedules(algorithm: Algorithm, nodes: tuple[int, ...]) -> None:
    places = iter(range(sum(nodes)))
    schedule = schedule_of(algorithm, [[next(places) for _ in range(count)] for count in nodes])
    network, node = LinkCost(2e-5, 1e9), LinkCost(1e-6, 7e9)
    want = schedule.seconds(1e7, network, node)
    assert schedule_seconds(algorithm, sum(nodes), 1e7, network, node, nodes[0]) == pytest.approx(want, rel=1e-9)


def test_the_slowest_of_more_ranks_is_slower_and_one_is_typical() -> None:
    medians = [float(np.median(slowest_factor(ranks, 0.1))) for ranks in (1, 2, 64, 16384)]
    assert (
        medians[0] == pytest.approx(1, abs=0.03)
        and medians == sorted(medians)
        and medians[-1] == pytest.approx(1.4, abs=0.05)
    )
    assert slowest_factor(4, 0.0).tolist() == [1.0] * DRAWS


@pytest.mark.parametrize(
    ("strategy", "word"),
    [
        ("parameter_server:backup=1", "Leave out backup"),
        ("local_sgd:post=2ep", "Leave out post"),
        ("hybrid:shards=2,stages=2", "Leave out shards"),
        ("hybrid:shards=2,stage=3,tensor=2", "Take stage=1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(strategy: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        check_buildable(PlannedRun(strategy=strategy, devices="4"))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"strategy": "tensor", "optimizer": "lamb:lr=0.1"}, "mixes elements"),
        ({"strategy": "hybrid:stages=2,tensor=2,sequence=true"}, "Leave out sequence"),
        ({"strategy": "hybrid:stages=2,tensor=2", "activation_checkpointing": "blocks"}, "or take stages=1"),
    ],
)
def test_splits_whose_messages_are_not_known_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        check_buildable(PlannedRun(devices="4", **options))
    plain = {**options, "strategy": "tensor:tensor=2", "optimizer": "adam:lr=0.1"}
    check_buildable(PlannedRun(devices="4", **plain))


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 700), nn.Tanh(), nn.Linear(700, 401), nn.Tanh(), nn.Linear(401, 1)).to(dtype)


def counted(strategy: str, dtype: torch.dtype) -> Any:
    data = torch.rand(24, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))
    run = tutti.prepare(
        model_of(dtype), "sgd:lr=0.1", data, lambda m, b: (m(b) ** 2).mean(), strategy=strategy, batch_size=12
    )
    steps = 0
    for batch in run.epoch(0):
        run.step(batch)
        steps += 1
    links = run.gradient_sync.facts()["links"]
    return steps, {(link["from"], link["to"]): (link["messages"], link["bytes"]) for link in links}


TRAFFIC: list[tuple[Algorithm, int, dict[str, Any], torch.dtype]] = [
    *((algorithm, 3, {}, torch.float32) for algorithm in ALGORITHMS),
    ("ring", 2, {"bucket_mb": 0.5}, torch.float64),
    ("halving", 3, {"bucket_mb": 0.5}, torch.float32),
    ("tree", 2, {"wire": "bf16"}, torch.float32),
]


@pytest.mark.parametrize(("algorithm", "ranks", "options", "dtype"), TRAFFIC)
def test_the_program_sends_what_the_communicator_counts(
    algorithm: Algorithm, ranks: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    tensors = [TensorFacts(name, "", tuple(p.shape), p.dtype) for name, p in model_of(dtype).named_parameters()]
    program = StepProgram(vectors=gradient_vectors(tensors, **options))
    traffic = program.traffic(schedule_of(algorithm, [list(range(ranks))]))
    strategy = ",".join([f"mirrored:algorithm={algorithm}", *(f"{key}={value}" for key, value in options.items())])
    for steps, links in worlds.run(ranks, counted, strategy=strategy, dtype=dtype):
        assert steps == 2
        assert links == {link: (steps * found.messages, steps * found.bytes) for link, found in traffic.items()}


def local_steps(strategy: str, workers: int, dtype: torch.dtype) -> Any:
    data = torch.rand(60, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 1).to(torch.float32))
    run = tutti.prepare(
        model_of(dtype) if dtype == torch.float64 else model,
        "sgd:lr=0.1",
        data,
        lambda m, b: (m(b) ** 2).mean(),
        strategy=strategy,
        batch_size=12,
        workers=workers,
    )
    before = run.gradient_sync.facts()["collectives"]
    for batch in run.epoch(0):
        run.step(batch)
    after = run.gradient_sync.facts()["collectives"]
    tensors = [TensorFacts(name, "", tuple(p.shape), p.dtype) for name, p in run.model.named_parameters()]
    return before, {kind: (each["calls"], each["bytes"]) for kind, each in after.items()}, tensors


@pytest.mark.parametrize(
    ("strategy", "ranks", "workers", "dtype"),
    [
        ("local_sgd:period=2", 2, 2, torch.float64),
        ("local_sgd:period=3", 3, 5, torch.float32),
        ("diloco:period=2", 2, 3, torch.float32),
    ],
)
def test_local_steps_make_the_collectives_that_the_communicator_counts(
    strategy: str, ranks: int, workers: int, dtype: torch.dtype
) -> None:
    found = worlds.run(ranks, local_steps, strategy=strategy, workers=workers, dtype=dtype)
    period = int(strategy.rpartition("=")[2])
    for rank, (before, counted, tensors) in enumerate(found):
        assert before == {}
        # 60 samples are 5 steps.
        want = collective_totals(local_sgd_collectives(tensors, ranks, workers, period, rank), steps=5)
        assert counted == want
