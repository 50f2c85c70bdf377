"""Rules of the learning rate and of noise: published numbers, limits and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tutti.laws import learning_rate as rules
from tutti.laws import noise


def test_adam_keeps_the_samples_that_its_moments_remember() -> None:
    factor, beta1, beta2, eps = rules.adam_sqrt(16, 0.99, 0.999, 1e-8)
    assert (factor, eps) == (4.0, 2.5e-9)
    assert 1 - beta1 == pytest.approx(16 * 0.01) and 1 - beta2 == pytest.approx(16 * 0.001)
    with pytest.raises(ValueError, match="below 1"):
        rules.adam_sqrt(11, 0.9, 0.999, 1e-8)


@given(some.integers(1, 500), some.floats(0.01, 1.0))
def test_warm_up_rises_in_equal_steps_to_one(length: int, start: float) -> None:
    values = [rules.gradual(i, length, start) for i in range(length + 1)]
    assert values[0] == start and values[-1] == pytest.approx(1.0)
    assert values == sorted(values)


@given(some.lists(some.floats(-10, 10), min_size=2, max_size=8))
def test_the_gain_lies_between_one_and_the_workers(gradients: list[float]) -> None:
    workers = len(gradients)
    mean = sum(gradients) / workers
    variance, square = noise.moments(sum(g * g for g in gradients), mean * mean, workers)
    direct = sum((g - mean) ** 2 for g in gradients) / (workers - 1)
    assert variance == pytest.approx(direct, abs=1e-9)
    assert 1 - 1e-9 <= noise.adascale_gain(variance, square, workers) <= workers + 1e-9


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="one worker"):
        noise.moments(1.0, 1.0, 1)
    with pytest.raises(ValueError, match="none to add"):
        noise.multiplicative_sigma(64, 128)
    assert noise.multiplicative_sigma(128, 128) == 0.0
    assert noise.adascale_gain(0.0, 0.0, 4) == 1.0
    assert noise.adascale_gain(1.0, -1.0, 4) == 4.0
