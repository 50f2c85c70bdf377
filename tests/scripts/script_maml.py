"""MAML: the loss is that of weights after an inner step, through which its gradient goes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 8


def dataset() -> TensorDataset:
    """Tasks: two points to adapt to and two to be judged by, of one sine each."""
    draw = torch.Generator().manual_seed(1)
    phase = torch.rand(26, 1, 1, generator=draw, dtype=torch.float64) * 3
    points = torch.randn(26, 4, 1, generator=draw, dtype=torch.float64)
    return TensorDataset(points, (points + phase).sin())


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def adapted_loss(model: nn.Module, points: Tensor, values: Tensor) -> Tensor:
    losses = []
    for task, truth in zip(points, values, strict=True):
        weights = dict(model.named_parameters())
        inner = functional.mse_loss(torch.func.functional_call(model, weights, task[:2]), truth[:2])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        losses.append(functional.mse_loss(torch.func.functional_call(model, fast, task[2:]), truth[2:]))
    return torch.stack(losses).mean()


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for points, values in batches(epoch):
            optimizer.zero_grad()
            adapted_loss(model, points, values).backward()
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for points, values in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(adapted_loss(model, points, values))
            optimizer.step()
    return run.state()
