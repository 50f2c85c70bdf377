"""A gradient whose elements are finite is applied, though its norm overflows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.parallel.normalisation import clipped

LARGE = 1e160
"""Its square is no finite float64."""


def train(strategy: str) -> tuple[int, float, list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    inputs = torch.randn(16, 4, dtype=torch.float64)

    def loss(model: Any, batch: Any) -> Tensor:
        return LARGE * model(batch[0]).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / LARGE)
    run = tutti.prepare(
        model, optimizer, TensorDataset(inputs), loss, strategy=strategy, workers=2, batch_size=8, max_nonfinite=3
    )
    norms = []
    for batch in run.epoch(0):
        run.step(batch)
        norms.append(run.stats.grad_norm)
    return run.updates, max(norms), torch.cat([tensor.flatten() for tensor in run.state().values()]).tolist()


@pytest.mark.parametrize(
    "strategy", ["mirrored", "sharded", "sharded:stage=1", "central_storage", "parameter_server", "local_sgd:post=2"]
)
def test_elements_decide_where_the_norm_overflows(strategy: str) -> None:
    updates, _, want = worlds.alone(train, strategy="mirrored")
    assert updates == 2
    for updates, norm, got in worlds.run(2, train, strategy=strategy):
        assert updates == 2 and norm == math.inf
        assert got == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("norm", [0.5, 1 - 1.1e-6, 1 - 0.9e-6, 1.0, 1 + 1e-9, 3.0, 0.0, math.nan])
def test_norms_just_below_the_limit_are_clipped_as_in_pytorch(norm: float) -> None:
    """A script that has clipped its gradient to the limit itself leaves a norm less than 1e-6 below it."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.full_like(parameter, norm)
    before = float(nn.utils.clip_grad_norm_([parameter], 1.0))
    factor, after = clipped(before, 1.0)
    want = float(parameter.grad)
    assert [norm * factor, after] == pytest.approx([want, want], rel=1e-12, nan_ok=True)
