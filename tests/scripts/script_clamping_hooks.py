"""Hooks that clamp gradients while backward goes on, with a loss that is a sum over words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.scripts import Batches, Prepare, State

BATCH = 7


def dataset() -> Tensor:
    return torch.randint(0, 9, (25, 6), generator=torch.Generator().manual_seed(1))


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 9)).double()
    for parameter in model.parameters():
        parameter.register_hook(lambda slope: slope.clamp(-0.01, 0.01))
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def loss_fn(model: Any, words: Any) -> tuple[Tensor, int]:
    scores = model(words[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(scores, words[:, 1:].flatten(), reduction="sum"), len(scores)


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
