"""U-Net with skip connections and a loss in which foreground weighs more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 5


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.join = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down1(images)
        coarse = self.down2(functional.max_pool2d(fine, 2))
        return self.head(self.join(torch.cat([self.up(coarse), fine], 1)))


def dataset() -> TensorDataset:
    images = torch.randn(18, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(images, (images[:, 0] > 0.8).long())


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = UNet().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    images, masks = batch
    weights = torch.tensor([0.2, 1.0], dtype=images.dtype, device=images.device)
    return functional.cross_entropy(model(images), masks, weight=weights, reduction="sum"), weights[masks].sum()


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
