"""The barrier: the same bits whoever comes first, and backup workers that are not waited for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import torch

from tutti.parallel.ddp.buckets import METRICS
from tutti.parallel.ddp.step_agreement import DIGESTS
from tutti.parallel.parameter_server.request_handlers import NONE, Answer, Request, SyncHandler
from tutti.parallel.parameter_server.server_barrier import MOST_BEHIND, ServerBarrier
from tutti.parallel.parameter_server.server_wire import (
    APPLY,
    EDITED,
    LATE,
    OK,
    PULL,
    PUSH,
    REFUSED,
    SUM,
    WAIT,
    MessageHeader,
)


def pushed(leaf: int) -> list[torch.Tensor]:
    return [torch.randn(7, generator=torch.Generator().manual_seed(leaf))]


def test_the_sum_does_not_depend_on_who_comes_first() -> None:
    want = None
    for order in permutations(range(5)):
        rounds = ServerBarrier(5)
        for leaf in order:
            assert rounds.total() is None
            memory = pushed(leaf)
            assert rounds.push(leaf, 3, memory, torch.tensor([1.0, leaf]))
            memory[0].fill_(float("nan"))  # the sender writes there again
        total = rounds.total()
        assert total is not None and total.totals.tolist() == [5.0, 10.0]
        want = total.vectors[0].clone() if want is None else want
        assert torch.equal(total.vectors[0], want)
    [a, b, c, d, e] = [pushed(leaf)[0] for leaf in range(5)]
    assert want is not None and torch.equal(want, ((a + b) + (c + d)) + e)


def test_steps_follow_each_other_and_twice_is_once() -> None:
    rounds = ServerBarrier(2)
    for clock in (4, 5):
        assert rounds.push(0, clock, pushed(0), torch.zeros(1))
        assert not rounds.push(0, clock, pushed(0), torch.zeros(1))
        assert rounds.total() is None
        assert rounds.push(1, clock, pushed(1), torch.zeros(1))
        total = rounds.total()
        assert total is not None and torch.equal(total.vectors[0], pushed(0)[0] + pushed(1)[0])
        rounds.finish([float(clock)])
        assert rounds.result(clock) == [clock]
        assert not rounds.push(0, clock, pushed(0), torch.zeros(1))


def test_the_slowest_are_not_waited_for() -> None:
    rounds = ServerBarrier(4, backup=1)
    for leaf in (3, 0):
        rounds.push(leaf, 0, pushed(leaf), torch.ones(1))
        assert rounds.total() is None
    rounds.push(1, 0, pushed(1), torch.ones(1))
    total = rounds.total()
    assert total is not None and rounds.counted == {0, 1, 3} and total.totals.item() == 3
    assert torch.equal(total.vectors[0], (pushed(0)[0] + pushed(1)[0]) + pushed(3)[0])
    assert not rounds.push(2, 0, pushed(2), torch.ones(1))
    rounds.finish([1.0])
    assert not rounds.push(2, 0, pushed(2), torch.ones(1)) and rounds.late == 2
    assert rounds.push(2, 1, pushed(2), torch.ones(1))


def test_another_server_decides_who_is_in() -> None:
    rounds = ServerBarrier(3, backup=1)
    for leaf in (0, 1, 2):
        rounds.push(leaf, 0, pushed(leaf), torch.ones(1))
    total = rounds.total({0, 2})
    assert total is not None and torch.equal(total.vectors[0], pushed(0)[0] + pushed(2)[0])


Ask = Callable[..., Answer | None]


def asking(updates: list[Any], ranks: int, backup: int = 0) -> Ask:
    """Return a function that makes a request without tensors: kind, rank, step, floats, flags."""
    shard: Any = SimpleNamespace(
        slices=[], views=lambda vectors: [], update=lambda *settings, optimizer: updates.append(settings)
    )
    handler = SyncHandler(shard, ServerBarrier(ranks, backup=backup), {r: r for r in range(ranks)}, 0, ranks)

    def ask(kind: int, rank: int, step: int, *extras: float, flags: int = 0) -> Answer | None:
        return handler.handle(Request(MessageHeader(kind, flags, 1, 1, rank, rank, 1, step, 0), extras, []))

    return ask


NO_GRADIENTS = [0.0] * (DIGESTS + 3 + METRICS)
"""Floats of a push."""
UPDATE = 1.0, 0.0, NONE
"""Floats of a request for an update: clipping factor, norm, optimizer."""


def test_a_request_of_an_asynchronous_server_is_refused_and_changes_nothing() -> None:
    updates: list[Any] = []
    answer = asking(updates, 2)(PULL, 0, 0)
    assert answer is not None and answer.status == REFUSED and not updates


def test_an_update_by_gradients_of_the_script_waits_for_all_ranks_before_any_sum() -> None:
    """A rank that pushes no edited gradients asks for the update before those of the other rank have come."""
    updates: list[Any] = []
    ask = asking(updates, 2)
    assert ask(APPLY, 1, 0, *UPDATE, flags=EDITED | WAIT) is None
    assert ask(PUSH, 0, 0, *NO_GRADIENTS, flags=EDITED) and not updates
    assert ask(APPLY, 0, 0, *UPDATE, flags=EDITED | WAIT) and len(updates) == 1
    assert ask(APPLY, 1, 0, *UPDATE, flags=EDITED | WAIT) and len(updates) == 1


def test_ranks_wait_for_one_that_has_not_asked_yet_before_its_results_are_dropped() -> None:
    ask = asking([], 3, backup=1)

    def push(rank: int, step: int) -> int | None:
        answer = ask(PUSH, rank, step, *NO_GRADIENTS)
        return answer and answer.status

    def sums(rank: int, step: int) -> Answer | None:
        return ask(SUM, rank, step, 0.0, 1.0, NONE, NONE, NONE)

    for step in range(MOST_BEHIND):
        assert push(0, step) == push(1, step) == OK
        assert sums(0, step) and sums(1, step)
        assert ask(APPLY, 0, step, *UPDATE) and ask(APPLY, 1, step, *UPDATE)
    assert push(0, MOST_BEHIND) == push(1, MOST_BEHIND) == OK and sums(0, MOST_BEHIND) is None
    late = sums(2, 0) if push(2, 0) == LATE else None
    assert late is not None and late.extras
    assert push(2, 1) == LATE and sums(2, 1) and sums(0, MOST_BEHIND)
