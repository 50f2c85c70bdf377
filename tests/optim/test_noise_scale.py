"""The simple noise scale: worked numbers, its band against the truth, and per-example gradients as the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tutti.optim.noise_scale import NoiseAverage, NoiseEstimate, mean_noise, noise_estimate, ratio_band, student_t


def test_the_worked_example_of_the_appendix() -> None:
    trace, square = noise_estimate(5.0, 4.0, 4, 128)
    assert (trace, square) == pytest.approx((42.666667, 3.666667), rel=1e-6)
    assert trace / square == pytest.approx(11.636364, rel=1e-6)
    # As with two batch sizes, 32 and 128.
    assert square == pytest.approx((128 * 4 - 32 * 5) / (128 - 32))
    assert trace == pytest.approx((5 - 4) / (1 / 32 - 1 / 128))


def test_averages_are_divided_and_not_ratios_averaged() -> None:
    average = NoiseAverage(0.9)
    for trace, square in ((40, 4), (60, 1), (20, 0.5)):
        average.add(NoiseEstimate(trace, square))
    assert average.band().scale == pytest.approx(22.931034, rel=1e-6)


def test_quantiles_of_students_t() -> None:
    for freedom, want in ((3, 2.353363), (5, 2.015048), (10, 1.812461), (30, 1.697261), (100, 1.660234)):
        assert student_t(freedom) == pytest.approx(want, rel=0.01)


def test_a_ratio_whose_denominator_may_be_zero_has_no_upper_end() -> None:
    low, high = ratio_band((10.0, 0.1), (0.01, 0.0, 1.0), 50)
    assert high == math.inf and 0 < low < 10
    low, high = ratio_band((10.0, 5.0), (0.01, 0.0, 0.01), 50)
    assert 1.9 < low < 2.0 < high < 2.1
    assert ratio_band((1.0, -5.0), (0.01, 0.0, 0.01), 50)[1] == math.inf


def test_few_or_unusable_estimates() -> None:
    average = NoiseAverage(0.95)
    with pytest.raises(ValueError, match="no step"):
        average.band()
    average.add(NoiseEstimate(math.inf, 1.0))
    assert not average.weight
    for _ in range(3):
        average.add(NoiseEstimate(2.0, 1.0))
    assert average.band() == (2.0, 0.0, math.inf)
    mean = mean_noise([NoiseEstimate(-1.0, -1.0)] * 5)
    assert mean.band().scale == math.inf


def test_the_state_goes_through_a_checkpoint() -> None:
    first, second = NoiseAverage(0.9), NoiseAverage(0.9)
    for step in range(9):
        first.add(NoiseEstimate(step + 1.0, 2.0 + step % 3))
    second.load(first.state())
    assert second == first and second.band() == first.band()
    for wrong in ({}, {**first.state(), "sums": [1.0]}, {**first.state(), "weight": -1.0}):
        with pytest.raises((KeyError, ValueError)):
            second.load(wrong)


def per_example(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """Gradients of a logistic regression, one row an example."""

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-y * (x @ w))

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, inputs, targets)


def test_the_truth_of_per_example_gradients_is_in_nine_of_ten_bands() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, 6, generator=generator, dtype=torch.float64)
    targets = torch.sign(inputs @ torch.ones(6, dtype=torch.float64) + torch.randn(4000, generator=generator)).double()
    gradients = per_example(torch.zeros(6, dtype=torch.float64), inputs, targets).numpy()
    mean = gradients.mean(0)
    truth = ((gradients - mean) ** 2).sum(1).mean() / (mean**2).sum()
    generator_of_draws, inside, draws = np.random.default_rng(0), 0, 400
    for _ in range(draws):
        rows = generator_of_draws.integers(0, len(gradients), size=(24, 4, 3))
        parts = gradients[rows].mean(2)
        band = mean_noise(
            noise_estimate((each**2).sum(1).mean(), (each.mean(0) ** 2).sum(), 4, 12) for each in parts
        ).band()
        assert band.low <= band.scale <= band.high
        inside += band.low <= truth <= band.high
    # 90 % ± 3 standard deviations of 400 draws.
    assert abs(inside - 0.9 * draws) <= 3 * math.sqrt(0.09 * draws), inside
