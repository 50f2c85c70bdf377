"""A rank that does not come to a batch norm over all ranks, dies in it, or is in another one: the others are told."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.nn.test_sync import converted
from tutti.comm.communicator import world_communicator
from tutti.launcher import context

pytestmark = pytest.mark.faults


def meeting(place: str, action: str) -> str:
    """Rank 2 fails before forward or before backward."""
    norm: Any = converted(nn.BatchNorm1d(3))
    # No rank may still be connecting when rank 2 fails.
    world_communicator(context.current()).agree(["connected"], "the start", "connect on every rank")
    inputs = torch.randn(4, 3, requires_grad=True)
    try:
        for now in ("forward", "backward"):
            if now == place and tutti.rank() == 2:
                if action == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                return ""
            if now == "forward":
                result = norm(inputs)
            else:
                result.square().sum().backward()
    except Exception as error:
        said = f"{type(error).__name__} {getattr(error, 'exit_code', 1)} {error}"
        if action == "die":
            raise RuntimeError(said) from None
        return said
    return "no error"


@pytest.mark.parametrize(("place", "call"), [("forward", "statistics of"), ("backward", "sums of")])
def test_a_rank_that_does_not_come_is_named(place: str, call: str) -> None:
    pool = worlds.Pool(3, timeout=4)
    said = pool.run(meeting, place=place, action="stay away")
    pool.close()
    for rank in (0, 1):
        assert said[rank].startswith(f"PeerError 5 {call} batch norm 0"), said
        assert "did not finish within 4 s; missing: rank 2 (" in said[rank]


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_dies_ends_the_others_long_before_the_timeout(place: str) -> None:
    pool = worlds.Pool(3, timeout=600)
    with pytest.raises(worlds.RankError) as raised:
        pool.run(meeting, place=place, action="die", limit=60)
    for rank in (0, 1):
        failure = raised.value.failures[rank]
        assert failure is not None and failure.text.startswith("PeerError 5 "), failure


def another(widths: list[int]) -> str:
    norm: Any = converted(nn.Sequential(*map(nn.BatchNorm1d, widths)))
    number = min(tutti.rank(), 1)
    try:
        norm[number](torch.randn(4, widths[number]))
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__} {error}") from None
    return "no error"


def test_batch_norms_of_different_widths_end_and_do_not_hang() -> None:
    pool = worlds.Pool(3, timeout=600)
    with pytest.raises(worlds.RankError) as raised:
        pool.run(another, widths=[3, 40], limit=60)
    assert all(raised.value.failures)
