"""SWA: an average of the weights at the end of each late epoch, by torch.optim.swa_utils."""

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
        torch.randn(21, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (21,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    average = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    for epoch in range(3):
        for batch in batches(epoch):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        average.update_parameters(model)
        schedule.step()
    return {**model.state_dict(), **{f"swa.{name}": p for name, p in average.module.state_dict().items()}}


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    average = torch.optim.swa_utils.AveragedModel(model)
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    for epoch in range(3):
        for batch in run.epoch(epoch):
            run.step(batch)
        average.update_parameters(model)
        schedule.step()
    return {**run.state(), **{f"swa.{name}": p for name, p in average.module.state_dict().items()}}
