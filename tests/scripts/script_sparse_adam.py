"""Sparse embeddings and dense layers in one custom loop, each with an optimizer of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


class Rated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 4, sparse=True), nn.Embedding(30, 4, sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.head(torch.cat([self.users(users), self.items(items)], 1)).squeeze(1)


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    users, items = torch.randint(0, 20, (25,), generator=draw), torch.randint(0, 30, (25,), generator=draw)
    return TensorDataset(users, items, torch.rand(25, generator=draw, dtype=torch.float64))


def build() -> tuple[nn.Module, Optimizer, Optimizer]:
    torch.manual_seed(0)
    model = Rated().double()
    sparse = torch.optim.SparseAdam([model.users.weight, model.items.weight], lr=0.05)
    return model, sparse, torch.optim.Adam(model.head.parameters(), lr=0.01)


def plain(batches: Batches) -> State:
    model, sparse, dense = build()
    for epoch in range(2):
        for users, items, ratings in batches(epoch):
            model.zero_grad()
            functional.mse_loss(model(users, items), ratings).backward()
            sparse.step()
            dense.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, sparse, dense = build()
    run = prepare(model, [sparse, dense], dataset(), batch_size=BATCH)
    for epoch in range(2):
        for users, items, ratings in run.microbatches(epoch):
            model.zero_grad()
            run.backward(functional.mse_loss(model(users, items), ratings))
            sparse.step()
            dense.step()
    return run.state()
