"""The noise of a gradient, and what a batch does to it."""

from __future__ import annotations

import math


def multiplicative_sigma(batch: int, base: int) -> float:
    """σ = √(M/M₀ - 1): standard deviation of z ~ N(1, σ²) that gives a batch of M the noise of one of M₀.

    The gradient is (1/M) Σ gₙ zₙ (Hoffer et al. 2017, arXiv 1705.08741, §4).

    >>> round(multiplicative_sigma(1024, 128), 9)
    2.645751311
    """
    if batch < base:
        raise ValueError(f"a batch of {batch} has more noise than one of {base}: there is none to add")
    return math.sqrt(batch / base - 1)


def scale_of_sgd(lr: float, dataset: int, batch: int, momentum: float = 0.0) -> float:
    """ε (N/B - 1) / (1 - m): the noise scale of stochastic gradient descent.

    Smith, Kindermans, Ying, Le 2018, arXiv 1711.00489: dividing the rate by f and multiplying the batch by f change it
    alike.

    >>> round(scale_of_sgd(0.1, 50_000, 128, 0.9), 3)
    389.625
    """
    return lr * (dataset / batch - 1) / (1 - momentum)


def moments(sum_of_squares: float, square_of_mean: float, workers: int) -> tuple[float, float]:
    """Unbiased (σ², μ²) of one worker's gradient from S workers' gradients g and their mean ḡ.

    σ² = Σ‖g‖²/(S-1) - S‖ḡ‖²/(S-1);  μ² = ‖ḡ‖² - σ²/S (Johnson et al. 2020, arXiv 2007.05105, App. B.3). Either may
    come out negative: average over steps first, clamp when reading.

    Args:
        sum_of_squares: Σ‖g‖² over the workers.
        square_of_mean: ‖ḡ‖².
        workers: S, at least 2.

    >>> [round(value, 6) for value in moments(20.0, 4.0, 4)]
    [1.333333, 3.666667]
    """
    if workers < 2:
        raise ValueError("one worker's gradient says nothing about the variance over workers")
    variance = (sum_of_squares - workers * square_of_mean) / (workers - 1)
    return variance, square_of_mean - variance / workers


def adascale_gain(variance: float, square: float, workers: int) -> float:
    """r = (σ² + μ²) / (σ²/S + μ²), from 1 (no noise) to S (nothing but noise).

    Johnson et al. 2020, arXiv 2007.05105, Alg. 1: a step on S workers is worth r steps on one.

    >>> round(adascale_gain(4 / 3, 11 / 3, 4), 9)
    1.25
    """
    variance, square = max(variance, 0.0), max(square, 0.0)
    below = variance / workers + square
    return (variance + square) / below if below > 0 else 1.0
