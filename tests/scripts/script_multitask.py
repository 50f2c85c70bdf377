"""Multi-task: two losses of one forward, a backward for each, one update."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.label, self.value = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(inputs)
        return self.label(hidden), self.value(hidden).squeeze(1)


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(25, 5, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (25,), generator=draw), inputs.sum(1))


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = TwoHeads().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, labels, values in batches(epoch):
            optimizer.zero_grad()
            scores, guesses = model(inputs)
            functional.cross_entropy(scores, labels).backward(retain_graph=True)
            (0.3 * functional.mse_loss(guesses, values)).backward()
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, labels, values in run.microbatches(epoch):
            optimizer.zero_grad()
            scores, guesses = model(inputs)
            run.backward(functional.cross_entropy(scores, labels), retain_graph=True)
            run.backward(0.3 * functional.mse_loss(guesses, values))
            optimizer.step()
    return run.state()
