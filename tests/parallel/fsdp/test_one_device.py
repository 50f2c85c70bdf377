"""``sharded`` on one device: the rank has whole parameters, whose gradients may be sparse or have no dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, index: Tensor) -> Tensor:
        result: Tensor = self.table(index).sum(-1) * self.scale
        return result


def trained(strategy: str) -> dict[str, Any]:
    """Each update has the gradients of two micro-batches."""
    torch.manual_seed(0)
    model = Scaled().double()
    optimizers = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
    data = torch.arange(12) % 6
    run = tutti.prepare(model, optimizers, data, strategy=strategy, batch_size=4, workers=2)
    for batch in run.microbatches(0):
        # The gradients of the batch before are there until the first micro-batch clears them.
        model.zero_grad()
        run.backward(model(batch).square().mean())
        for optimizer in optimizers:
            optimizer.step()
    return {name: value.numpy() for name, value in run.state().items()}


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "sharded:stage=2", "sharded"])
def test_sparse_gradients_and_numbers_of_several_micro_batches(strategy: str) -> None:
    want = worlds.alone(trained, strategy="single")
    [got] = worlds.run(1, trained, strategy=strategy)
    assert {name: value.shape for name, value in got.items()} == {name: value.shape for name, value in want.items()}
    assert largest_difference(got, want) <= 1e-12
