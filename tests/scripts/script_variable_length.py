"""Sequences of different lengths, padded by the data set and masked in the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentence ``index`` has 2 to 7 words; the rest is padding."""

    def __len__(self) -> int:
        return 25

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.zeros(8, dtype=torch.long)
        length = index % 6 + 2
        words[:length] = torch.randint(1, 12, (length,), generator=torch.Generator().manual_seed(index))
        return {"words": words, "length": torch.tensor(length)}


def dataset() -> Sentences:
    return Sentences()


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 12)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def loss_fn(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    words, counts = batch["words"], torch.arange(7, device=batch["length"].device) < batch["length"][:, None] - 1
    each = functional.cross_entropy(model(words[:, :-1]).transpose(1, 2), words[:, 1:], reduction="none")
    return (each * counts).sum(), counts.sum()


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
