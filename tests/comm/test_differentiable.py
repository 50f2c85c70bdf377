"""Collectives that autograd goes through: values and gradients, for shares that are not even."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tutti.comm.communicator import Communicators
from tutti.comm.differentiable import Ranks
from tutti.laws.shares import share
from tutti.world import context
from tutti.world.grid import Grid


def ranks() -> Ranks:
    world = context.current()
    grid = Grid(tensor=world.identity.size, rank=world.identity.rank)
    return Ranks(Communicators(world, grid).axis("tensor"))


def computed(length: int, dim: int) -> Any:
    """Shares of 0, 1, 2 … gathered; the sum of all ranks' numbers; the gradient of a whole that each uses otherwise."""
    line, rank = ranks(), tutti.rank()
    mine = share(length, line.size, rank)
    part = torch.arange(float(length))[mine.start : mine.stop].expand(2, -1).clone()
    part = (part if dim else part.t().contiguous()).requires_grad_()
    whole = line.gather(part, dim, length, "a layer")
    counted = torch.arange(1.0, length + 1)
    (whole * (counted if dim else counted.unsqueeze(1))).sum().backward()  # type: ignore[no-untyped-call]
    own = torch.tensor([rank + 1.0], requires_grad=True)
    total = line.reduce(own, "a layer")
    (3 * total).sum().backward()
    shared = torch.tensor([1.0], requires_grad=True)
    twice = line.copy(shared, "a layer"), line.copy(shared, "a layer")
    assert twice[0] is twice[1], "one message for both"
    ((rank + 1) * (twice[0] + twice[1])).sum().backward()
    row = whole[0] if dim else whole[:, 0]
    gradient = part.grad[0] if dim else part.grad[:, 0]  # type: ignore[index]
    return row.tolist(), gradient.tolist(), float(total), own.grad, shared.grad


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_values_and_gradients(size: int, dim: int) -> None:
    everyone = size * (size + 1) / 2
    for rank, (whole, gradient, total, own, shared) in enumerate(worlds.run(size, computed, length=7, dim=dim)):
        assert whole == list(range(7))
        assert gradient == [i + 1.0 for i in share(7, size, rank)], "of this rank's share, and not summed"
        assert (total, own, shared) == (everyone, 3, 2 * everyone)
