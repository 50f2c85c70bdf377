"""PGD: three backwards to the inputs, with zero_grad() in the inner loop."""

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
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            delta = torch.zeros_like(inputs, requires_grad=True)
            for _ in range(3):
                functional.cross_entropy(model(inputs + delta), targets).backward()
                delta.data = (delta + 0.05 * delta.grad.sign()).clamp(-0.1, 0.1).detach()
                delta.grad = None
                optimizer.zero_grad()
            functional.cross_entropy(model(inputs + delta.detach()), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            delta = torch.zeros_like(inputs, requires_grad=True)
            for _ in range(3):
                functional.cross_entropy(model(inputs + delta), targets).backward()
                delta.data = (delta + 0.05 * delta.grad.sign()).clamp(-0.1, 0.1).detach()
                delta.grad = None
                optimizer.zero_grad()
            run.backward(functional.cross_entropy(model(inputs + delta.detach()), targets))
            optimizer.step()
            optimizer.zero_grad()
    return run.state()
