"""Mixup and label smoothing: pairs and proportions are drawn in the loss function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 8, True


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(26, 1, 6, 6, generator=draw, dtype=torch.float64), torch.randint(0, 3, (26,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    return model.double(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_fn(model: Any, batch: Any) -> Tensor:
    images, labels = batch
    share = torch.distributions.Beta(*torch.full((2,), 0.4, device=images.device)).sample().item()
    others = torch.randperm(len(images), device=images.device)
    scores = model(share * images + (1 - share) * images[others])
    losses = (functional.cross_entropy(scores, which, label_smoothing=0.1) for which in (labels, labels[others]))
    return share * next(losses) + (1 - share) * next(losses)


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
