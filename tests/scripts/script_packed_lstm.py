"""An LSTM over packed sequences of different lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(12, 6), nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.lstm(packed)
        return self.head(last[-1])


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 7, (25,), generator=draw)
    words = torch.randint(0, 12, (25, 6), generator=draw)
    return TensorDataset(words, lengths, (words[:, 0] + lengths) % 3)


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Tagger().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def loss_fn(model: Any, batch: Any) -> Tensor:
    words, lengths, targets = batch
    return functional.cross_entropy(model(words, lengths), targets)


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
