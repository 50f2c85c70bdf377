"""Early stopping, and the best weights so far, by the loss over held-out samples."""

from __future__ import annotations

import copy
import math
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


def held_out() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(20, 5, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (20,), generator=draw)


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.03)


def loss_fn(model: Any, batch: Any) -> tuple[Tensor, int]:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    best, bad, kept = math.inf, 0, {}
    for epoch in range(6):
        for batch in batches(epoch):
            optimizer.zero_grad()
            total, count = loss_fn(model, batch)
            (total / count).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            total, count = loss_fn(model, held_out())
        model.train()
        if total.item() / count < best:
            best, bad, kept = total.item() / count, 0, copy.deepcopy(model.state_dict())
        else:
            bad += 1
        if bad == 2:
            break
    return {**kept, "epoch": torch.tensor(epoch)}


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    best, bad, kept = math.inf, 0, {}
    for epoch in range(6):
        for batch in run.epoch(epoch):
            run.step(batch)
        loss = run.evaluate(held_out()).loss
        if loss < best:
            best, bad, kept = loss, 0, copy.deepcopy(run.state())
        else:
            bad += 1
        if bad == 2:
            break
    return {**kept, "epoch": torch.tensor(epoch)}
