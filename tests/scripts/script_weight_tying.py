"""Weight tying: the last layer of a language model is its embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 7, True


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.drop = nn.Dropout(0.1)
        self.mix, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.mix(self.drop(self.embed(words))).tanh()))


def dataset() -> Tensor:
    return torch.randint(0, 11, (25, 6), generator=torch.Generator().manual_seed(1))


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Tied().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_fn(model: Any, words: Any) -> Tensor:
    return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


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
