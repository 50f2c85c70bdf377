"""What Horovod's Keras callbacks do, in PyTorch loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tutti.horovod.torch as hvd
from tests.horovod.test_horovod_torch import with_horovod
from tests.worlds import run


def averages() -> list[Any]:
    rank = hvd.rank()
    found = hvd.average_metrics({"loss": float(rank), "accuracy": torch.tensor(2.0 * rank)})
    try:
        hvd.average_metrics({"loss": 1.0} if rank else {"error": 1.0})
    except hvd.HorovodInternalError as error:
        return [list(found.items()), hvd.average_metrics({}), str(error)]
    return []


def test_metrics_are_averaged_by_name() -> None:
    for items, empty, text in run(2, with_horovod, inside=averages):
        assert items == [("loss", 0.5), ("accuracy", 1.0)] and empty == {}
        assert "rank 0 called allreduce 'allreduce.metrics.error'" in text
        assert "rank 1 called allreduce 'allreduce.metrics.loss'" in text


def rates(**options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1 * hvd.size())
    scheduler = hvd.learning_rate_schedule(optimizer, 4, **options)
    found = []
    for _ in range(12):
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


def test_the_rate_warms_up_to_that_of_all_ranks_and_follows_the_schedule() -> None:
    expected = [0.1, 0.125, 0.15, 0.175, *[0.2] * 4, *[0.1] * 4]
    for found in run(2, with_horovod, inside=halved):
        assert found == pytest.approx(expected)


def halved() -> list[float]:
    return rates(warmup_epochs=1, multiplier=lambda epoch: 0.5 ** (epoch // 2))


def smooth() -> list[float]:
    with pytest.raises(ValueError, match="steps_per_epoch is 0"):
        hvd.learning_rate_schedule(torch.optim.SGD([torch.zeros(1)], lr=1.0), 0)
    return rates(warmup_epochs=0, multiplier=lambda epoch: 1 / (1 + epoch), staircase=False)


def test_a_schedule_follows_fractions_of_epochs() -> None:
    assert run(1, with_horovod, inside=smooth) == [pytest.approx([0.1 / (1 + step / 4) for step in range(12)])]


def test_sgd_needs_no_momentum_correction() -> None:
    rates, momentum, gradients = [0.1, 0.3, 0.3, 0.05], 0.9, [1.0, -2.0, 0.5, 3.0]
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    velocity, expected, before = 0.0, 0.0, rates[0]
    for rate, gradient in zip(rates, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        # A velocity that contains the learning rate, with corrected momentum.
        velocity = momentum * rate / before * velocity + rate * gradient
        expected -= velocity
        before = rate
    assert weight.item() == pytest.approx(expected)
