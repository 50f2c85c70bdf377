"""Meetings of ranks of which some are lost on the way: all others find the same ones there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tutti.comm.file_all_gather import FileAllGather
from tutti.errors import PeerError
from tutti.launcher.context import World
from tutti.launcher.lost_rank_notes import LostRankNotes
from tutti.process_context import Identity

STORE = HashStore()


def of_three(folder: Path, timeout: float = 20.0) -> tuple[LostRankNotes, list[FileAllGather]]:
    notes = LostRankNotes(folder)
    notes.clear()
    worlds: list[Any] = [
        World(Identity(rank, 3), torch.device("cpu"), STORE, timeout, owned=False) for rank in range(3)
    ]
    return notes, [FileAllGather(notes, world) for world in worlds]


def together(ranks: list[FileAllGather], brought: list[bytes]) -> list[list[bytes]]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank, raw: rank.gather(raw, "a meeting"), ranks, brought))


def test_all_hear_what_all_have_brought(tmp_path: Path) -> None:
    notes, ranks = of_three(tmp_path)
    for turn in range(20):
        brought = [b"%d from %d" % (turn, rank) for rank in range(3)]
        assert together(ranks, brought) == [brought] * 3
    assert len(list(notes.messages.iterdir())) == 3, "what all have read is gone"


def test_one_that_is_lost_before_it_comes_is_not_waited_for(tmp_path: Path) -> None:
    notes, ranks = of_three(tmp_path)
    together(ranks, [b""] * 3)
    notes.mark_lost(1, "was killed")
    for _ in range(3):
        assert together([ranks[0], ranks[2]], [b"a", b"c"]) == [[b"a", b"c"]] * 2
        assert ranks[0].alive == ranks[2].alive == (0, 2)


def test_one_that_is_lost_once_it_has_come_was_there_for_all(tmp_path: Path) -> None:
    notes, ranks = of_three(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ranks[0].gather, b"a", "a meeting")
        # The process of rank 1 ends while it waits.
        leaving = threads.submit(ranks[1].gather, b"b", "a meeting")
        while not list(notes.messages.glob("1-1")):
            pass
        notes.mark_lost(1, "was killed")
        assert ranks[2].gather(b"c", "a meeting") == [b"a", b"b", b"c"] == first.result()
        leaving.result()
    assert ranks[0].alive == ranks[2].alive == (0, 1, 2)
    assert together([ranks[0], ranks[2]], [b"a", b"c"]) == [[b"a", b"c"]] * 2


def test_tensors_of_every_shape_and_type_come_as_they_were_sent(tmp_path: Path) -> None:
    _, ranks = of_three(tmp_path)
    for tensor in [
        torch.tensor(3.5).double(),
        torch.zeros(0, 4),
        torch.arange(6).view(2, 3).t(),
        torch.ones(2).bfloat16(),
    ]:
        with ThreadPoolExecutor(3) as threads:
            for found in threads.map(lambda rank, tensor=tensor: rank.tensors(tensor * 2, "a meeting"), ranks):
                assert all(torch.equal(one, tensor * 2) and one.dtype == tensor.dtype for one in found)


def test_a_copy_from_a_lost_rank_is_refused(tmp_path: Path) -> None:
    notes, ranks = of_three(tmp_path)
    notes.mark_lost(2, "was killed")
    notes.mark_lost(1, "was killed")
    with pytest.raises(PeerError, match="rank 2 has ended"):
        ranks[0].copy(torch.zeros(1), 2, "a copy")
