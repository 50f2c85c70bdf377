"""The bound of a step is below its program in every draw, and equal to it where nothing overlaps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.planning.test_step_prediction import LINK, costs, facts, free_messages, run, split
from tutti.planning.cluster_network import Network
from tutti.planning.machine_choice import open_machine
from tutti.planning.measured_costs import MeasuredCosts
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.pass_prices import PassPrices
from tutti.planning.step_builders import build_step
from tutti.planning.step_facts import StageFacts, StepFacts
from tutti.planning.step_floor import step_floor
from tutti.planning.step_program import evaluate_program


def uneven() -> StepFacts:
    """Six blocks in pairs of two and of one, so that the stages of a pipeline differ."""
    step = facts(6, elements=300_000)
    groups = [
        replace(group, output_bytes=replace(group.output_bytes, per_sample=4e3))
        if group.name.startswith("b")
        else group
        for group in step.workload.groups
    ]
    return replace(step, workload=replace(step.workload, groups=tuple(groups)))


def cut(step: StepFacts, *sizes: int) -> StepFacts:
    """Cut the blocks into stages of so many."""
    ends = np.cumsum([0, *sizes]).tolist()
    stages = list(pairwise(ends))
    groups = tuple(tuple(f"b{place}" for place in range(a, b)) for a, b in stages)
    crossing = tuple((f"b{b - 1}",) for _, b in stages[:-1])
    return replace(step, stages=StageFacts(groups, tuple(tuple(range(a, b)) for a, b in stages), crossing))


PLANS = [
    ("single", 1, ()),
    ("mirrored", 2, ()),
    ("mirrored:algorithm=native,bucket_mb=1", 2, ()),
    ("mirrored:algorithm=ring,bucket_mb=1", 2, ()),
    ("mirrored:algorithm=native", 8, ()),
    ("sharded:stage=1", 2, ()),
    ("sharded:stage=2", 2, ()),
    ("sharded:stage=3", 4, ()),
    ("sharded:stage=2,shards=2", 4, ()),
    ("tensor", 2, ()),
    ("tensor:tensor=2", 8, ()),
    ("hybrid:tensor=2,algorithm=ring", 4, ()),
    ("hybrid:stages=2,tensor=2,schedule=1f1b", 8, (2, 4)),
    ("hybrid:stages=2,tensor=2,schedule=zero_bubble", 4, (3, 3)),
    *(
        (f"pipeline:stages={len(sizes) // chunks},schedule={schedule}", len(sizes) // chunks * replicas, sizes)
        for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2))
        for replicas in (1, 2)
        for sizes in (((2, 4), (1, 2, 3)) if chunks == 1 else ((2, 2, 1, 1),))
    ),
]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("strategy", "devices", "sizes"), PLANS)
def test_no_draw_of_a_program_is_below_its_bound(
    strategy: str, devices: int, sizes: tuple[int, ...], overlaps: bool
) -> None:
    step = cut(uneven(), *sizes) if sizes else uneven()
    step = split(step, 2e4) if strategy.startswith(("tensor", "hybrid")) else step
    for micro_batch in (1, 3, 8):
        config = run(strategy, devices, batch_size=8 * devices + 3, micro_batch=micro_batch)
        for prices in (costs(jitter=0.1, between=LINK), open_machine("a100x8", "bf16", None, LINK)):
            prices.overlaps = overlaps
            known = PassPrices(step.workload, prices)
            seconds = evaluate_program(build_step(step, config, prices, known)[0], DRAWS).seconds
            floor = step_floor(step, config, prices, known)
            assert floor is not None
            assert (floor.seconds <= seconds * (1 + 1e-12)).all()
            # It rules plans out only where it is near.
            assert np.median(floor.seconds) > 0.4 * np.median(seconds)
            assert sum(floor.terms.values()) == pytest.approx(float(np.median(floor.seconds)), rel=0.02)


@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        "mirrored",
        "mirrored:algorithm=ring",
        "sharded:stage=1",
        "sharded:stage=2",
        "sharded:stage=3",
        "tensor",
    ],
)
def test_the_bound_is_the_step_where_nothing_overlaps(strategy: str) -> None:
    devices = 1 if strategy == "single" else 2
    config, prices = run(strategy, devices, micro_batch=2), costs()
    prices.overlaps = False
    step = split(uneven(), 2e4) if strategy == "tensor" else uneven()
    known = PassPrices(step.workload, prices)
    seconds = evaluate_program(build_step(step, config, prices, known)[0], DRAWS).seconds
    floor = step_floor(step, config, prices, known)
    assert floor is not None and floor.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("schedule", "sizes"), [("gpipe", (1, 1, 1)), ("1f1b", (1, 1, 1)), ("interleaved", (1,) * 6)])
def test_the_bound_of_equal_stages_without_messages_is_the_pipeline(schedule: str, sizes: tuple[int, ...]) -> None:
    step = cut(facts(len(sizes)), *sizes)
    prices = MeasuredCosts(free_messages(), "fp32", Network(3))
    config = run(f"pipeline:schedule={schedule},micro_batches=6", 3, batch_size=12)
    floor = step_floor(step, config, prices, PassPrices(step.workload, prices))
    assert floor is not None
    seconds = evaluate_program(build_step(step, config, prices)[0], DRAWS).seconds
    assert floor.seconds == pytest.approx(seconds, rel=1e-6)
