"""Layers that are thawed or frozen between the backwards of an update, or between backward and update."""

from __future__ import annotations

from typing import Any

import pytest
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


def frozen_between(strategy: str, unlike: bool = False) -> Any:
    """Freeze the head after the first of two backwards, and clip the gradient that it keeps."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = None
    if strategy != "plain":
        run = tutti.prepare(net, optimizer, DATA, strategy=strategy, workers=1, batch_size=6, shuffle=False)
    backward = torch.Tensor.backward if run is None else run.backward
    batches = [(rows,) for rows in DATA.tensors[0].split(6)] if run is None else run.microbatches(0)
    try:
        for batch in batches:
            optimizer.zero_grad()
            backward(net(batch[0]).square().mean())
            net[4].requires_grad_(False)
            backward(net(batch[0]).abs().mean())
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            if unlike:
                net[4].weight.grad.mul_(1 + tutti.rank())
            optimizer.step()
            net[4].requires_grad_(True)
    except TuttiError as error:
        return run.updates if run is not None else 0, str(error)
    return dict(net.state_dict() if run is None else run.state())


@pytest.mark.parametrize(("strategy", "ranks"), [("pipeline", 2), ("model_parallel", 3), ("tensor:least=1", 2)])
def test_gradients_of_layers_that_are_frozen_meanwhile_are_those_of_the_whole_model(strategy: str, ranks: int) -> None:
    want = frozen_between("plain")
    for state in worlds.run(ranks, frozen_between, strategy=strategy):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


def test_other_edits_of_frozen_layers_on_each_rank_are_refused() -> None:
    for updates, said in worlds.run(2, frozen_between, strategy="tensor:least=1", unlike=True):
        assert updates == 0 and "the gradient of 4.weight in another way on each rank" in said
    worlds.forget(2)


def frozen_stage(strategy: str) -> Any:
    """Train the last layers alone, and leave gradients until the next body clears them."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    net[:4].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = None
    if strategy != "plain":
        run = tutti.prepare(net, optimizer, DATA, strategy=strategy, workers=2, batch_size=6, shuffle=False)
    backward = torch.Tensor.backward if run is None else run.backward
    for batch in [(rows,) for rows in DATA.tensors[0].split(6)] if run is None else run.microbatches(0):
        optimizer.zero_grad()
        backward(net(batch[0]).square().mean())
        optimizer.step()
    return dict(net.state_dict() if run is None else run.state())


@pytest.mark.parametrize(("strategy", "ranks"), [("pipeline", 2), ("model_parallel", 3)])
def test_stages_without_gradients_run_several_bodies_beside_stages_with_them(strategy: str, ranks: int) -> None:
    want = frozen_stage("plain")
    for state in worlds.run(ranks, frozen_stage, strategy=strategy):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)
