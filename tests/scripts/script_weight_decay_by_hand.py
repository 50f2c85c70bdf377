"""Weight decay by hand: added to the gradients of the weights, between backward and step."""

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
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def decay(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "bias" not in name:
            parameter.grad.add_(parameter.detach(), alpha=0.1)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            decay(model)
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(functional.cross_entropy(model(inputs), targets))
            decay(model)
            optimizer.step()
    return run.state()
