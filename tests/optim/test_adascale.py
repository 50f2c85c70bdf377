"""AdaScale's gain from what ranks agree on: worked numbers, averages, uneven shares, what leaves it alone."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tutti.optim.adascale import AdaScale
from tutti.optim.noise_formulas import adascale_gain
from tutti.types.step_records import GradientVariance, StepContext, StepStats


def agreed(mean_of_squares: float, square_of_mean: float, workers: int, finite: bool = True) -> StepStats:
    spread = GradientVariance(mean_of_squares, workers)
    return StepStats(1.0, 1.0, {}, math.sqrt(square_of_mean), finite, gradient_variance=spread)


def test_the_worked_example() -> None:
    """Gradients (1,0), (3,0), (2,1), (2,-1) of four workers with 32 samples each."""
    ada = AdaScale(128, 4)
    for steps, factor in ((1, None), (2, 0.5)):
        step_context = ada(agreed(5.0, 4.0, 4), StepContext(0, 128, factor))
        assert ada.gain == pytest.approx(1.25) and ada.tau == pytest.approx(1.25 * steps)
        assert step_context.lr_factor == pytest.approx(1.25 * (factor or 1.0))
    assert ada.values() == pytest.approx({"gain": 1.25, "tau": 2.5, "noise_scale": 11.636364})


def test_estimates_are_averaged_then_divided_then_clamped() -> None:
    """A step whose σ² or μ² is negative counts as it is; clamping each would bias the mean upward."""
    ada, theta = AdaScale(8, 4), 1 - 4 / 1000
    variance = square = weight = 0.0
    for mean_of_squares, square_of_mean in ((5.0, 4.0), (3.0, 0.5), (2.0, 2.1), (9.0, 0.1)):
        ada(agreed(mean_of_squares, square_of_mean, 4), StepContext(0, 8))
        between = (mean_of_squares - square_of_mean) / 3
        variance = theta * variance + (1 - theta) * 4 * between
        square = theta * square + (1 - theta) * (square_of_mean - between)
        weight = theta * weight + 1 - theta
        assert ada.gain == pytest.approx(adascale_gain(variance / weight, square / weight, 4))


def test_many_workers_are_not_averaged() -> None:
    ada = AdaScale(4000, 2000)
    for mean_of_squares in (5.0, 50.0):
        ada(agreed(mean_of_squares, 4.0, 2000), StepContext(0, 4000))
    alone = AdaScale(4000, 2000)
    alone(agreed(50.0, 4.0, 2000), StepContext(0, 4000))
    assert ada.gain == alone.gain


def test_a_smaller_batch_gains_less() -> None:
    """Nothing but noise: a batch is worth as many of the base's as it has samples of it, less than one included."""
    ada = AdaScale(128, 4)
    for samples, workers in ((128, 4), (64, 4), (16, 4), (2, 2)):
        ada(agreed(1.0, 0.0, workers), StepContext(0, samples))
        assert ada.gain == pytest.approx(samples / 32)


def test_what_leaves_the_averages_alone() -> None:
    ada = AdaScale(128, 4)
    ada(agreed(5.0, 4.0, 4), StepContext(0, 128))
    before = ada.state()
    step_context = StepContext(1, 128, 0.5)
    assert ada(agreed(7.0, 1.0, 4, finite=False), step_context) is step_context
    assert ada.state() == before and ada.gain is None and "gain" not in ada.values()
    ada(agreed(math.inf, 4.0, 4), step_context)
    assert ada.gain == pytest.approx(1.25), "only the squares overflowed"
    ada(agreed(7.0, 1.0, 1), StepContext(2, 1))
    assert ada.state() == before | {"tau": ada.tau}, "one worker alone had samples"
    early = AdaScale(128, 4)
    early(agreed(7.0, 1.0, 1), StepContext(0, 8))
    assert early.gain == 0.25 and "noise_scale" not in early.values()


def test_a_saved_state_goes_on_to_the_same_bits() -> None:
    whole, first, second = (AdaScale(100, 3) for _ in range(3))
    steps: list[Any] = [(agreed(5.0 + i / 7, 4.0 - i / 3, 3), StepContext(i, 100)) for i in range(6)]
    for number, step in enumerate(steps):
        whole(*step)
        if number == 3:
            second.load(json.loads(json.dumps(first.state())))
        (first if number < 3 else second)(*step)
    assert second.state() == whole.state() and second.gain == whole.gain
    for wrong in ({}, {**whole.state(), "tau": math.nan}, {**whole.state(), "weight": 2.0}):
        with pytest.raises((KeyError, ValueError)):
            second.load(wrong)
