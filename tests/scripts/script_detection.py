"""Detection: every image has another number of targets, some of them none, and the loss is a mean over targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


class Detector(nn.Module):
    """Four slots an image, each with a box and whether there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.boxes, self.scores = nn.Linear(64, 16), nn.Linear(64, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        return self.boxes(features).view(-1, 4, 4), self.scores(features)


class Images(Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __len__(self) -> int:
        return 25

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        there = torch.arange(4) < index % 5
        boxes = torch.rand(4, 4, generator=draw, dtype=torch.float64) * there[:, None]
        return torch.randn(1, 6, 6, generator=draw, dtype=torch.float64), boxes, there


def dataset() -> Images:
    return Images()


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Detector().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_fn(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    images, boxes, there = batch
    guesses, scores = model(images)
    matched = functional.l1_loss(guesses[there], boxes[there], reduction="sum")
    found = functional.binary_cross_entropy_with_logits(scores, there.to(scores.dtype), reduction="sum")
    return matched + found, there.sum()


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
