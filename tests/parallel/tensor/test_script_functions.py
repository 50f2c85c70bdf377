"""Autograd functions and ``torch.compile`` that a script puts around split layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tutti.errors import UsageError

DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return -0.5 * slope


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs * 2.0

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * 2.0


def trained(strategy: str, applied: Any, compiled: bool) -> Any:
    """Train with a function between two layers that the loss calls, or with the model compiled by the script."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model: Any = torch.compile(plain, backend="eager") if compiled else plain
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)

    def loss(called: Any, batch: Tensor) -> Tensor:
        outputs = called(batch) if applied is None else called[2](applied.apply(called[1](called[0](batch))))
        squares: Tensor = outputs.square().mean()
        return squares

    run = tutti.prepare(model, optimizer, DATA, loss, strategy=strategy, workers=1, batch_size=8)
    try:
        for batch in run.epoch(0):
            run.step(batch)
    except UsageError as error:
        return run.updates, str(error)
    return {name.removeprefix("_orig_mod."): value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize("function", [Viewed, Scaled])
def test_a_function_of_the_output_of_a_split_layer_is_refused_by_name(function: Callable[..., Any]) -> None:
    for updates, said in worlds.run(2, trained, strategy="tensor:least=1", applied=function, compiled=False):
        assert updates == 0 and f"({function.__name__}.apply)" in said, said
        assert "test_script_functions.py:" in said and "strategy='tensor:whole=0'" in said


def test_a_model_that_the_script_has_compiled_equals_one_device() -> None:
    want = worlds.alone(trained, strategy="single", applied=None, compiled=False)
    for got in worlds.run(2, trained, strategy="tensor:least=1", applied=None, compiled=True):
        assert largest_difference(got, want) <= 1e-10
