"""``worlds.Pool`` signals the processes of its ranks, and no process that has got the id of one later."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests import worlds
from tutti.comm.process_groups import count_message


def rank() -> int:
    return int(os.environ["RANK"])


def process(how: str = "") -> int:
    """The id of this process, unless all ranks raise, or rank 0 begins a collective or a message alone."""
    if how == "alone" and rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    if how == "sent" and rank() == 0:
        count_message((0, 1), "probe")
    if how == "ended" and rank() == 0:
        os._exit(3)
    if how == "modes":
        Mode().__enter__()
    if how:
        raise ValueError(how)
    return os.getpid()


class Mode(TorchFunctionMode):
    pass


@pytest.mark.parametrize(("how", "ranks"), [("raised", 3), ("alone", 2), ("sent", 2), ("ended", 2), ("modes", 2)])
def test_ranks_that_raise_live_on_where_none_of_them_waits_for_another(how: str, ranks: int) -> None:
    before = worlds.run_within(31.0, ranks, process)
    with pytest.raises(worlds.RankError, match="exit code 3" if how == "ended" else how):
        worlds.run_within(31.0, ranks, process, how=how)
    after = worlds.run_within(31.0, ranks, process)
    assert after == before if how == "raised" else not {*after} & {*before}


def test_a_closed_pool_sends_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = worlds.Pool(2)
    sent: list[int] = []
    kill = os.killpg

    def recorded(pid: int, number: int) -> None:
        sent.append(pid)
        kill(pid, number)

    monkeypatch.setattr(os, "killpg", recorded)
    assert pool.run(rank) == [0, 1]
    pool.close()
    assert len(sent) == 2
    pool.close()
    assert len(sent) == 2
