"""Faults of collectives: a rank that is killed, one that never calls, one that leaves."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import tutti
from tests.worlds import Pool, RankError
from tutti.comm import collective_execution


def outcome(size: int, function: object, timeout: float = 30.0) -> list[str]:
    """Text of each rank's error."""
    pool = Pool(size, timeout)
    try:
        with pytest.raises(RankError) as caught:
            pool.run(function)  # type: ignore[arg-type]
        return [failure.text if failure else "" for failure in caught.value.failures]
    finally:
        pool.close()


def killed_in_a_negotiation(victim: int) -> None:
    tutti.allreduce(torch.ones(1))
    if tutti.rank() == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    tutti.allreduce(torch.ones(1), name="never complete")


def last_killed() -> None:
    killed_in_a_negotiation(2)


def coordinator_killed() -> None:
    killed_in_a_negotiation(0)


def test_a_rank_that_is_killed_in_a_negotiation_is_named() -> None:
    zero, one, _ = outcome(3, last_killed)
    assert "rank 2 has ended without a word" in zero and "rank 2 has ended without a word" in one


def test_the_coordinator_is_killed_in_a_negotiation() -> None:
    _, one, two = outcome(3, coordinator_killed)
    assert "rank 0 has ended" in one and "rank 0 has ended" in two


def killed_in_a_collective(victim: int = 1) -> None:
    handles = [tutti.allreduce_async(torch.ones(1 << 20), "max", f"{i}") for i in range(64)]
    if tutti.rank() == victim:
        handles[3].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    for handle in handles:
        handle.wait()
    raise AssertionError("all were complete")


def coordinator_killed_in_a_collective() -> None:
    killed_in_a_collective(0)


def no_memory_in_a_collective() -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    if tutti.rank() == 1:
        collective_execution.reduce_all = fail  # type: ignore[assignment]
    tutti.allreduce(torch.ones(1 << 20), "max", name="large")


def killed_before_it_posts(victim: int = 1) -> None:
    for step in range(4):
        handles = [tutti.allreduce_async(torch.ones(4), name=f"{i}") for i in range(3)]
        for handle in handles:
            handle.wait()
        if step == 2 and tutti.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("all were complete")


def coordinator_killed_before_it_posts() -> None:
    killed_before_it_posts(0)


@pytest.mark.parametrize(
    ("function", "victim", "text"),
    [
        (killed_in_a_collective, 1, "rank 1 has ended without a word"),
        (coordinator_killed_in_a_collective, 0, "rank 0 has ended"),
        (no_memory_in_a_collective, 1, "a collective failed on rank 1: no memory"),
        (killed_before_it_posts, 1, "rank 1 has ended without a word"),
        (coordinator_killed_before_it_posts, 0, "rank 0 has ended"),
    ],
    ids=["killed", "coordinator", "memory", "killed before posts", "coordinator before posts"],
)
def test_a_rank_that_is_lost_in_a_collective_is_named(function: object, victim: int, text: str) -> None:
    began = time.monotonic()
    found = outcome(3, function)
    # A rank whose own peers live would wait for the limit of the process group: 60 s more than that of the world.
    assert time.monotonic() - began < 80
    assert all(text in shown for rank, shown in enumerate(found) if rank != victim)


def ends_after_a_complete_post(ending: int) -> None:
    """The last call is complete once all ranks have posted it, also where a rank ends before another one looks."""
    tutti.allreduce(torch.ones(2), "sum", name="loss")
    handle = tutti.allreduce_async(torch.full((2,), tutti.rank() + 1.0), "sum", name="loss")
    if tutti.rank() == ending:
        handle.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3)
    assert handle.wait().tolist() == [6.0, 6.0]


def coordinator_ends_after_a_complete_post() -> None:
    ends_after_a_complete_post(0)


def last_rank_ends_after_a_complete_post() -> None:
    ends_after_a_complete_post(2)


@pytest.mark.parametrize(
    ("function", "ending"), [(coordinator_ends_after_a_complete_post, 0), (last_rank_ends_after_a_complete_post, 2)]
)
def test_a_call_that_all_ranks_have_posted_survives_the_end_of_one(function: object, ending: int) -> None:
    told = outcome(3, function)
    assert [text for rank, text in enumerate(told) if rank != ending] == ["", ""]


def never_calls() -> None:
    tutti.barrier()
    if tutti.rank() == 1:
        time.sleep(5)
        return
    tutti.allreduce(torch.ones(1), name="loss")


def test_a_rank_that_never_calls_is_named_with_the_tensor() -> None:
    zero, one, two = outcome(3, never_calls, timeout=2.0)
    for text in (zero, two):
        assert "allreduce 'loss'" in text and "missing ranks: [1]" in text
    assert one == ""


def leaves() -> None:
    tutti.barrier()
    if tutti.rank() == 1:
        tutti.shutdown()
        return
    tutti.allreduce(torch.ones(1), name="loss")


def test_a_rank_that_leaves_is_named() -> None:
    zero, one = outcome(2, leaves)
    assert "after one of the ranks finished execution" in zero or "rank 1 has left the job" in zero
    assert one == ""
