"""Clipping by hand, each element of the gradient by its value."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 14


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(41, 5, generator=draw, dtype=torch.float64), torch.randn(41, 2, generator=draw, dtype=torch.float64)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            loss = functional.mse_loss(model(inputs), targets)
            model.zero_grad()
            loss.backward()
            clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            loss = functional.mse_loss(model(inputs), targets)
            model.zero_grad()
            run.backward(loss)
            clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
    return run.state()
