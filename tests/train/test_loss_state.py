"""Loss functions and models that keep state: calls that tutti makes of them besides a step leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.scripts.oracle import global_batches

Arrays = dict[str, Any]


class Centred(nn.Module):
    """A loss around a centre, a buffer that each call moves, divided by an average of the losses so far, a number."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))
        self.usual = 1.0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value = functional.mse_loss(outputs - self.centre, targets)
        self.centre.mul_(0.8).add_(outputs.detach().mean(0), alpha=0.2)
        self.usual = 0.8 * self.usual + 0.2 * value.item()
        return value / self.usual


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(24, 4, generator=draw, dtype=torch.float64), torch.randn(24, 3, generator=draw, dtype=torch.float64)
    )


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain() -> Arrays:
    (model, optimizer), criterion = build(), Centred()
    for inputs, targets in global_batches(dataset(), 8, 0):
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def train(strategy: str) -> Arrays:
    (model, optimizer), criterion = build(), Centred()
    run = tutti.prepare(
        *(model, optimizer, dataset(), lambda model, batch: criterion(model(batch[0]), batch[1])),
        strategy=strategy, workers=1, batch_size=8, seed=0,
    )  # fmt: skip
    for batch in run.epoch(0):
        run.step(batch)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("strategy", ["tensor:least=1", "pipeline:micro_batches=1", "model_parallel"])
def test_trials_before_the_first_step_leave_the_state_of_a_loss_as_it_was(strategy: str) -> None:
    [want] = worlds.run(1, plain)
    for got in worlds.run(2, train, strategy=strategy):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


class Capturing(nn.Module):
    """Returns the sum of its layers' outputs, which hooks collect that the first forward registers, as transformers'.

    A second hook on a layer would add its output twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            for layer in self.layers:
                layer.register_forward_hook(lambda layer, args, output: COLLECTED.append(output))
        COLLECTED.clear()
        for layer in self.layers:
            x = layer(x).tanh()
        outputs = torch.stack(COLLECTED)
        COLLECTED.clear()
        return outputs.sum(0)[:, :3]


COLLECTED: list[Tensor] = []


def captured(strategy: str, micro_batch: int | None) -> Arrays:
    torch.manual_seed(0)
    model = Capturing().double()
    run = tutti.prepare(
        *(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset()),
        lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        strategy=strategy, batch_size=8, micro_batch=micro_batch,
    )  # fmt: skip
    for batch in run.epoch(0):
        run.step(batch)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def captured_plain() -> Arrays:
    torch.manual_seed(0)
    model = Capturing().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in global_batches(dataset(), 8, 0):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("strategy", "micro_batch"), [("mirrored", 2), ("sharded", 2), ("tensor:least=1", None)])
def test_hooks_that_the_first_forward_registers_are_there_once(strategy: str, micro_batch: int | None) -> None:
    [want] = worlds.run(1, captured_plain)
    for got in worlds.run(2, captured, strategy=strategy, micro_batch=micro_batch):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())
