"""Sparse embeddings: gradients that are sparse tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words).mean(1))


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, 50, (25, 4), generator=draw), torch.randint(0, 3, (25,), generator=draw))


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Bag().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def loss_fn(model: Any, batch: Any) -> Tensor:
    words, targets = batch
    return functional.cross_entropy(model(words), targets)


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
