"""Collectives are refused in calls that one rank makes alone, and performed in other threads of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tutti
from tests import worlds
from tutti.comm.current_session import collectives_refused
from tutti.errors import UsageError

CALLS: list[Callable[[], Any]] = [
    lambda: tutti.allreduce(torch.ones(1)),
    lambda: tutti.barrier(),
    lambda: dist.all_reduce(torch.ones(1)),
]


def summed(name: str) -> float:
    return float(tutti.allreduce(torch.ones(1), "sum", name))


def refused() -> list[float]:
    with collectives_refused(), ThreadPoolExecutor(1) as threads:
        for call in CALLS:
            with pytest.raises(UsageError, match="a call that not all ranks make"):
                call()
        other = threads.submit(summed, "in another thread").result()
    return [other, summed("afterwards")]


def test_collectives_of_this_thread_are_refused() -> None:
    assert worlds.run(2, refused) == [[2.0, 2.0]] * 2
