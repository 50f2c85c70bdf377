"""Fine-tuning: the backbone joins the optimizer in the second epoch, by add_param_group, with a rate of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 8


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(26, 5, generator=draw, dtype=torch.float64), torch.randn(26, 2, generator=draw, dtype=torch.float64)
    )


class Tuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))


def build() -> tuple[Tuned, Optimizer]:
    torch.manual_seed(0)
    model = Tuned().double()
    return model, torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        if epoch == 1:
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 0.01})
        for batch in batches(epoch):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            model.backbone.zero_grad()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    for epoch in range(2):
        if epoch == 1:
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 0.01})
        for batch in run.epoch(epoch):
            run.step(batch)
    return run.state()
