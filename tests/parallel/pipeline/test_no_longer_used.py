"""A parameter that has gradients in early steps alone is left alone later, or its pipeline is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.parity.loops import numbers
from tests.train.test_custom_loop import BATCH, DATA, batches, error_of


class Last(nn.Module):
    """Takes a second value in the first steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.steps = nn.Linear(6, 6), nn.Linear(6, 1), 99
        self.register_buffer("taken", torch.zeros(()))

    def forward(self, hidden: Tensor, beside: Tensor) -> Any:
        hidden = torch.tanh(self.inner(hidden))
        self.taken += self.training
        return self.out(hidden + beside if self.taken <= self.steps else hidden)


class Two(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.beside, self.last = nn.Linear(4, 6), nn.Linear(4, 6), Last()
        self.last.steps = steps
        self.double()

    def forward(self, inputs: Tensor) -> Any:
        return self.last(torch.tanh(self.hidden(inputs)), self.beside(inputs))


def trained(strategy: str, steps: int) -> dict[str, Any] | str:
    model = Two(steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    if strategy == "plain":
        for epoch in range(2):
            for batch in batches(epoch):
                optimizer.zero_grad()
                error_of(model, batch).backward()
                optimizer.step()
        return numbers(model)
    try:
        run = tutti.prepare(model, optimizer, DATA, error_of, strategy=strategy, workers=1, batch_size=BATCH)
        for epoch in range(2):
            for batch in run.epoch(epoch):
                run.step(batch)
    except Exception as error:
        # Before the first update that would be wrong.
        return f"{type(error).__name__}: {error} {run.updates}"
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("steps", [3, 99])
@pytest.mark.parametrize("strategy", ["pipeline:cuts=last", "model_parallel:cuts=last", "tensor:least=1"])
def test_a_value_that_the_loss_no_longer_depends_on(strategy: str, steps: int) -> None:
    want, found = trained("plain", steps), worlds.run_within(5.0, 2, trained, strategy=strategy, steps=steps)
    # A rank that was refused has left the other one in the middle of a step.
    worlds.forget(2)
    if steps == 3 and not strategy.startswith("tensor"):
        said = next(got for got in found if isinstance(got, str) and "UsageError" in got)
        assert "no longer depends on a value of an earlier stage" in said
        assert all(isinstance(got, str) and got.endswith(" 3") for got in found), found
        return
    for got in found:
        assert isinstance(got, dict) and isinstance(want, dict), got
        assert largest_difference(got, want) <= 1e-10
