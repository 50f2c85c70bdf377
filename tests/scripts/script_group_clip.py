"""Clipping by hand, each parameter group to a norm of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 7, True


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Sequential, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.2}]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            for group, largest in zip(optimizer.param_groups, (0.05, 0.1), strict=True):
                clip_grad_norm_(group["params"], largest)
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(functional.cross_entropy(model(inputs), targets))
            for group, largest in zip(optimizer.param_groups, (0.05, 0.1), strict=True):
                clip_grad_norm_(group["params"], largest)
            optimizer.step()
    return run.state()
