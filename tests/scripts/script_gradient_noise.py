"""Gradient noise by hand, from a generator of its own, between backward and step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, ONE_EACH = 7, True


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def disturb(model: nn.Module, draw: torch.Generator) -> None:
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
        parameter.grad += 0.01 * noise.to(parameter.device)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    draw = torch.Generator().manual_seed(5)
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            disturb(model, draw)
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    draw = torch.Generator().manual_seed(5)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(functional.cross_entropy(model(inputs), targets))
            disturb(model, draw)
            optimizer.step()
    return run.state()
