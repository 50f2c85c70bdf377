"""Rules of the learning rate and of noise: published numbers, limits and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tutti.optim import learning_rate as rules
from tutti.optim import noise_formulas


def moments(sum_of_squares: float, square_of_mean: float, workers: int) -> tuple[float, float]:
    """σ² and μ² as Johnson et al. 2020, App. B.3, write them, for equal shares."""
    variance = (sum_of_squares - workers * square_of_mean) / (workers - 1)
    return variance, square_of_mean - variance / workers


def test_adam_keeps_the_samples_that_its_moments_remember() -> None:
    factor, beta1, beta2, eps = rules.adam_sqrt_scaling(16, 0.99, 0.999, 1e-8)
    assert (factor, eps) == (4.0, 2.5e-9)
    assert 1 - beta1 == pytest.approx(16 * 0.01) and 1 - beta2 == pytest.approx(16 * 0.001)
    with pytest.raises(ValueError, match="below 1"):
        rules.adam_sqrt_scaling(11, 0.9, 0.999, 1e-8)


@given(some.integers(1, 500), some.floats(0.01, 1.0))
def test_warm_up_rises_in_equal_steps_to_one(length: int, start: float) -> None:
    values = [rules.gradual(i, length, start) for i in range(length + 1)]
    assert values[0] == start and values[-1] == pytest.approx(1.0)
    assert values == sorted(values)


@given(some.lists(some.floats(-10, 10), min_size=2, max_size=8))
def test_the_gain_lies_between_one_and_the_workers(gradients: list[float]) -> None:
    workers = len(gradients)
    mean = sum(gradients) / workers
    variance, square = moments(sum(g * g for g in gradients), mean * mean, workers)
    direct = sum((g - mean) ** 2 for g in gradients) / (workers - 1)
    assert variance == pytest.approx(direct, abs=1e-9)
    assert 1 - 1e-9 <= noise_formulas.adascale_gain(variance, square, workers) <= workers + 1e-9


@given(some.lists(some.floats(-10, 10), min_size=2, max_size=8))
def test_equal_shares_have_the_moments_of_the_paper(gradients: list[float]) -> None:
    count, square = len(gradients), (sum(gradients) / len(gradients)) ** 2
    squares = sum(g * g for g in gradients)
    want = moments(squares, square, count)
    assert noise_formulas.weighted_moments(squares / count, square, count, count) == pytest.approx(want, abs=1e-9)


def test_unequal_shares_leave_the_estimates_unbiased() -> None:
    """Seven samples of variance 9 around 2, in shares of 3, 2, 2; σ² of the gradient over 3 of them is 3."""
    draws = np.random.default_rng(0).normal(2.0, 3.0, (200_000, 7))
    parts = np.array([3, 2, 2]) / 7
    means = np.add.reduceat(draws, [0, 3, 5], axis=1) / [3, 2, 2]
    pairs = zip(means**2 @ parts, draws.mean(axis=1) ** 2, strict=True)
    found = np.mean([noise_formulas.weighted_moments(a, b, 3, 7 / 3) for a, b in pairs], axis=0)
    assert found == pytest.approx([3.0, 4.0], abs=0.05)


def test_the_simple_noise_scale_is_that_of_the_workers_variance() -> None:
    """Workers of 32 samples with the gradients (1,0), (3,0), (2,1), (2,-1)."""
    variance, square = noise_formulas.weighted_moments(5.0, 4.0, 4, 4)
    assert (variance, square) == pytest.approx((4 / 3, 11 / 3))
    assert noise_formulas.simple_noise_scale(32 * variance, square) == pytest.approx(11.636364)
    assert (
        noise_formulas.simple_noise_scale(1.0, -1.0) == math.inf and noise_formulas.simple_noise_scale(-1.0, 1.0) == 0.0
    )


def test_a_ratio_of_averages_is_no_average_of_ratios() -> None:
    both, ratios = noise_formulas.Averages(0.9), noise_formulas.Averages(0.9)
    for spread, square in ((40, 4.0), (60, 1.0), (20, 0.5)):
        both.add(spread, square)
        ratios.add(spread / square, 1.0)
    assert both.first / both.second == pytest.approx(22.931034)
    assert ratios.first == pytest.approx(37.675277) and ratios.second == pytest.approx(1.0), "debiased"


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="one worker"):
        noise_formulas.weighted_moments(1.0, 1.0, 1, 1.0)
    assert noise_formulas.adascale_gain(0.0, 0.0, 4) == 1.0
    assert noise_formulas.adascale_gain(1.0, -1.0, 4) == 4.0
