"""Parameters that a forward writes by itself, in its first batch or in each one, are right on many ranks or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import TuttiError

DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


class ActNorm(nn.Module):
    """A layer whose first batch sets bias and scale (Glow, arXiv 1807.03039)."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.zeros(6).double()), nn.Parameter(torch.ones(6).double())
        self.way, self.begun = way, False

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.begun and self.training:
            self.begun = True
            with torch.no_grad():
                bias, scale = -inputs.mean(0), 1 / (inputs.std(0) + 1e-3)
                if self.way == "data":
                    self.bias.data.copy_(bias)
                    self.scale.data.copy_(scale)
                else:
                    self.bias.copy_(bias)
                    self.scale.copy_(scale)
        return (inputs + self.bias) * self.scale


def model_of(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), ActNorm(way), nn.Tanh(), nn.Linear(6, 3)).double()


def mean(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def train(strategy: str, way: str, form: str, workers: int = 1, before: bool = False) -> Any:
    model = model_of(way)
    if before:
        with torch.no_grad():
            model(DATA[:12][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = 0
    try:
        run = tutti.prepare(model, optimizer, DATA, mean, strategy=strategy, workers=workers, batch_size=12, seed=0)
        if form == "step":
            for batch in run.epoch(0):
                run.step(batch)
                updates = run.updates
        else:
            for batch in run.microbatches(0):
                optimizer.zero_grad()
                run.backward(mean(model, batch))
                optimizer.step()
                updates = run.updates
    except TuttiError as error:
        return updates, str(error)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("form", ["step", "loop"])
@pytest.mark.parametrize("way", ["data", "copy"])
@pytest.mark.parametrize("strategy", ["mirrored", "mirrored:algorithm=native", "sharded:stage=1"])
def test_values_of_each_ranks_first_batch_are_refused_before_the_first_update(
    strategy: str, way: str, form: str
) -> None:
    for updates, said in worlds.run(2, train, strategy=strategy, way=way, form=form, workers=2):
        assert updates == 0 and "other values into '1.bias'" in said and "test_data_dependent_init.py:" in said


@pytest.mark.parametrize("strategy", ["sharded:stage=2", "sharded", "central_storage", "parameter_server"])
def test_other_strategies_refuse_them_too(strategy: str) -> None:
    for updates, said in worlds.run(2, train, strategy=strategy, way="data", form="step", workers=2):
        assert (updates == 0 and "1.bias" in said) or "1.scale" in said or "rank" in said


@pytest.mark.parametrize("strategy", ["tensor:least=1", "pipeline:micro_batches=1"])
def test_ranks_with_the_same_samples_set_them_as_one_device(strategy: str) -> None:
    [want] = worlds.run(1, train, strategy="single", way="copy", form="step")
    for got in worlds.run(2, train, strategy=strategy, way="copy", form="step"):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize("strategy", ["mirrored", "sharded:stage=1", "sharded"])
def test_a_forward_before_prepare_sets_them_on_every_rank(strategy: str) -> None:
    [want] = worlds.run(1, train, strategy="single", way="data", form="step", workers=2, before=True)
    for got in worlds.run(2, train, strategy=strategy, way="data", form="step", workers=2, before=True):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


def test_workers_that_train_alone_each_set_their_own_or_are_refused() -> None:
    """On a device of several workers the first one's flag would leave the parameters of the others unset."""
    [(updates, said)] = worlds.run(1, train, strategy="local_sgd", way="data", form="step", workers=2)
    assert updates == 0 and "ActNorm.begun" in said
