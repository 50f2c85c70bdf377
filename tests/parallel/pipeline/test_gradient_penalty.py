"""A penalty on gradients of the inputs, whose gradient goes through split layers twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference

DRAW = torch.Generator().manual_seed(7)
INPUTS = torch.randn(16, 5, 8, generator=DRAW, dtype=torch.float64)
CLASSES = torch.randint(0, 7, (16, 5), generator=DRAW)


class Block(nn.Module):
    """x + feed-forward(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 14), nn.Tanh(), nn.Linear(14, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))  # type: ignore[no-any-return]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 7)).double()


def penalised(net: Any, batch: Any) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    error = functional.cross_entropy(net(inputs).flatten(0, 1), batch[1].flatten())
    if not error.requires_grad:
        return error
    [slope] = torch.autograd.grad(error, [inputs], create_graph=True)
    return error + 100 * slope.square().sum() / len(inputs) * 8


def train(strategy: str, plain: bool = False) -> Any:
    """The state after a few steps, or the refusal."""

    def loss(net: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())

    data = TensorDataset(INPUTS, CLASSES)
    net = model()
    run = tutti.prepare(
        net, "sgd:lr=0.5", data, loss if plain else penalised, strategy=strategy, workers=1, batch_size=8
    )
    said = [run.step(batch) for batch in run.epoch(0)]
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, said, dict(run.replica.summary)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["tensor:least=1", "tensor:least=1,sequence=true"])
def test_a_gradient_penalty_is_that_of_one_device(strategy: str, size: int) -> None:
    want, told, _ = worlds.alone(train, strategy="single")
    without, _, _ = worlds.alone(train, strategy="single", plain=True)
    assert largest_difference(want, without) > 1e-3
    for state, said, _ in worlds.run(size, train, strategy=strategy):
        assert said == pytest.approx(told, rel=1e-9)
        assert largest_difference(state, want) < 1e-10
