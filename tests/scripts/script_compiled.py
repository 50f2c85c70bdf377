"""A model compiled by torch.compile before it is prepared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 14


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(41, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (41,), generator=draw)
    )


def build() -> tuple[Any, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    model = model.double()
    return torch.compile(model, backend="eager"), torch.optim.Adam(model.parameters(), lr=0.01)


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
