"""The plateau schedule's factor is PyTorch's, value by value, and continues from its state."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tutti.config.optimizer_config import PlateauSchedule, check_schedule
from tutti.errors import UsageError
from tutti.optim.plateau import Plateau

OPTIONS = [
    "patience=2",
    "patience=0,factor=0.5,threshold=0.1",
    "patience=1,cooldown=3,factor=0.3",
    "patience=1,mode=max,threshold=0.2,threshold_mode=abs",
    "patience=0,mode=max,threshold=0.05,min=0.02",
    "patience=1,threshold=0.3,threshold_mode=abs,cooldown=1,min=0.3",
    "patience=0,factor=0,min=2",
    "patience=0,factor=0.5,threshold=0.1,eps=0.03",
    "patience=1,factor=0.5,min=0.1,eps=0.2",
]


def made(options: str) -> Plateau:
    config = check_schedule(f"plateau:{options}")
    assert isinstance(config, PlateauSchedule)
    return Plateau(config, config.measured())


@pytest.mark.parametrize("options", OPTIONS)
def test_factors_are_those_of_pytorch(options: str) -> None:
    draw = random.Random(options)
    values = [draw.uniform(0.5, 1.5) + 2 / (1 + number) for number in range(40)]
    values[7] = math.nan
    config = check_schedule(f"plateau:{options}")
    assert isinstance(config, PlateauSchedule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ReduceLROnPlateau(
        optimizer,
        mode="max" if config.mode == "max" else "min",
        factor=config.factor,
        patience=config.patience,
        threshold=config.threshold,
        threshold_mode=config.threshold_mode,
        cooldown=config.cooldown,
        min_lr=config.min,
        eps=config.eps,
    )
    plateau, reductions = made(options), 0
    for value in values:
        scheduler.step(value)
        reductions += plateau.evaluated(value)
        assert plateau.factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        # As a checkpoint would continue it.
        again = made(options)
        assert again.load(json.loads(json.dumps(plateau.state(), allow_nan=False)))
        plateau = again
    assert (reductions > 0) == (config.min < 1)


def test_the_state_of_another_metric_is_left() -> None:
    accuracy = made("metric=accuracy,patience=0")
    for value in (0.5, 0.5, 0.4):
        accuracy.evaluated(value)
    loss = made("patience=0")
    assert not loss.load(accuracy.state()) and loss.factor == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plateau:factor=1", "factor multiplies the rate"),
        ("plateau:patience=-1", "patience is -1"),
        ("plateau:mode=lower", "'lower' is not possible"),
        ("plateau:metrik=loss", "Did you mean 'metric'"),
    ],
)
def test_options_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_schedule(text)


def test_a_metric_without_a_direction_is_refused() -> None:
    with pytest.raises(UsageError, match="whether a lower or a higher 'distance' is better"):
        made("metric=distance")
    assert check_schedule("plateau:metric=distance").measured({"distance": "lower"}).higher is False  # type: ignore[attr-defined]
