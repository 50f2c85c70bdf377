"""LBFGS: the optimizer evaluates a closure several times a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 12


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(31, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, (inputs[:, :1] * inputs[:, 1:2]).tanh())


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = functional.mse_loss(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = functional.mse_loss(model(inputs), targets)
                run.backward(loss)
                return loss

            optimizer.step(closure)
    return run.state()
