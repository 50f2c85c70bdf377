"""Reading totals and squared norms together changes no bit, and a norm that was read early is never a stale one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tutti.parallel.ddp.gradient_arithmetic import read_with_squares, squares_of
from tutti.parallel.ddp.reducers import OverlappedReducer
from tutti.types.step_records import StepContext


@pytest.mark.parametrize("dtypes", [(), ("float32",), ("float32", "float64"), ("bfloat16", "float32")])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_numbers_and_squares_are_read_as_they_are_apart(dtypes: tuple[str, ...], wide: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.rand(7, generator=draw, dtype=wide)
    tensors = [torch.randn(5, 3, generator=draw).to(getattr(torch, name)) for name in dtypes]
    assert read_with_squares(numbers, tensors) == (numbers.tolist(), squares_of(tensors))


def reducer(parameter: nn.Parameter) -> OverlappedReducer:
    alone: Any = SimpleNamespace(comms=SimpleNamespace(replica=SimpleNamespace(size=1, device=torch.device("cpu"))))
    return OverlappedReducer([("weight", parameter)], alone, "fp32", 1)


@pytest.mark.parametrize("change", ["nothing", "scaled", "replaced", "loss scale", "no samples"])
def test_squares_are_those_of_the_gradients_as_they_are(change: str) -> None:
    weight = nn.Parameter(torch.zeros(3))
    made, totals = reducer(weight), torch.tensor([4.0, 2.0], dtype=torch.float64)
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    made.finish(StepContext(0, 2), totals)
    if change == "scaled":
        made.scale(0.5)
    elif change == "replaced":
        weight.grad = torch.ones(3)
    elif change in ("loss scale", "no samples"):
        # The next step, whose norm is not read early.
        weight.grad.fill_(2.0)
        scale = 8.0 if change == "loss scale" else 1.0
        made.finish(StepContext(1, 2, loss_scale=scale), None if change == "no samples" else totals)
    assert made.squares() == squares_of([weight.grad])
