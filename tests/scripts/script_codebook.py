"""VQ-VAE: a straight-through estimator, and a codebook that is a buffer replaced, not written, in every forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.scripts import Batches, Prepare, State

BATCH = 8


class Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        chosen = self.codes[nearest]
        if self.training:
            hits = functional.one_hot(nearest, 6).to(hidden.dtype)
            means = hits.T @ hidden.detach() / hits.sum(0).clamp(min=1)[:, None]
            self.codes = torch.where(hits.sum(0)[:, None] > 0, 0.8 * self.codes + 0.2 * means, self.codes)
        return hidden + (chosen - hidden).detach()


def dataset() -> Tensor:
    return torch.randn(26, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), Quantizer(), nn.Linear(4, 8), nn.ReLU())
    model = model.append(nn.Linear(8, 6)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(model: Any, inputs: Any) -> Tensor:
    return functional.mse_loss(model(inputs), inputs)


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
