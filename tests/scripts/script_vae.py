"""VAE: the latent is drawn in the model's forward; the loss is a sum over pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 7, True


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))
        self.decode = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(inputs).chunk(2, dim=1)
        latent = mean + (0.5 * spread).exp() * torch.randn_like(mean)
        return self.decode(latent), mean, spread


def dataset() -> Tensor:
    return torch.rand(25, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = VAE().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(model: Any, inputs: Any) -> tuple[Tensor, int]:
    outputs, mean, spread = model(inputs)
    apart = functional.binary_cross_entropy_with_logits(outputs, inputs, reduction="sum")
    return apart - 0.5 * (1 + spread - mean**2 - spread.exp()).sum(), len(inputs)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for batch in batches(epoch):
            optimizer.zero_grad()
            total, count = loss_fn(model, batch)
            (total / count).backward()
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
    return run.state()
