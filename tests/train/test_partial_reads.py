"""Reading a model by itself where each rank has a part of it is refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import UsageError

DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(5)), torch.zeros(24, 3))
READS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a layer": lambda model: model.get_submodule("0").state_dict(),
    "deepcopy": copy.deepcopy,
    "average": AveragedModel,
    "pickle": lambda model: torch.save(model, io.BytesIO()),
}


def mean(model: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def read(strategy: str) -> dict[str, str]:
    """What each way of reading came to; and of an average that was made before."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    run = tutti.prepare(model, "sgd", DATA, mean, strategy=strategy)
    run.step(next(iter(run.epoch(0))))
    said = {}
    for name, way in READS.items():
        try:
            said[name] = type(way(model)).__name__
        except UsageError as error:
            said[name] = str(error)
    other = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    average = AveragedModel(other)
    try:
        tutti.prepare(other, "sgd", DATA, mean, strategy=strategy)
        said["average before"] = type(average).__name__
    except UsageError as error:
        said["average before"] = str(error)
    assert sorted(run.state()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    return said


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["sharded:stage=2", "sharded:stage=3", "tensor:least=1", "model_parallel"])
def test_parts_are_refused(strategy: str, size: int) -> None:
    if strategy == "model_parallel" and size == 3:
        pytest.skip("two layers")
    for said in worlds.run(size, read, strategy=strategy):
        for name, text in said.items():
            assert "cannot be combined with" in text and ("run.state()" in text), name


def whole() -> dict[str, str]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    average = AveragedModel(model)
    run = tutti.prepare(model, "sgd", DATA, mean, strategy="sharded:stage=1")
    run.step(next(iter(run.epoch(0))))
    average.update_parameters(model)
    return {name: type(way(model)).__name__ for name, way in READS.items()}


def test_whole_models_are_read_as_ever() -> None:
    for said in worlds.run(2, whole):
        assert said["state_dict"] == "OrderedDict" and said["average"] == "AveragedModel"
