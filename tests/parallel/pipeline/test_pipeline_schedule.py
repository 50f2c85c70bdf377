"""Pipeline orders: complete, free of deadlock, priced as theory says, and PyTorch's own where it has them."""

from __future__ import annotations

import doctest
from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch.distributed.pipelining import schedules as pytorch

from tutti.parallel.pipeline import pipeline_schedule
from tutti.parallel.pipeline.pipeline_schedule import Action, Order

GRID = [
    (name, ranks, micro, chunks)
    for name, ranks, micro in product(pipeline_schedule.SCHEDULES, (1, 2, 3, 4, 6), [*range(1, 10), 13, 16])
    for chunks in ((1, 2, 3) if name == "interleaved" else (1,))
]


def test_examples() -> None:
    assert doctest.testmod(pipeline_schedule).failed == 0


@pytest.mark.parametrize("name", pipeline_schedule.SCHEDULES)
def test_every_micro_batch_once_through_every_stage(name: str) -> None:
    for _, ranks, micro, chunks in (row for row in GRID if row[0] == name):
        order = pipeline_schedule.make_order(name, ranks, micro, chunks)
        kinds = "FIW" if name == "zero_bubble" else "FB"
        want = Counter(Action(k, s, i) for k in kinds for s in range(ranks * chunks) for i in range(micro))  # type: ignore[arg-type]
        assert Counter(action for row in order.ranks for action in row) == want
        for rank, row in enumerate(order.ranks):
            assert {action.stage % ranks for action in row} == {rank}


@pytest.mark.parametrize("name", pipeline_schedule.SCHEDULES)
def test_backwards_of_a_stage_come_in_order(name: str) -> None:
    """Gradients are then added up in the order in which one device adds them."""
    for _, ranks, micro, chunks in (row for row in GRID if row[0] == name):
        for row in pipeline_schedule.make_order(name, ranks, micro, chunks).ranks:
            for kind, stage in {(action.kind, action.stage) for action in row}:
                own = [action.micro for action in row if (action.kind, action.stage) == (kind, stage)]
                assert own == sorted(own)


def channels(order: Order) -> Iterator[tuple[list[Action], list[Action]]]:
    """For every kind of message and pair of ranks: what is sent, and what is waited for, each in order."""
    ranks = len(order.ranks)
    for kind, source, to in product("FBI", range(ranks), range(ranks)):
        if source == to:
            continue
        step = 1 if kind == "F" else -1
        sent = [a for a in order.ranks[source] if a.kind == kind and 0 <= a.stage + step < order.stages]
        sent = [a._replace(stage=a.stage + step) for a in sent if (a.stage + step) % ranks == to]
        awaited = [a for a in order.ranks[to] if a.kind == kind and 0 <= a.stage - step < order.stages]
        yield sent, [a for a in awaited if (a.stage - step) % ranks == source]


@pytest.mark.parametrize("name", pipeline_schedule.SCHEDULES)
def test_messages_are_awaited_in_the_order_in_which_they_are_sent(name: str) -> None:
    for _, ranks, micro, chunks in (row for row in GRID if row[0] == name):
        for sent, awaited in channels(pipeline_schedule.make_order(name, ranks, micro, chunks)):
            assert sent == awaited, (name, ranks, micro, chunks)


@pytest.mark.parametrize("name", pipeline_schedule.SCHEDULES)
def test_no_order_deadlocks_and_dependencies_are_met(name: str) -> None:
    for _, ranks, micro, chunks in (row for row in GRID if row[0] == name):
        order = pipeline_schedule.make_order(name, ranks, micro, chunks)
        rows = pipeline_schedule.timeline(order, lambda action: 1.0, transfer=0.5)
        ends = {span.action: span.end for row in rows for span in row}
        for row in rows:
            assert all(span.start >= ends[need] for span in row for need in order.needs(span.action))


def test_a_deadlock_is_found() -> None:
    order = Order(((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0))), 1, 1)
    with pytest.raises(ValueError, match="deadlock"):
        pipeline_schedule.timeline(order, lambda action: 1.0)


@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (2, 8), (3, 7), (4, 8), (4, 16), (8, 32)])
def test_bubbles_are_those_of_the_papers(ranks: int, micro: int) -> None:
    fraction = (ranks - 1) / (micro + ranks - 1)
    assert pipeline_schedule.bubble_fraction("gpipe", ranks, micro) == pytest.approx(fraction)
    assert pipeline_schedule.bubble_fraction("1f1b", ranks, micro) == pytest.approx(fraction)
    assert pipeline_schedule.bubble_fraction("one_by_one", ranks, micro) == pytest.approx(1 - 1 / ranks)
    if micro >= ranks:
        # (p-1)(T_F + T_B - T_W) of 3m + that
        assert pipeline_schedule.bubble_fraction("zero_bubble", ranks, micro) == pytest.approx(
            (ranks - 1) / (3 * micro + ranks - 1)
        )
    if micro % ranks == 0:
        for chunks in (2, 3):
            extra = (ranks - 1) / (chunks * micro)
            assert pipeline_schedule.bubble_fraction("interleaved", ranks, micro, chunks) == pytest.approx(
                extra / (1 + extra)
            )


def test_activations_held_are_those_of_the_papers() -> None:
    def most(name: str, chunks: int = 1) -> list[float]:
        return [
            pipeline_schedule.peak_activations(row) / chunks
            for row in pipeline_schedule.make_order(name, 4, 8, chunks).ranks
        ]

    assert most("one_by_one") == [1] * 4
    assert most("gpipe") == [8] * 4
    assert most("1f1b") == [4, 3, 2, 1]
    assert most("interleaved", 2)[0] == 5.5
    assert max(most("zero_bubble")) == 4


KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class Stage:
    """As much of a stage as PyTorch's schedules look at."""

    def __init__(self, rank: int, ranks: int, index: int, stages: int) -> None:
        self.group_rank, self.group_size, self.stage_index, self.num_stages = rank, ranks, index, stages
        self.group, self.has_backward, self.is_first, self.is_last = None, True, index == 0, index == stages - 1
        self.submod = torch.nn.Identity()


def theirs(name: str, ranks: int, micro: int, chunks: int) -> list[list[tuple[str, int, int]]]:
    classes = {
        "gpipe": pytorch.ScheduleGPipe,
        "1f1b": pytorch.Schedule1F1B,
        "interleaved": pytorch.ScheduleInterleaved1F1B,
        "zero_bubble": pytorch.ScheduleInterleavedZeroBubble,
    }
    rows = []
    for rank in range(ranks):
        own = [Stage(rank, ranks, c * ranks + rank, ranks * chunks) for c in range(chunks)]
        stages = own if name in ("interleaved", "zero_bubble") else own[0]
        made = classes[name](stages, micro, loss_fn=lambda out, target: out)  # type: ignore[abstract,arg-type]
        order = made.pipeline_order[rank] if hasattr(made, "pipeline_order") else made._get_pipeline_order()[rank]
        ours = [a for a in order if a is not None and a.computation_type.name in KINDS]
        rows.append([(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in ours])
    return rows


@pytest.mark.parametrize(
    ("name", "ranks", "micro", "chunks"),
    [
        *[(name, p, m, 1) for name in ("gpipe", "1f1b", "zero_bubble") for p, m in [(2, 4), (3, 6), (4, 8), (4, 4)]],
        *[("interleaved", p, m, v) for p, m, v in [(2, 4, 2), (4, 8, 2), (3, 6, 3), (4, 4, 2)]],
    ],
)
def test_orders_are_pytorchs(name: str, ranks: int, micro: int, chunks: int) -> None:
    mine = [[tuple(a) for a in row] for row in pipeline_schedule.make_order(name, ranks, micro, chunks).ranks]
    # PyTorch's table of 1F1B is wrong in its last row, which begins with F1 and ends with a forward that there is not.
    compared = ranks - (name == "1f1b")
    assert mine[:compared] == theirs(name, ranks, micro, chunks)[:compared]
