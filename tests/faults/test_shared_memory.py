"""The memory that ranks of one host share: what it does when a rank dies, when it cannot be had, and what it leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import worlds
from tests.contract.table import train
from tutti.comm import segment as segments
from tutti.comm.communicator import Communicators
from tutti.comm.segment import attach
from tutti.errors import UsageError
from tutti.world import context
from tutti.world.grid import Grid

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this machine"),
]


def comms() -> Communicators:
    world = context.current()
    return Communicators(world, Grid(replica=world.identity.size, rank=world.identity.rank))


def leftovers() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("tutti-*")}


def meet_and_read(room: int) -> list[int]:
    comm = comms().world
    segment = attach(comm, room)
    assert segment is not None
    segment.slot(comm.rank).fill_(comm.rank + 1)
    segment.meet("first")
    seen = [int(segment.slot(r).max()) for r in range(comm.size)]
    segment.meet("second")
    return seen


@pytest.mark.parametrize("size", [3, 4])
def test_all_ranks_see_what_each_wrote_and_nothing_keeps_a_name(size: int) -> None:
    before = leftovers()
    assert worlds.run(size, meet_and_read, room=10_000) == [list(range(1, size + 1))] * size
    assert leftovers() <= before


def one_dies(victim: int) -> str:
    comm = comms().world
    segment = attach(comm, 4096)
    assert segment is not None
    segment.meet("everybody is here")
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        segment.meet("the next step")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("size", [3, 4])
def test_a_killed_rank_is_named_long_before_the_timeout(size: int) -> None:
    pool = worlds.Pool(size, timeout=600)
    with pytest.raises(worlds.RankError) as raised:
        pool.run(one_dies, victim=1, limit=30)
    failures = raised.value.failures
    assert failures[1] is not None and failures[1].kind == "Died"


def survivors(victim: int) -> str:
    said = one_dies(victim)
    raise RuntimeError(said)


def test_survivors_say_who_ended() -> None:
    pool = worlds.Pool(3, timeout=600)
    with pytest.raises(worlds.RankError) as raised:
        pool.run(survivors, victim=2, limit=30)
    for rank in (0, 1):
        failure = raised.value.failures[rank]
        assert failure is not None
        assert "PeerError" in failure.text and "rank 2 has ended" in failure.text


def without_room(monkeypatched: str, algorithm: str) -> Any:
    original = segments._DIRECTORY
    segments._DIRECTORY = Path(monkeypatched)
    try:
        state, losses, _ = train(f"mirrored:algorithm={algorithm}", "sgd:lr=0.1", 4)
        return losses, {name: torch.from_numpy(value).sum().item() for name, value in state.items()}
    except UsageError as error:
        return str(error)
    finally:
        segments._DIRECTORY = original


def test_without_shared_memory_the_run_goes_by_messages_and_gives_the_same(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    there = worlds.run(3, without_room, monkeypatched="/dev/shm", algorithm="auto")
    for losses, sums in worlds.run(3, without_room, monkeypatched=missing, algorithm="auto"):
        assert losses == pytest.approx(there[0][0], rel=1e-9)
        assert sums == pytest.approx(there[0][1], rel=1e-9)
    for said in worlds.run(3, without_room, monkeypatched=missing, algorithm="shared_memory"):
        assert "cannot share memory" in said and "algorithm=native" in said


def test_what_a_dead_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "tutti-4194303999-abcd"
    mine = tmp_path / f"tutti-{os.getpid()}-abcd"
    for path in (gone, mine):
        path.touch()
    monkeypatch.setattr(segments, "_DIRECTORY", tmp_path)
    segments._reclaim()
    assert not gone.exists() and mine.exists()
