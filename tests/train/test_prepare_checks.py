"""What ``tutti.prepare`` refuses: arguments of another kind, and models whose forward writes parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference


def table(strategy: str, workers: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 1)).double()
    try:
        run = tutti.prepare(
            model, "adam:lr=0.1", torch.randint(0, 9, (24, 2)), lambda called, batch: called(batch).square().mean(),
            strategy=strategy, workers=workers, batch_size=6, precision="fp64",
        )  # fmt: skip
    except tutti.errors.UsageError as error:
        return str(error)
    for batch in run.epoch(0):
        run.step(batch)
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize("strategy", ["mirrored", "sharded:stage=1", "sharded", "central_storage", "parameter_server"])
def test_a_table_that_its_forward_writes_is_refused_on_several_data_ranks(strategy: str) -> None:
    for said in worlds.run(2, table, strategy=strategy, workers=2):
        assert said.startswith("the embedding 0 has max_norm=0.5") and "strategy='tensor'" in said


def test_a_table_that_its_forward_writes_on_one_data_rank() -> None:
    want = worlds.alone(table, strategy="single", workers=1)
    assert largest_difference(worlds.alone(table, strategy="single", workers=2), want) <= 1e-10
    for strategy in ("tensor:least=1", "pipeline"):
        for got in worlds.run(2, table, strategy=strategy, workers=1):
            assert largest_difference(got, want) <= 1e-10


def given(name: str, value: Any) -> str:
    net = nn.Linear(2, 1)
    arguments: dict[str, Any] = {"loss_fn": lambda model, batch: model(batch).mean(), name: value}
    try:
        tutti.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(8, 2), **arguments)
    except tutti.errors.UsageError as error:
        return str(error)
    return "nothing was raised"


class OwnLoss(nn.MSELoss):
    """A loss of PyTorch with the arguments of tutti's."""

    def forward(self, model: Any, batch: Any) -> Any:
        return super().forward(model(batch), batch[:, :1])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("loss_fn", nn.MSELoss(), "loss_fn is MSELoss, which takes outputs and targets"),
        ("loss_fn", nn.MSELoss, "such as lambda model, batch: MSELoss()(model(batch[0]), batch[1])"),
        ("loss_fn", nn.functional.cross_entropy, "lambda model, batch: cross_entropy(model(batch[0]), batch[1])"),
        ("batchsize", 8, "tutti.prepare has no argument 'batchsize'. Did you mean 'batch_size'?"),
        ("loss_fn", "mse", "loss_fn is a str. Give a function loss_fn(model, batch)"),
        ("loss_fn", OwnLoss(), "nothing was raised"),
        ("loss_fn", torch.utils.data.TensorDataset(), "the order is tutti.prepare(model, optimizer, dataset, loss_fn)"),
        ("strategy", None, "strategy is None. Give text such as 'mirrored'"),
        ("callbacks", tutti.EarlyStopping("loss"), "callbacks is an EarlyStopping. Give a list"),
        ("scheduler", torch.optim.lr_scheduler.StepLR, "is the class StepLR and no instance. Give StepLR("),
    ],
)
def test_arguments_of_another_kind_are_refused(name: str, value: Any, said: str) -> None:
    [text] = worlds.run(1, given, name=name, value=value)
    assert said in text, text
