"""SGDR: warm restarts of a cosine, in fractions of an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
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
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
    for epoch in range(3):
        for number, batch in enumerate(batches(epoch)):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            scheduler.step(epoch + number / 4)
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    for epoch in range(3):
        for number, batch in enumerate(run.epoch(epoch)):
            run.step(batch)
            scheduler.step(epoch + number / run.steps_per_epoch)
    return run.state()
