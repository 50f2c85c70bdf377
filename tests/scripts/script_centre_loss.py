"""Centre loss: class centres are parameters of the loss, with an optimizer of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(inputs)
        return features, self.head(features)


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 4))

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        return ((features - self.centres[targets]) ** 2).sum(1).mean()


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    torch.manual_seed(0)
    model, centres = Network().double(), Centres().double()
    optimizers = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.SGD(centres.parameters(), lr=0.5)
    return model, centres, *optimizers


def plain(batches: Batches) -> State:
    model, centres, of_model, of_centres = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            features, scores = model(inputs)
            loss = functional.cross_entropy(scores, targets) + 0.1 * centres(features, targets)
            of_model.zero_grad()
            of_centres.zero_grad()
            loss.backward()
            for parameter in centres.parameters():
                parameter.grad *= 1 / 0.1
            of_model.step()
            of_centres.step()
    return nn.ModuleDict({"model": model, "centres": centres}).state_dict()


def script(prepare: Prepare) -> State:
    model, centres, of_model, of_centres = build()
    run = prepare({"model": model, "centres": centres}, [of_model, of_centres], dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            features, scores = model(inputs)
            loss = functional.cross_entropy(scores, targets) + 0.1 * centres(features, targets)
            of_model.zero_grad()
            of_centres.zero_grad()
            run.backward(loss)
            for parameter in centres.parameters():
                parameter.grad *= 1 / 0.1
            of_model.step()
            of_centres.step()
    return run.state()
