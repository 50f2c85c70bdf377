"""FGSM inside the loss function, by torch.autograd.grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 8


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(26, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (26,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    inputs = inputs.clone().requires_grad_()
    [slope] = torch.autograd.grad(functional.cross_entropy(model(inputs), targets), inputs)
    return functional.cross_entropy(model((inputs + 0.1 * slope.sign()).detach()), targets)


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
