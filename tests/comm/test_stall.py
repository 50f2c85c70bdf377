"""Waiting: who is late is waited for, who is missing is named, and calls that can never meet are found out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import tutti
from tests import worlds
from tutti.comm import stall
from tutti.comm.communicator import Communicator
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.comm.shared_memory import attach_small
from tutti.comm.stall import Call, StallInspector, TellFailures, _Notes, is_complete
from tutti.errors import DataError, PeerError
from tutti.launcher import context
from tutti.launcher.context import World
from tutti.process_context import Identity


@pytest.fixture
def pool() -> Iterator[worlds.Pool]:
    pool = worlds.Pool(3, timeout=3)
    yield pool
    pool.close()


def late(seconds: float) -> float:
    comm = Communicators(context.current(), RankMesh(replica=3, rank=tutti.rank())).world
    if tutti.rank() == 1:
        time.sleep(seconds)
    tensor = torch.ones(1)
    comm.start_all_reduce(tensor, "sum").wait()
    return float(tensor)


def different_calls(odd: int) -> str:
    comm = Communicators(context.current(), RankMesh(replica=3, rank=tutti.rank())).world
    try:
        if tutti.rank() == odd:
            comm.start_all_reduce(torch.ones(4), "gradient bucket 0 in step 7").wait()
        else:
            comm.all_reduce(torch.ones(1), "totals of the evaluation")
    except PeerError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_a_slow_rank_is_waited_for_and_a_deadlock_is_found(pool: worlds.Pool) -> None:
    assert pool.run(late, seconds=1.2) == [3.0] * 3
    for rank, text in enumerate(pool.run(different_calls, odd=2)):
        for word in ("MismatchError", "gradient bucket 0 in step 7", "totals of the evaluation", f"(rank {rank}, "):
            assert word in text


def after_a_slow_barrier() -> str:
    """Rank 0 is late at a barrier in shared memory, where the others wait long; then it waits there alone."""
    comm = Communicators(context.current(), RankMesh(replica=3, rank=tutti.rank())).world
    small = attach_small(comm)
    assert small is not None
    try:
        if tutti.rank() == 0:
            time.sleep(1)
        small.gather(torch.ones(1), "gather")
        if tutti.rank() == 0:
            small.gather(torch.ones(1), "gather")
        comm.all_reduce(torch.ones(1), "sum")
    except PeerError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_how_long_ranks_waited_at_a_barrier_before_hides_no_deadlock(pool: worlds.Pool) -> None:
    for text in pool.run(after_a_slow_barrier):
        assert text.startswith("MismatchError ranks wait for each other in different calls: rank 0 in gather"), text


def without(missing: list[int], later: int = -1) -> str:
    comm = Communicators(context.current(), RankMesh(replica=3, rank=tutti.rank())).world
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
        assert said[rank].startswith("PeerError gradient bucket 2 did not finish within 3 s; missing: rank 2 (")
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


def inspector(store: dist.Store, rank: int, size: int) -> StallInspector:
    return StallInspector(World(Identity(rank, size), torch.device("cpu"), store, 20, owned=False), 20)


def ranks_in(calls: list[list[tuple[Call, float]]]) -> list[str]:
    """Let inspectors in threads wait in their ranks' calls for the given seconds each; return their errors."""
    store, said = dist.HashStore(), [""] * len(calls)

    def wait(rank: int) -> None:
        waiting = inspector(store, rank, len(calls))
        for call, seconds in calls[rank]:
            end = time.monotonic() + seconds

            def done(limit: timedelta, end: float = end) -> bool:
                time.sleep(max(0.0, min(limit.total_seconds(), end - time.monotonic())))
                return time.monotonic() >= end

            try:
                waiting.poll(done, call)
            except PeerError as error:
                said[rank] = f"{type(error).__name__} {error}"
                return

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads read each other's notes as early as the ranks of a pool do."""
    monkeypatch.setattr(stall, "_PATIENCE", timedelta(seconds=0.5))


@pytest.mark.usefixtures("_impatient")
def test_a_source_that_has_sent_its_broadcast_and_waits_in_the_next_call_is_no_deadlock() -> None:
    first, then = Call("broadcast 1", (0, 1, 2)), Call("sum 1", (0, 1, 2))
    assert ranks_in([[(first, 0.1), (then, 4.5)], [(first, 4), (then, 0.5)], [(first, 4), (then, 0.5)]]) == [""] * 3


@pytest.mark.usefixtures("_impatient")
def test_a_call_that_was_completed_before_is_a_deadlock_the_second_time() -> None:
    again, other = Call("totals", (0, 1)), Call("sum 1", (0, 1))
    said = ranks_in([[(again, 0.1), (again, 15)], [(again, 0.1), (other, 15)]])
    assert [text.split()[0] for text in said] == ["MismatchError"] * 2


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_a_call_that_failed_on_one_rank_fails_on_ranks_that_would_wait_for_it(seconds: float) -> None:
    """Rank 1 notices that rank 2 has ended, lives on, and sends rank 0 nothing more."""
    store, call, said = dist.HashStore(), Call("sum 1", (0, 1, 2)), ["", ""]

    def wait(rank: int) -> None:
        start = time.monotonic()

        def done(limit: timedelta) -> bool:
            if rank == 1 and time.monotonic() - start >= seconds:
                raise PeerError("sum 1 failed: connection reset")
            time.sleep(limit.total_seconds())
            return False

        try:
            inspector(store, rank, 3).poll(done, call)
        except PeerError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "connection reset" in said[1], said
    assert "sum 1 failed" in said[0] and "it failed on rank 1" in said[0], said


def test_notes_that_were_never_true_at_once_are_no_deadlock() -> None:
    one, two = Call("sum 1", (0, 1)), Call("sum 2", (0, 1))
    notes = _Notes()
    for beat in range(3):
        notes.look({0: (one, beat)})
    assert notes.together() == {}
    notes.look({0: (one, 3), 1: (two, 0)})
    assert notes.together() == {}
    # Rank 0 has left its call, and its note was not removed.
    notes.look({0: (one, 3), 1: (two, 1)})
    assert notes.together() == {1: two}
    notes.look({0: (one, 4), 1: (two, 2)})
    assert notes.together() == {0: one, 1: two}


@TellFailures()
def reads_and_sums(comm: Communicator, bad: Sequence[int]) -> float:
    if comm.rank in bad:
        raise DataError("sample 7 cannot be read")
    tensor = torch.ones(1)
    comm.all_reduce(tensor, "sum")
    return float(tensor)


def errors_between_collectives() -> str:
    comm = Communicators(context.current(), RankMesh(replica=tutti.size(), rank=tutti.rank())).world
    try:
        reads_and_sums(comm, [0])
    except (DataError, PeerError) as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.parametrize("size", [2, 3])
def test_an_error_of_one_rank_between_collectives_reaches_the_others(size: int) -> None:
    # Ranks of other tests may have counted unequal numbers of errors.
    worlds.forget(size)
    zero, *others = worlds.run(size, errors_between_collectives)
    worlds.forget(size)
    assert zero == "DataError sample 7 cannot be read."
    for rank, text in enumerate(others, 1):
        assert "PeerError rank 0 failed, and all_reduce 'sum'" in text and f"(rank {rank})" in text, text
        assert "DataError: sample 7 cannot be read" in text


def errors_of_all_ranks() -> float:
    comm = Communicators(context.current(), RankMesh(replica=tutti.size(), rank=tutti.rank())).world
    for _ in range(2):
        with pytest.raises(DataError):
            reads_and_sums(comm, range(3))
        if comm.rank == 0:
            time.sleep(1.5)
        total = reads_and_sums(comm, [])
    if comm.rank == 0:
        time.sleep(1.5)
    return total + reads_and_sums(comm, [])


def errors_that_are_read_late() -> float:
    """Other ranks' notes are read when rank 0 has left the call that they waited in, and failed again."""
    read = StallInspector._notes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StallInspector, "_notes", lambda self: (time.sleep(1.5), read(self))[1])
        return errors_of_all_ranks()


def test_an_error_that_all_ranks_have_keeps_none_from_the_next_collective() -> None:
    worlds.forget(3)
    assert worlds.run(3, errors_of_all_ranks) == [6.0] * 3
    assert worlds.run(3, errors_that_are_read_late) == [6.0] * 3
