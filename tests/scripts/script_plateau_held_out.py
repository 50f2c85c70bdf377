"""ReduceLROnPlateau on the loss over held-out samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 14, True


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(41, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (41,), generator=draw)
    )


def held_out() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(20, 5, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (20,), generator=draw)


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    ).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def loss_fn(model: Any, batch: Any) -> tuple[Tensor, int]:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.05)
    for epoch in range(3):
        for batch in batches(epoch):
            optimizer.zero_grad()
            total, count = loss_fn(model, batch)
            (total / count).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            total, count = loss_fn(model, held_out())
        model.train()
        scheduler.step(total.item() / count)
    return {**model.state_dict(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.05)
    for epoch in range(3):
        for batch in run.epoch(epoch):
            run.step(batch)
        scheduler.step(run.evaluate(held_out()).loss)
    return {**run.state(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}
