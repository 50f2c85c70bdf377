"""Formulas of gradient noise and its dependence on the batch size."""

from __future__ import annotations

import math


def weighted_moments(
    mean_of_squares: float, square_of_mean: float, gradients: int, shares: float
) -> tuple[float, float]:
    """Return unbiased estimates (σ², μ²) of variance and squared norm of the true gradient, from a batch's parts.

    The A parts have unequal numbers of samples nᵢ, M in total, and gradients gᵢ. With pᵢ = nᵢ/M and ḡ = Σ pᵢgᵢ, the
    expectation of D = Σ pᵢ‖gᵢ‖² - ‖ḡ‖² is (A-1)·tr Σ/M. So σ² = S·D/(A-1) estimates the variance of a gradient over
    M/S samples, one of S equal shares of the batch, and μ² = ‖ḡ‖² - D/(A-1) the squared norm.

    Args:
        mean_of_squares: Σ pᵢ‖gᵢ‖², the weighted mean of the squared norms.
        square_of_mean: ‖ḡ‖², the squared norm of the mean gradient.
        gradients: A, the number of parts with a gradient, at least 2.
        shares: S, the number of equal shares of the batch; σ² is the variance of the gradient of one share.

    Raises:
        ValueError: ``gradients`` is below 2.

    >>> [round(value, 6) for value in weighted_moments(5.0, 4.0, 4, 4)]
    [1.333333, 3.666667]
    """
    if gradients < 2:
        raise ValueError("one worker's gradient says nothing about the variance over workers")
    variance = (mean_of_squares - square_of_mean) / (gradients - 1)
    return shares * variance, square_of_mean - variance


def simple_noise_scale(spread: float, square: float) -> float:
    """Return B_simple = tr Σ / |G|² in samples; infinite if the estimate of |G|² is not positive.

    McCandlish et al. 2018, arXiv 1812.06162, eq. 2.9.

    Args:
        spread: average of tr Σ, the trace of the covariance of one sample's gradient; a negative one counts as 0.
        square: average of |G|², the squared norm of the true gradient.

    >>> round(simple_noise_scale(42.666667, 3.666667), 4)
    11.6364
    """
    return max(spread, 0.0) / square if square > 0 else math.inf


class Averages:
    """Debiased exponential averages of two estimates: x̄ ← θx̄ + (1-θ)x from 0, divided by 1 - θᵗ when read.

    For a ratio of estimates, average each and then divide: a mean of ratios is biased.

    Args:
        theta: θ, the weight that earlier values keep at each ``add``; below 1.

    Attributes:
        sums: the two averages before they are debiased.
        weight: 1 - θᵗ after t values, by which the sums are divided; 0 before the first.

    >>> both = Averages(0.9)
    >>> for spread, square in ((40, 4), (60, 1), (20, 0.5)):
    ...     both.add(spread, square)
    >>> round(both.first / both.second, 6)
    22.931034
    """

    def __init__(self, theta: float) -> None:
        self._theta = theta
        self.sums, self.weight = (0.0, 0.0), 0.0

    def add(self, first: float, second: float) -> None:
        """Add a value of each of two quantities to their exponential averages.

        x̄ ← θx̄ + (1-θ)x for both; earlier values keep the fraction θ of their weight.

        Args:
            first, second: new values of the first and of the second estimate.
        """
        keep, take = self._theta, 1 - self._theta
        self.sums = keep * self.sums[0] + take * first, keep * self.sums[1] + take * second
        self.weight = keep * self.weight + take

    @property
    def first(self) -> float:
        """Exponential average, debiased, of the values that ``add`` was given as ``first``.

        Raises ZeroDivisionError before the first ``add``.
        """
        return self.sums[0] / self.weight

    @property
    def second(self) -> float:
        """Exponential average, debiased, of the values that ``add`` was given as ``second``.

        Raises ZeroDivisionError before the first ``add``.
        """
        return self.sums[1] / self.weight


def adascale_gain(variance: float, square: float, workers: float) -> float:
    """Return AdaScale's gain r = (σ² + μ²) / (σ²/S + μ²), from 1 (no noise) to S (nothing but noise).

    Johnson et al. 2020, arXiv 2007.05105, Alg. 1: a step on S logical workers (equal shares of the global batch) is
    worth r steps on one. A batch smaller than one worker's, S < 1, is worth r < 1.

    Args:
        variance: σ², variance of one logical worker's gradient; negative estimates count as 0.
        square: μ², squared norm of the true gradient; negative estimates count as 0.
        workers: S, logical workers in the step.

    >>> round(adascale_gain(4 / 3, 11 / 3, 4), 9)
    1.25
    """
    variance, square = max(variance, 0.0), max(square, 0.0)
    below = variance / workers + square
    gain = (variance + square) / below if below > 0 else 1.0
    # The quotient of tiny numbers is rounded coarsely.
    return min(max(gain, min(workers, 1.0)), max(workers, 1.0))
