"""All-reduces in shared memory: sums, attempts that the coordinator revokes, and what it answers to reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comm.test_negotiation import Clock, coordinator, reduction
from tutti.comm.collective_call import CollectiveCall
from tutti.comm.negotiation import Coordinator
from tutti.comm.posted_reduction import PostedReduction, posted_bytes

NUMBER = 0


def summing(size: int, dtype: str = "float32", **given: Any) -> list[PostedReduction]:
    """The reduction of a vector of two elements as each of ``size`` ranks sees it."""
    call = CollectiveCall("allreduce", "x", shapes=((2,),), dtypes=(dtype,), device="cpu", **{"op": "sum", **given})
    slots = [torch.zeros(posted_bytes(call, size), dtype=torch.uint8) for _ in range(size)]
    return [PostedReduction(call, rank, slots) for rank in range(size)]


def read(reduction: PostedReduction, attempt: int) -> list[float]:
    out = torch.empty(2, dtype=getattr(torch, reduction.call.dtypes[0]))
    reduction.reduce_into([out], attempt)
    return out.tolist()


def post(ranks: list[PostedReduction], value: float) -> int:
    """Post the value plus the rank on every rank; all have the same attempt."""
    [attempt] = {mine.post([vector(mine, value + rank)]) for rank, mine in enumerate(ranks)}
    return attempt


def vector(mine: PostedReduction, value: float) -> Tensor:
    return torch.full((2,), value, dtype=getattr(torch, mine.call.dtypes[0]))


def test_every_rank_adds_what_all_ranks_have_posted() -> None:
    ranks = summing(3)
    for step in range(4):
        attempt = post(ranks, 10.0 * step)
        assert [read(mine, attempt) for mine in ranks] == [[30.0 * step + 3] * 2] * 3


@pytest.mark.parametrize(
    ("dtype", "given", "values", "expected"),
    [
        ("float32", {"op": "average", "prescale": 0.5, "postscale": 4.0}, [2.0, 4.0], 6.0),
        ("int64", {"op": "average"}, [-2, -3], -2),
        # 2048 + 1 is no half; 2048 + 1 + 1 is.
        ("float16", {}, [2048.0, 1.0, 1.0], 2050.0),
        ("bfloat16", {"op": "average"}, [256.0, 1.0, 1.0], 86.0),
    ],
)
def test_operations_and_factors(dtype: str, given: dict[str, Any], values: list[float], expected: float) -> None:
    ranks = summing(len(values), dtype, **given)
    [attempt] = {mine.post([vector(mine, value)]) for mine, value in zip(ranks, values, strict=True)}
    assert read(ranks[0], attempt) == [expected] * 2


@pytest.mark.parametrize(
    "given",
    [
        {"op": "max"},
        {"op": "adasum"},
        {"device": "cuda"},
        {"process_set": 1},
        {"dtypes": ("bool",)},
        {"shapes": ((0,),)},
    ],
)
def test_calls_that_travel_as_messages(given: dict[str, Any]) -> None:
    values = {"op": "sum", "shapes": ((2,),), "dtypes": ("float32",), "device": "cpu", **given}
    assert posted_bytes(CollectiveCall("allreduce", "x", **values), 2) == 0


def test_an_attempt_is_complete_or_revoked_on_all_ranks() -> None:
    zero, one = summing(2)
    first = zero.post([vector(zero, 1.0)])
    assert not zero.complete(first)
    assert zero.revoke(first) and zero.revoked(first)
    # Rank 1 comes too late for it, and its call belongs to rank 0's next.
    second = one.post([vector(one, 2.0)])
    assert second > first and not zero.complete(first)
    assert zero.post([vector(zero, 3.0)]) == second
    assert zero.complete(second) and one.complete(second)
    assert not zero.revoke(second) and one.complete(second) and not one.revoked(second)
    assert read(one, second) == [5.0, 5.0]


def test_a_post_that_crosses_a_revocation_is_made_again() -> None:
    zero, one = summing(2)
    post([zero, one], 0.0)
    first = zero.post([vector(zero, 1.0)])
    # Rank 1 has chosen the number of its attempt before the revocation.
    assert zero.revoke(first)
    again = one.post([vector(one, 2.0)])
    assert one.post_again(first) == again == zero.post_again(first)
    assert read(zero, again) == [3.0, 3.0]


def test_a_revoked_attempt_leaves_what_a_slow_rank_still_reads() -> None:
    zero, one = summing(2)
    attempt = post([zero, one], 1.0)
    for _ in range(3):
        assert zero.revoke(zero.post([vector(zero, 50.0)]))
    assert one.complete(attempt) and read(one, attempt) == [3.0, 3.0]


# --- the coordinator's answers ---------------------------------------------------------------------------------------


def sharing(size: int, clock: Clock | None = None, **options: Any) -> tuple[Coordinator, list[PostedReduction]]:
    """A coordinator that has agreed on a reduction, and the reduction's place of each rank."""
    made = coordinator(size, clock, **options)
    for rank in range(size):
        made.receive(rank, reduction())
    made.take_answers()
    ranks = summing(size)
    made.share(1, NUMBER, ranks[0])
    return made, ranks


def report(made: Coordinator, ranks: list[PostedReduction], rank: int) -> int:
    """Post on a rank and tell the coordinator."""
    attempt = ranks[rank].post([vector(ranks[rank], 1.0)])
    made.receive(rank, ["posted", 1, [[NUMBER, attempt]]])
    return attempt


def test_reports_of_a_call_that_completes_need_no_answer() -> None:
    made, ranks = sharing(2)
    for _ in range(3):
        for rank in range(2):
            attempt = report(made, ranks, rank)
        assert made.take_answers() == [] and ranks[1].complete(attempt)
    assert made.check_stalls() == [] and made.seconds_to_stall() is None


def test_a_posted_call_is_compared_with_another_of_its_name() -> None:
    made, ranks = sharing(3)
    attempt = report(made, ranks, 0)
    made.receive(2, reduction(shape=(3,)))
    # Rank 1 has posted, and says so later.
    ranks[1].post([vector(ranks[1], 1.0)])
    assert made.take_answers() == []
    made.receive(1, ["posted", 1, [[NUMBER, attempt]]])
    answers = made.take_answers()
    assert sorted((rank, message[0], message[3]) for rank, message in answers) == [
        (rank, "error", "mismatch") for rank in range(3)
    ]
    assert ranks[0].revoked(attempt)
    following = {report(made, ranks, rank) for rank in range(3)}
    assert len(following) == 1 and made.take_answers() == [] and ranks[2].complete(following.pop())


def test_the_engine_of_a_joined_rank_posts_zeros() -> None:
    made, ranks = sharing(3)
    attempt = report(made, ranks, 0)
    made.receive(2, ["join", 1])
    assert made.take_answers() == []
    report(made, ranks, 1)
    assert made.take_answers() == [(2, ["post", 1, NUMBER])]
    assert ranks[2].post([torch.zeros(2)]) == attempt and ranks[0].complete(attempt)


def test_a_rank_that_calls_by_message_is_told_to_post() -> None:
    made, ranks = sharing(2)
    report(made, ranks, 0)
    made.receive(1, ["hit", 1, NUMBER, []])
    assert made.take_answers() == [(1, ["post", 1, NUMBER])]
    # It may be lost before it does.
    made.lose(1, "rank 1 has ended", orderly=True)
    assert made.take_answers() == [(0, ["error", 1, [0, "x"], "lost", "rank 1 has ended"])]


def test_a_stall_names_the_rank_that_has_not_posted() -> None:
    clock = Clock()
    made, ranks = sharing(3, clock, warn=2.0, limit=5.0)
    attempt = report(made, ranks, 0)
    # Posted, and at work on something else.
    ranks[1].post([vector(ranks[1], 1.0)])
    clock.now = 2.0
    [warning] = made.check_stalls()
    assert "'x'" in warning and "called by ranks [0, 1]; missing ranks: [2]" in warning
    clock.now = 5.0
    made.check_stalls()
    assert [(rank, message[0]) for rank, message in made.take_answers()] == [(0, "error")]
    # Rank 1 learns of it when it asks, and waits with rank 0's next call.
    made.receive(1, ["posted", 1, [[NUMBER, attempt]]])
    assert made.take_answers() == [(1, ["again", 1, NUMBER])]
    again = ranks[1].post_again(attempt)
    assert {report(made, ranks, 0), report(made, ranks, 2)} == {again} and ranks[1].complete(again)


def test_a_lost_rank_fails_posted_calls_unless_it_has_posted_too() -> None:
    made, ranks = sharing(2)
    for rank in range(2):
        attempt = report(made, ranks, rank)
    assert ranks[0].complete(attempt)
    report(made, ranks, 0)
    made.lose(1, "rank 1 has ended", orderly=True)
    assert made.take_answers() == [(0, ["error", 1, [0, "x"], "lost", "rank 1 has ended"])]
    report(made, ranks, 0)
    assert [message[0] for _, message in made.take_answers()] == ["error"]


def test_a_rank_that_waited_for_long_is_not_blocked_after_its_call() -> None:
    made = coordinator()
    made.receive(0, reduction())
    made.receive(0, ["wait", 1, [0, "x"]])
    made.receive(1, reduction())
    made.take_answers()
    # Rank 0 computes, while rank 1 waits for its next call of the same name.
    made.receive(1, reduction())
    made.receive(1, ["wait", 1, [0, "x"]])
    assert made.take_answers() == []
