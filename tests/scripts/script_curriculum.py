"""Curriculum: easy samples first, then all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


def samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(31, 5, generator=draw, dtype=torch.float64)
    return inputs, inputs.argmax(1)


def easy() -> TensorDataset:
    inputs, targets = samples()
    clear = inputs.max(1).values > 1.2
    return TensorDataset(inputs[clear], targets[clear])


def dataset() -> TensorDataset:
    return TensorDataset(*samples())


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for data in (easy(), dataset()):
        for batch in batches(0, data):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    for data in (easy(), dataset()):
        run = prepare(model, optimizer, data, loss_fn, batch_size=BATCH)
        for batch in run.epoch(0):
            run.step(batch)
    return run.state()
