"""Buffers that training writes: a centre of outputs that moves with every batch, as in DINO, and a counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


class Centred(nn.Module):
    """Outputs less the moving mean of outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        centred = inputs - self.centre
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
                self.seen += 1
        return centred


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(24, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (24,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), Centred(8), nn.Tanh(), nn.Linear(8, 8), Centred(8), nn.Tanh(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers)
    return model.double(), torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


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
