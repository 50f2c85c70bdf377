"""Dropout off: eval() of some layers in the second epoch, of which batch norm is one, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 14, True


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(41, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (41,), generator=draw)
    )


def build() -> tuple[nn.Sequential, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    return model.double(), torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        if epoch == 1:
            model[1].eval()
            model[3].eval()
        for batch in batches(epoch):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    for epoch in range(2):
        if epoch == 1:
            model[1].eval()
            model[3].eval()
        for batch in run.epoch(epoch):
            run.step(batch)
    return run.state()
