"""A layer that is thawed between backward and update, where a rank runs the loop's body several times."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import TuttiError

DATA = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
SECONDS = 5.0
"""For the rank with a single body, which waits for the other one's gradient."""


def thawed(strategy: str, workers: int) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, DATA, strategy=strategy, workers=workers, batch_size=6)
    try:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(net(batch[0]).square().mean())
            net[0].requires_grad_(True)
            optimizer.step()
    except TuttiError as error:
        return run.updates, type(error).__name__, str(error)
    return run.updates


def test_ranks_with_different_numbers_of_bodies_are_refused_and_not_left_in_different_calls() -> None:
    uneven, other = worlds.run_within(SECONDS, 2, thawed, strategy="mirrored:algorithm=native", workers=3)
    assert uneven[:2] == (0, "UsageError") and other[0] == 0
    assert "did not do the same for each micro-batch" in uneven[2]
    assert "test_thawing_between.py:" in uneven[2] and "run.stepped" in uneven[2]
    worlds.forget(2)


def test_ranks_with_one_body_may_thaw_there() -> None:
    assert worlds.run(2, thawed, strategy="mirrored:algorithm=native", workers=2) == [2, 2]
