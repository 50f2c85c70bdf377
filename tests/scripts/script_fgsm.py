"""FGSM: a backward to the inputs, whose gradients of the weights are thrown away, then training on what it gives."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(24, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (24,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            inputs.requires_grad_()
            functional.cross_entropy(model(inputs), targets).backward()
            attacked = (inputs + 0.1 * inputs.grad.sign()).detach()
            optimizer.zero_grad()
            functional.cross_entropy(model(attacked), targets).backward()
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            inputs.requires_grad_()
            functional.cross_entropy(model(inputs), targets).backward()
            attacked = (inputs + 0.1 * inputs.grad.sign()).detach()
            optimizer.zero_grad()
            run.backward(functional.cross_entropy(model(attacked), targets))
            optimizer.step()
    return run.state()
