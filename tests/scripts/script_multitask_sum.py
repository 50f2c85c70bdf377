"""Multi-task: the weighted sum of three losses of one forward, one of them of an inner layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 8


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 8)
        self.label, self.value, self.early = nn.Linear(8, 3), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = self.first(inputs).tanh()
        high = self.second(low).tanh()
        return self.label(high), self.value(high), self.early(low)


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(29, 5, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (29,), generator=draw), inputs.sum(1, keepdim=True))


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Deep().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs, labels, values = batch
    scores, guesses, early = model(inputs)
    losses = functional.cross_entropy(scores, labels), functional.smooth_l1_loss(guesses, values)
    return losses[0] + 0.3 * losses[1] + 0.1 * functional.cross_entropy(early, labels)


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
