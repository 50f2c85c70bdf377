"""A custom autograd function: domain-adversarial training reverses a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return -0.5 * slope


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.label, self.domain = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(inputs)
        return self.label(features), self.domain(Reverse.apply(features))


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64),
        torch.randint(0, 3, (25,), generator=draw),
        torch.randint(0, 2, (25,), generator=draw),
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Adversarial().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, labels, domains = batch
    label, domain = model(inputs)
    return functional.cross_entropy(label, labels) + functional.cross_entropy(domain, domains)


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
