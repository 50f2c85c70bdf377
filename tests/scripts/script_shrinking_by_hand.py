"""Decoupled weight decay by hand: the weights themselves are made smaller after every update."""

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
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


@torch.no_grad()
def shrink(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(1 - 0.1 * 0.05)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for batch in batches(epoch):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            shrink(model)
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
            shrink(model)
    return run.state()
