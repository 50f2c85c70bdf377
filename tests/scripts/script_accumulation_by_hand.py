"""Gradient accumulation by hand: optimizer.step() and zero_grad() after every second batch."""

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
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for number, (inputs, targets) in enumerate(batches(epoch), 1):
            loss = functional.cross_entropy(model(inputs), targets)
            (loss / 2).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for number, (inputs, targets) in enumerate(run.microbatches(epoch), 1):
            loss = functional.cross_entropy(model(inputs), targets)
            run.backward(loss / 2)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return run.state()
