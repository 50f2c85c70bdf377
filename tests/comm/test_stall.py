"""Waiting: who is late is waited for, who is missing is named, and calls that can never meet are found out."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import tutti
from tests import worlds
from tutti.comm.communicator import Communicators
from tutti.comm.grid import Grid
from tutti.comm.stall import Call, is_complete
from tutti.errors import PeerError
from tutti.launcher import context


@pytest.fixture
def pool() -> Iterator[worlds.Pool]:
    pool = worlds.Pool(3, timeout=4)
    yield pool
    pool.close()


def late(seconds: float) -> float:
    comm = Communicators(context.current(), Grid(replica=3, rank=tutti.rank())).world
    if tutti.rank() == 1:
        time.sleep(seconds)
    tensor = torch.ones(1)
    comm.start_all_reduce(tensor, "sum").wait()
    return float(tensor)


def different_calls(odd: int) -> str:
    comm = Communicators(context.current(), Grid(replica=3, rank=tutti.rank())).world
    try:
        if tutti.rank() == odd:
            comm.start_all_reduce(torch.ones(4), "gradient bucket 0 in step 7").wait()
        else:
            comm.all_reduce(torch.ones(1), "totals of the evaluation")
    except PeerError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_a_slow_rank_is_waited_for_and_a_deadlock_is_found(pool: worlds.Pool) -> None:
    assert pool.run(late, seconds=2.2) == [3.0] * 3
    for rank, text in enumerate(pool.run(different_calls, odd=2)):
        for word in ("MismatchError", "gradient bucket 0 in step 7", "totals of the evaluation", f"(rank {rank})"):
            assert word in text


def without(missing: list[int], later: int = -1) -> str:
    comm = Communicators(context.current(), Grid(replica=3, rank=tutti.rank())).world
    if tutti.rank() in missing:
        return ""
    if tutti.rank() == later:
        time.sleep(1.5)
    try:
        comm.start_all_reduce(torch.ones(4), "gradient bucket 2").wait()
    except PeerError as error:
        return f"{type(error).__name__} {error}"
    return "nothing was raised"


def test_missing_ranks_are_named(pool: worlds.Pool) -> None:
    said = pool.run(without, missing=[2])
    assert said[2] == ""
    for rank in (0, 1):
        assert said[rank].startswith("PeerError gradient bucket 2 did not finish within 4 s; missing: rank 2 (")
        assert f"(rank {rank})" in said[rank]


def test_a_rank_that_gave_up_before_is_not_missing(pool: worlds.Pool) -> None:
    said = pool.run(without, missing=[2], later=1)
    for rank in (0, 1):
        assert "missing: rank 2 (" in said[rank], said


def test_what_has_been_sent_will_come() -> None:
    """Two stages wait for each other's messages: a deadlock, unless one of them is on its way."""
    up, down = Call("gradients 1 from rank 1 to rank 0", (0, 1)), Call("activations 2 from rank 0 to rank 1", (0, 1))
    waiting = {0: up, 1: down}
    assert not any(is_complete(call, waiting) for call in waiting.values())
    waiting[0] = Call(up.text, up.ranks, sent=(down.text,))
    assert [is_complete(call, waiting) for call in waiting.values()] == [False, True]
