"""A velocity that holds the rate follows it: Goyal et al. 2017, §3, remark 2, in LARS."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim.problems import gradients, parameters
from tutti.checkpoint.state_shards import load_optimizer, optimizer_tensors
from tutti.errors import UsageError
from tutti.native import compiled_passes
from tutti.optim import LARS

compiled = pytest.mark.skipif(compiled_passes.load_kernels() is None, reason="there is no C++ compiler")
FUSED = [pytest.param(None, id="compiled", marks=compiled), pytest.param(False, id="foreach")]
RATES = [0.1, 0.2, 0.2, 3.0, 0.05, 1.0]
OPTIONS = {"weight_decay": 0.01, "trust": 0.1}


def fed(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    """Steps of a run whose rate changes."""
    for number, grads in enumerate(gradients(params, len(RATES))):
        if number in steps:
            optimizer.param_groups[0]["lr"] = RATES[number]
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()


@pytest.mark.parametrize(("corrected", "velocity"), [(True, 2.0), (False, 1.1)])
@pytest.mark.parametrize("fused", FUSED)
def test_the_worked_example(fused: bool | None, corrected: bool, velocity: float) -> None:
    """A velocity of 1 at the rate 0.1, momentum 0.9; then the rate 0.2 and a gradient of 1."""
    param = nn.Parameter(torch.tensor([10.0], dtype=torch.float64))
    optimizer = LARS([param], lr=0.1, momentum_correction=corrected, fused=fused)
    seen = [10.0]
    for rate, gradient in ((0.1, 10.0), (0.2, 1.0)):
        optimizer.param_groups[0]["lr"] = rate
        param.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        seen.append(param.item())
    assert seen[0] - seen[1] == pytest.approx(1.0) and seen[1] - seen[2] == pytest.approx(velocity)


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"denominator": "norm_of_sum"}])
@pytest.mark.parametrize("fused", FUSED)
def test_the_steps_are_those_of_a_rate_outside(fused: bool | None, options: dict[str, Any]) -> None:
    found = []
    for own in ({"momentum_correction": True}, {"lr_in_momentum": False}, {}):
        params = parameters()
        fed(LARS(params, fused=fused, **OPTIONS, **options, **own), params, range(len(RATES)))
        found.append([p.detach() for p in params])
    pairs = [[float((a - b).abs().max()) for a, b in zip(f, found[1], strict=True) if a.numel()] for f in found]
    assert max(pairs[0]) <= 1e-12 < 1e-3 < max(pairs[2])


class Kept:
    """A checkpoint as exchanges read it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self, group: str) -> list[str]:
        return list(self._tensors)

    def get(self, group: str, name: str) -> Tensor:
        return self._tensors[name]


@pytest.mark.parametrize("way", ["state_dict", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rate_before_is_part_of_the_saved_state(way: str, dtype: torch.dtype) -> None:
    options = {**OPTIONS, "momentum_correction": True}
    whole = parameters(dtype)
    fed(LARS(whole, **options), whole, range(len(RATES)))
    first = parameters(dtype)
    half = LARS(first, **options)
    fed(half, first, range(3))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = LARS(second, **options)
    if way == "state_dict":
        resumed.load_state_dict(copy.deepcopy(half.state_dict()))
    else:
        named = [(str(i), p) for i, p in enumerate(first)]
        kept = Kept(optimizer_tensors(half, named))
        load_optimizer(resumed, [(str(i), p) for i, p in enumerate(second)], kept, "optim")
    fed(resumed, second, range(3, len(RATES)))
    assert all(torch.equal(a, b) for a, b in zip(second, whole, strict=True))


@pytest.mark.parametrize("options", [{"lr_in_momentum": False}, {"momentum": 0.0}])
def test_it_is_refused_where_no_rate_is_in_the_velocity(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="nothing for momentum_correction to correct"):
        LARS(parameters(), momentum_correction=True, **options)
