"""SAM: a step up to where the loss is sharpest, the gradient there, and back before the update."""

from __future__ import annotations

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
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@torch.no_grad()
def ascend(model: nn.Module, radius: float = 0.05) -> list[Tensor]:
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    steps = [p.grad * (radius / (norm + 1e-12)) for p in model.parameters()]
    for parameter, step in zip(model.parameters(), steps, strict=True):
        parameter.add_(step)
    return steps


@torch.no_grad()
def descend(model: nn.Module, steps: list[Tensor]) -> None:
    for parameter, step in zip(model.parameters(), steps, strict=True):
        parameter.sub_(step)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            functional.cross_entropy(model(inputs), targets).backward()
            steps = ascend(model)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            descend(model, steps)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            run.backward(functional.cross_entropy(model(inputs), targets))
            steps = ascend(model)
            optimizer.zero_grad()
            run.backward(functional.cross_entropy(model(inputs), targets))
            descend(model, steps)
            optimizer.step()
            optimizer.zero_grad()
    return run.state()
