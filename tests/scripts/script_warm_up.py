"""Linear warm-up and decay by LambdaLR, with label smoothing and a clipped gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 7, True


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3)
    )
    return model.double(), torch.optim.AdamW(model.parameters(), lr=0.03)


def rate(step: int) -> float:
    return min((step + 1) / 3, (9 - step) / 6)


def loss_fn(model: Any, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    inputs, targets = batch
    scores = model(inputs)
    correct = (scores.argmax(1) == targets).sum()
    loss = functional.cross_entropy(scores, targets, label_smoothing=0.1, reduction="sum")
    return loss, len(targets), {"accuracy": correct}


def plain(batches: Batches) -> State:
    model, optimizer = build()
    scheduler = LambdaLR(optimizer, rate)
    for epoch in range(2):
        correct, seen = 0.0, 0
        for batch in batches(epoch):
            optimizer.zero_grad()
            total, count, metrics = loss_fn(model, batch)
            (total / count).backward()
            clip_grad_norm_(model.parameters(), 0.4)
            optimizer.step()
            scheduler.step()
            correct, seen = correct + metrics["accuracy"].item(), seen + count
    return {**model.state_dict(), "accuracy": torch.tensor(correct / seen, dtype=torch.float64)}


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), loss_fn, batch_size=BATCH, clip=0.4)
    scheduler = LambdaLR(optimizer, rate)
    for epoch in range(2):
        correct, seen = 0.0, 0
        for batch in run.epoch(epoch):
            run.step(batch)
            scheduler.step()
            correct, seen = correct + run.stats.metrics["accuracy"] * run.stats.count, seen + run.stats.count
    return {**run.state(), "accuracy": torch.tensor(correct / seen, dtype=torch.float64)}
