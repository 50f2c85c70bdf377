"""Tensors of ``run.state()``: the model's own, or copies, which can be read for ever and refuse lost writes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.errors import UsageError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.other = nn.Linear(4, 4, bias=False)
        self.other.weight = self.first.weight

    def forward(self, inputs: Any) -> Any:
        return self.last(self.other(self.norm(torch.tanh(self.first(inputs)))))


def prepared(strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(model: Any, batch: Any) -> Any:
        return functional.mse_loss(model(batch), batch)

    run = tutti.prepare(model, optimizer, data, loss, strategy=strategy, batch_size=6, **options)
    run.step(next(run.epoch(0)))
    return run


def write(strategy: str, name: str) -> str:
    run = prepared(strategy)
    state = run.state()
    try:
        state[name].mul_(0.5)
    except UsageError as error:
        return str(error)
    return "live" if torch.equal(run.state()[name], state[name]) else "lost"


SPLIT = [(3, "sharded"), (2, "sharded:stage=2"), (2, "tensor:least=1"), (2, "pipeline"), (2, "local_sgd")]


@pytest.mark.parametrize(
    ("place", "name"),
    in_turn([*SPLIT, (2, "mirrored"), (3, "sharded:stage=1")], ["first.weight", "norm.running_mean"]),
    ids=str,
)
def test_a_write_reaches_the_model_or_is_refused(place: tuple[int, str], name: str) -> None:
    size, strategy = place
    for said in worlds.run(size, write, strategy=strategy, name=name):
        refused = "would be lost" in said and "test_state_copies.py:" in said and "model.load_state_dict" in said
        whole = strategy in ("mirrored", "sharded:stage=1") and name == "first.weight"
        assert said == "live" if whole else refused or said == "live", said


def read(strategy: str) -> bool:
    run = prepared(strategy)
    state = run.state()
    assert state["first.weight"] is state["other.weight"]
    kept = {name: tensor.numpy().copy() for name, tensor in state.items()}
    written = copy.deepcopy(state)
    written["last.bias"].add_(1.0)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    run.model.load_state_dict(written)
    loaded = torch.equal(run.state()["last.bias"], written["last.bias"])
    run.model.load_state_dict(state)
    run.step(next(run.epoch(1)))
    now = run.state()
    averages = {name: 0.5 * tensor + 0.5 * now[name] for name, tensor in state.items()}
    same = all(torch.equal(torch.from_numpy(kept[name]), saved[name]) for name in saved)
    return loaded and same and all(type(each) is torch.Tensor for each in (*averages.values(), *saved.values()))


@pytest.mark.parametrize(("size", "strategy"), SPLIT[:4])
def test_copies_are_read_saved_and_loaded_as_tensors(size: int, strategy: str) -> None:
    assert worlds.run(size, read, strategy=strategy) == [True] * size
