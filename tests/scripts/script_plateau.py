"""ReduceLROnPlateau, on the mean loss of the epoch, in a custom loop."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.1)
    for epoch in range(4):
        losses = []
        for inputs, targets in batches(epoch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step(sum(losses) / len(losses))
    return {**model.state_dict(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.1)
    for epoch in range(4):
        losses = []
        for inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            if run.stepped:
                losses.append(run.stats.loss)
        scheduler.step(sum(losses) / len(losses))
    return {**run.state(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}
