"""The loss scale: the rule of ``torch.amp.GradScaler``, its bounds, and what a run may be told."""

from __future__ import annotations

import random

import pytest
import torch

from tutti.config.loss_scale_config import ConstantLossScale, DynamicLossScale, check_loss_scale, choose_loss_scale
from tutti.errors import UsageError
from tutti.optim.loss_scale import LossScale

FASTEST = "dynamic:growth_interval=3"


@pytest.mark.parametrize("seed", range(3))
def test_rises_and_falls_as_pytorchs_own(seed: int) -> None:
    draw = random.Random(seed)
    ours = LossScale(check_loss_scale(FASTEST))
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    for _ in range(60):
        finite = draw.random() < 0.8
        theirs.scale(weight.sum() if finite else weight.sum() * torch.inf).backward()
        assert weight.grad is not None and float(weight.grad) == (ours.value if finite else torch.inf)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(finite)
        assert (ours.value, ours.good_steps) == (theirs.get_scale(), theirs._get_growth_tracker())


def test_has_a_floor_and_a_ceiling() -> None:
    scale = LossScale(check_loss_scale("dynamic:init=4,min=2,max=8,growth_interval=1"))
    found = []
    for finite in (False, False, True, True, True):
        can_fall = scale.can_fall
        scale.update(finite)
        found.append((can_fall, scale.used, scale.value))
    assert found == [(True, 4, 2), (False, 2, 2), (False, 2, 4), (True, 4, 8), (True, 8, 8)]


def test_continues_where_it_was_saved() -> None:
    scale, other = (LossScale(check_loss_scale(text)) for text in (FASTEST, "dynamic:init=8,growth_interval=3"))
    for finite in (False, True, True):
        scale.update(finite)
    other.load(scale.state())
    for finite in (True, True, False, True):
        scale.update(finite)
        other.update(finite)
        assert other.state() == scale.state()
    stated = LossScale(ConstantLossScale(512.0))
    stated.load(scale.state())
    stated.update(False)
    assert (stated.value, stated.can_fall) == (512.0, False)


def test_is_there_for_float16_alone() -> None:
    assert [choose_loss_scale(None, precision) for precision in (None, "fp32", "bf16", "fp64")] == [None] * 4
    assert choose_loss_scale(None, "fp16") == DynamicLossScale(init=65536.0)
    assert choose_loss_scale("128", None) == ConstantLossScale(128.0)


WRONG = {
    "0": "--loss-scale is 0",
    "nan": "--loss-scale is nan",
    "dynamc": "Did you mean 'dynamic'",
    "dynamic:int=3": "Did you mean 'init'",
    "dynamic:init=0.5": "min ≤ init",
    "dynamic:backoff_factor=1": "backoff_factor is 1",
    "dynamic:growth_factor=0.5": "growth_factor is 0.5",
    "dynamic:growth_interval=0": "growth_interval is 0",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_loss_scale(text, "fp16")
    assert WRONG[text] in str(caught.value)


def test_a_precision_that_needs_none_is_refused() -> None:
    with pytest.raises(UsageError, match="does nothing for bf16"):
        choose_loss_scale("dynamic", "bf16")
