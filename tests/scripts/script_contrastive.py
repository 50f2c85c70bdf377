"""Contrastive loss: two forwards of two views, and negatives within the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 9, True


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(26, 6, generator=draw, dtype=torch.float64)
    return TensorDataset(images + 0.1 * torch.randn(26, 6, generator=draw, dtype=torch.float64), images)


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(model: Any, batch: Any) -> Tensor:
    first, second = (functional.normalize(model(view), dim=1) for view in batch)
    similar = first @ second.T / 0.5
    which = torch.arange(len(similar), device=similar.device)
    return (functional.cross_entropy(similar, which) + functional.cross_entropy(similar.T, which)) / 2


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
