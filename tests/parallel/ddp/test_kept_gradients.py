"""``.grad`` of earlier steps: a script that keeps it finds its numbers, and one that does not pays for no copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds

DATA = torch.utils.data.TensorDataset(torch.arange(48.0, dtype=torch.float64).view(12, 4) / 48)


def looped(keep: bool) -> tuple[list[bool], list[float]]:
    """Whether gradients of earlier steps are alive before the next backward; and kept ones, at the end."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, DATA, strategy="mirrored", batch_size=4)
    sync: Any = run.gradient_sync
    alive, kept = [], []
    for (inputs,) in run.microbatches(0):
        optimizer.zero_grad()
        alive += [each() is not None for each in sync._shown]
        run.backward(model(inputs).square().mean())
        if keep:
            kept.append(model.weight.grad)
        optimizer.step()
    return alive, [float(each.sum()) for each in kept]


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_earlier_steps(keep: bool) -> None:
    alive, sums = worlds.run(2, looped, keep=keep)[0]
    # The weight's is kept, the bias' is not.
    assert alive == [keep, False, keep, False]
    assert len(set(sums)) == len(sums) == 3 * keep
