"""The Python work of a step: calls of functions, whose number does not depend on the machine or its load."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds

WARM_UP, COUNTED = 65, 32
"""Checks of the first steps, and of steps whose number is a power of two, are not counted."""


class Calls:
    """Counts calls of Python functions and of built-in ones while it is the process's profile function."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


def calls_per_step(layers: int, loop: bool) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    data = TensorDataset(torch.randn(8 * (WARM_UP + COUNTED), 4))

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).square().mean()

    run = tutti.prepare(model, optimizer, data, None if loop else loss, workers=1, batch_size=8)
    calls = Calls()

    for taken, batch in enumerate(run.microbatches(0) if loop else run.epoch(0)):
        if loop:
            optimizer.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
        else:
            run.step(batch)
        if taken == WARM_UP - 1:
            sys.setprofile(calls)
    sys.setprofile(None)
    return calls.count / COUNTED


@pytest.mark.parametrize(("loop", "most", "most_more"), [(False, 710, 17), (True, 1100, 37)])
def test_a_step_calls_few_functions(loop: bool, most: int, most_more: int) -> None:
    """With 6 parameters, and for each further one; the bounds are a tenth above the counts when they were set."""
    few, many = (worlds.run(1, calls_per_step, layers=layers, loop=loop)[0] for layers in (3, 30))
    more = (many - few) / 54
    assert few <= most and more <= most_more, (few, more)
