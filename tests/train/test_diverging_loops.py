"""Loops in which ranks or bodies take other batches than they are thought to take are refused before an update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds


def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def prepared(strategy: str = "mirrored", loss: bool = True) -> tuple[nn.Module, torch.optim.Optimizer, tutti.Run]:
    torch.manual_seed(0)
    inputs = torch.randn(20, 3, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    run = tutti.prepare(model, optimizer, data, mean if loss else None, strategy=strategy, batch_size=6)
    return model, optimizer, run


def left_by_one_rank(strategy: str) -> None:
    _, _, run = prepared(strategy)
    for epoch in range(2):
        for number, batch in enumerate(run.epoch(epoch)):
            run.step(batch)
            if tutti.rank() == 0 and number == 1:
                break


@pytest.mark.parametrize("strategy", ["mirrored", "mirrored:algorithm=native", "sharded", "central_storage"])
def test_a_rank_that_leaves_an_epoch_alone_is_named(strategy: str) -> None:
    with pytest.raises(worlds.RankError, match="rank 0 has data of epoch 2 up to batch 1, rank 1 has data of epoch 1"):
        worlds.run_within(5.0, 2, left_by_one_rank, strategy=strategy)


def left_by_all(strategy: str) -> list[float]:
    _, _, run = prepared(strategy)
    losses = []
    for epoch in range(2):
        for number, batch in enumerate(run.epoch(epoch)):
            losses.append(run.step(batch))
            if number == 1:
                break
    return losses


def test_all_ranks_may_leave_an_epoch() -> None:
    [want] = worlds.run(1, left_by_all, strategy="single")
    for got in worlds.run(3, left_by_all, strategy="mirrored"):
        assert got == pytest.approx(want, abs=1e-12)


def nested(before: bool) -> None:
    model, optimizer, run = prepared(loss=False)
    for batch in run.microbatches(0):
        optimizer.zero_grad()
        if before:
            next(iter(run.microbatches(1)))
        run.backward(mean(model, batch))
        optimizer.step()


def test_a_loop_within_the_body_of_another_one() -> None:
    with pytest.raises(worlds.RankError, match=r"begins within the body of another one, before optimizer\.step"):
        worlds.run_within(5.0, 3, nested, before=True)
    worlds.run(3, nested, before=False)


def assigned(strategy: str) -> None:
    model, _, run = prepared(strategy)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("stage", [2, 3])
def test_assigned_data_of_a_sharded_parameter(stage: int) -> None:
    with pytest.raises(
        worlds.RankError, match=r"the script has assigned the \.data of 0\.weight, whose rows are sharded"
    ):
        worlds.run_within(5.0, 2, assigned, strategy=f"sharded:stage={stage}")
    worlds.run(2, assigned, strategy="mirrored")
