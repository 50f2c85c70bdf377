"""A restart of the optimizer in the second epoch: Adam's moments set to zero, and its second moments scaled."""

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
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def loss_of(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def restart(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].mul_(0.5)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        if epoch:
            restart(optimizer)
        for batch in batches(epoch):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_of, batch_size=BATCH)
    for epoch in range(2):
        if epoch:
            restart(optimizer)
        for batch in run.epoch(epoch):
            run.step(batch)
    return run.state()
