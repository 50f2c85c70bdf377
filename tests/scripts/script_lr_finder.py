"""LR finder: the rate grows every step, and the losses say where to stop."""

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
        torch.randn(60, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (60,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    found: list[tuple[float, float]] = []
    for batch in batches(0):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        found.append((optimizer.param_groups[0]["lr"], loss.item()))
        if len(found) == 7 or loss.item() > 4 * found[0][1]:
            break
        optimizer.param_groups[0]["lr"] *= 3
    return {**model.state_dict(), "found": torch.tensor(found, dtype=torch.float64)}


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    found: list[tuple[float, float]] = []
    for batch in run.epoch(0):
        loss = run.step(batch)
        found.append((optimizer.param_groups[0]["lr"], loss))
        if len(found) == 7 or loss > 4 * found[0][1]:
            break
        optimizer.param_groups[0]["lr"] *= 3
    return {**run.state(), "found": torch.tensor(found, dtype=torch.float64)}
