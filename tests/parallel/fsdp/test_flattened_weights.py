"""Layers that move their weights to one new buffer within a forward, as recurrent layers do on GPUs, when sharded."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import table
from tutti.errors import UsageError

BATCH = 6


def flatten(layer: nn.RNNBase) -> None:
    """Do what ``flatten_parameters`` does on a GPU: assign views of one new buffer, in C++, to ``.data``."""
    weights: list[Any] = layer._flat_weights
    if all(type(weight) is nn.Parameter for weight in weights):
        with torch._C.DisableTorchFunction():
            flat = torch.cat([weight.detach().flatten() for weight in weights])
            for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
                weight.data = part.view_as(weight)


class Tagger(nn.Module):
    """Reads words; ``does`` is what its forward does with the weights besides."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does = does
        self.embed, self.lstm, self.head = nn.Embedding(9, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        if self.does == "flattens":
            self.lstm.flatten_parameters()
        elif self.does == "shrinks":
            self.head.weight.data = 0.9 * self.head.weight.data
        _, (last, _) = self.lstm(self.embed(words))
        found: Tensor = self.head(last[-1])
        return found


def trained(strategy: str, does: str) -> Any:
    """Return the state after two epochs, or the text of the refusal."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(0, 9, (20, 4), generator=draw)
    data, model = TensorDataset(words, words[:, 0] % 3), Tagger(does).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def loss(model: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    with patch.object(nn.RNNBase, "flatten_parameters", flatten):
        run = tutti.prepare(model, optimizer, data, loss, strategy=strategy, batch_size=BATCH, seed=0)
        try:
            for epoch in range(2):
                for batch in run.epoch(epoch):
                    run.step(batch)
        except UsageError as error:
            return f"after {run.updates}: {error}"
        return {name: value.numpy().copy() for name, value in run.state().items()}


STRATEGIES = ("sharded:stage=1", "sharded:stage=2", "sharded", "sharded:units=LSTM", "mirrored")


@pytest.mark.parametrize(("strategy", "does", "devices"), table(STRATEGIES, ["nothing", "flattens"], [2, 3]))
def test_flattened_weights_are_those_of_the_last_update(strategy: str, does: str, devices: int) -> None:
    want = worlds.alone(trained, strategy="single", does="nothing")
    for got in worlds.run(devices, trained, strategy=strategy, does=does):
        assert isinstance(got, dict), got
        assert largest_difference(got, want) <= 1e-10


def test_flattened_weights_are_those_of_the_last_read_from_servers() -> None:
    for got in worlds.run(2, trained, strategy="parameter_server:mode=async", does="flattens"):
        assert isinstance(got, dict), got


@pytest.mark.parametrize("stage", [2, 3])
def test_other_values_that_a_forward_assigns_are_refused(stage: int) -> None:
    for said in worlds.run(2, trained, strategy=f"sharded:stage={stage}", does="shrinks"):
        assert "after 0" in said and "writes the parameter head.weight within a forward" in said, said
    worlds.forget(2)
