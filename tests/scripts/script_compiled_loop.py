"""A model compiled in place, by model.compile(), in a custom loop."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randn(25, 2, generator=draw, dtype=torch.float64)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model.compile(backend="eager")
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            optimizer.zero_grad(set_to_none=False)
            functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad(set_to_none=False)
            run.backward(functional.mse_loss(model(inputs), targets))
            optimizer.step()
    return run.state()
