"""Weight norm, as a parametrization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
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
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 2)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for batch in batches(epoch):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
    return run.state()
