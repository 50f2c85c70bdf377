"""model.eval() for a look at the held-out samples in the middle of an epoch, model.train() after it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
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
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    return model.double(), torch.optim.SGD(model.parameters(), lr=0.1)


def look(model: nn.Module) -> Tensor:
    model.eval()
    held_out = torch.linspace(-1, 1, 5, dtype=torch.float64)
    with torch.no_grad():
        score = model(held_out.to(next(model.parameters()).device)).max()
    model.train()
    return score


def plain(batches: Batches) -> State:
    model, optimizer = build()
    seen = []
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            seen.append(look(model))
    return {**model.state_dict(), "seen": torch.stack(seen)}


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    seen = []
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            if run.stepped:
                seen.append(look(model))
    return {**run.state(), "seen": torch.stack(seen)}
