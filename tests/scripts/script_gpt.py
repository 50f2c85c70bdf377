"""Autoregressive GPT: causal attention, and targets of which ignore_index leaves some out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 7, True


class Block(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        hidden = hidden + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return hidden + self.drop(self.down(functional.gelu(self.up(self.norm2(hidden)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(13, 8), nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 13, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def dataset() -> TensorDataset:
    """Words, and the next ones; -100 where a sentence has ended."""
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(0, 13, (25, 8), generator=draw)
    ends = torch.randint(3, 8, (25, 1), generator=draw)
    return TensorDataset(text[:, :-1], text[:, 1:].masked_fill(torch.arange(7) >= ends, -100))


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = GPT().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_fn(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    words, targets = batch
    total = functional.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


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
