"""Reading a model by itself where each rank has a part of it is refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn
from tutti.errors import UsageError

DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(5)), torch.zeros(24, 3))
READS: dict[str, Callable[[nn.Module], Any]] = {
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
        assert said.pop("average before") == "AveragedModel"
        for name, text in said.items():
            assert "cannot be combined with" in text and ("run.state()" in text), name


AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "swa": AveragedModel,
    "buffers": lambda model: AveragedModel(model, use_buffers=True),
    "lists": lambda model: AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn()),
    "ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "own": lambda model: AveragedModel(model, avg_fn=lambda mean, now, count: mean * 0.5 + now * 0.5),
}


def averaged(strategy: str, average: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    mean_model = AVERAGES[average](model)
    data = TensorDataset(*(tensor.double() for tensor in DATA.tensors))
    run = tutti.prepare(model, "sgd:lr=0.1", data, mean, strategy=strategy, workers=1, batch_size=8, precision="fp64")
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
            mean_model.update_parameters(model)
    with torch.no_grad():
        outputs = mean_model.eval()(data.tensors[0])
    state = {**run.state(), **mean_model.module.state_dict(), "outputs": outputs}
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


@pytest.mark.parametrize(("average", "devices"), in_turn(list(AVERAGES), [2, 3]))
def test_an_average_of_slices_equals_one_device(average: str, devices: int) -> None:
    want = worlds.alone(averaged, strategy="single", average=average)
    for got in worlds.run(devices, averaged, strategy="tensor:least=1", average=average):
        assert largest_difference(got, want) <= 1e-10


def averaged_rows(strategy: str, average: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    mean_model = AVERAGES[average](model)
    data = TensorDataset(*(tensor.double() for tensor in DATA.tensors))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, data, strategy=strategy, workers=1 + 2 * (tutti.size() > 1), batch_size=9)
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(mean(model, batch))
            optimizer.step()
            if run.stepped:
                mean_model.update_parameters(model)
    state = {**run.state(), **{f"mean.{name}": p for name, p in mean_model.module.state_dict().items()}}
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("average", "place"),
    in_turn(list(AVERAGES), [("sharded:stage=2", 2), ("sharded:stage=3", 3), ("model_parallel", 2)], each=2),
    ids=str,
)
def test_an_average_of_rows_equals_one_device(average: str, place: tuple[str, int]) -> None:
    want, (strategy, devices) = worlds.alone(averaged_rows, strategy="single", average=average), place
    for got in worlds.run(devices, averaged_rows, strategy=strategy, average=average):
        assert largest_difference(got, want) <= 1e-10


def whole() -> dict[str, str]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    average = AveragedModel(model)
    run = tutti.prepare(model, "sgd", DATA, mean, strategy="sharded:stage=1")
    run.step(next(iter(run.epoch(0))))
    average.update_parameters(model)
    return {name: type(way(model)).__name__ for name, way in READS.items()}


def test_whole_models_are_read_as_ever() -> None:
    for said in worlds.run(2, whole):
        assert said["deepcopy"] == "Sequential" and said["average"] == "AveragedModel"
