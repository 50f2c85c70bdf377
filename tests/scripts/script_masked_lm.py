"""Masked language model: the loss function draws which words are masked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 7, True


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, dropout=0.1, bias=False, batch_first=True)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attend(normed, normed, normed, need_weights=False)[0]
        return hidden + self.feed(hidden)


def dataset() -> Tensor:
    return torch.randint(1, 12, (25, 8), generator=torch.Generator().manual_seed(1))


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), Block(8), Block(8), nn.Linear(8, 12)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_fn(model: Any, words: Any) -> tuple[Tensor, Tensor]:
    masked = torch.rand(words.shape, device=words.device) < 0.3
    scores = model(words.masked_fill(masked, 0))
    each = functional.cross_entropy(scores.transpose(1, 2), words, reduction="none")
    return (each * masked).sum(), masked.sum()


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
