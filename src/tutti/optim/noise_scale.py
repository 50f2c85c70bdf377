"""The simple noise scale B = tr Σ / |G|² from gradients of parts of a batch, with its 90 % band. No torch.

McCandlish, Kaplan, Amodei, Dota Team 2018, arXiv 1812.06162, App. A.1: the squared norms of gradients over few and over
many samples give unbiased estimates of tr Σ and |G|². Both are averaged over steps before they are divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tutti.optim.noise_formulas import simple_noise_scale, weighted_moments

_NORMAL = 1.6448536269514722
_FEWEST = 4


class NoiseEstimate(NamedTuple):
    """Estimates of a gradient's noise from one step, both unbiased; either may be negative.

    Attributes:
        trace: estimate of tr Σ, the trace of the covariance of one sample's gradient.
        square: estimate of |G|², the squared norm of the expected gradient.
    """

    trace: float
    square: float


class NoiseBand(NamedTuple):
    """The simple noise scale of gradients in samples, and its 90 % confidence interval.

    Attributes:
        scale: tr Σ / |G|²: trace of the covariance of one sample's gradient, by the squared norm of the expected
            gradient.
        low: lower end of the interval.
        high: upper end of the interval; infinite where the data do not bound it.
    """

    scale: float
    low: float
    high: float


def noise_estimate(mean_of_squares: float, square_of_mean: float, parts: int, samples: int) -> NoiseEstimate:
    """Return unbiased estimates of tr Σ and |G|² from the gradients gᵢ of the parts of one step's batch.

    Σ is the covariance of one sample's gradient, and G the expected gradient. The parts are disjoint, such as the
    shares of logical workers; gᵢ is the mean gradient over part i.

    Args:
        mean_of_squares: Σ pᵢ‖gᵢ‖², with pᵢ the fraction of the batch's samples in part i.
        square_of_mean: ‖Σ pᵢgᵢ‖², the squared norm of the whole batch's gradient.
        parts: number of parts with a gradient, at least 2.
        samples: number of samples in the whole batch.

    Returns:
        A ``NoiseEstimate`` of two numbers: ``trace``, the estimate of tr Σ, and ``square``, the estimate of |G|²;
        either may be negative.

    Raises:
        ValueError: ``parts`` is below 2.

    Four gradients (1, 0), (3, 0), (2, 1), (2, -1) over 32 samples each:

    >>> [round(value, 6) for value in noise_estimate(5.0, 4.0, 4, 128)]
    [42.666667, 3.666667]
    """
    return NoiseEstimate(*weighted_moments(mean_of_squares, square_of_mean, parts, samples))


def ratio_band(
    means: tuple[float, float], covariance: tuple[float, float, float], freedom: float
) -> tuple[float, float]:
    """Return Fieller's 90 % confidence interval (low, high) of the ratio of two means, cut at 0.

    Where the denominator's mean is not significantly above 0 (at 95 %), the upper end is ∞ and the lower end may be 0.
    Fieller 1954, "Some problems in interval estimation".

    Args:
        means: the means of numerator and denominator.
        covariance: variance of the first mean, covariance of the two, variance of the second.
        freedom: degrees of freedom of the covariance.
    """
    (above, below), (aa, ab, bb), t = means, covariance, student_t(freedom)
    a, b, c = below**2 - t**2 * bb, above * below - t**2 * ab, above**2 - t**2 * aa
    root = b**2 - a * c
    if root < 0:
        return 0.0, math.inf
    if below <= 0 or a <= 0:
        # The denominator is not significantly above 0: the interval has a lower end at most.
        low = (b - math.sqrt(root)) / a if a > 0 else c / (b + math.sqrt(root)) if b + math.sqrt(root) > 0 else 0.0
        return max(low, 0.0), math.inf
    return max((b - math.sqrt(root)) / a, 0.0), max((b + math.sqrt(root)) / a, 0.0)


def student_t(freedom: float) -> float:
    """Return the 95 % quantile of Student's t distribution with ``freedom`` degrees of freedom.

    Computed by its Cornish-Fisher expansion; within 1 % from 3 degrees on.

    Args:
        freedom: degrees of freedom, above 0; need not be an integer.

    >>> round(student_t(10), 2), round(student_t(1e9), 3)
    (1.81, 1.645)
    """
    z, n = _NORMAL, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


@dataclass
class NoiseAverage:
    """Averages of steps' estimates of gradient noise (``NoiseEstimate``) and of their products, for an interval.

    Exponential: x̄ ← θx̄ + (1-θ)x, debiased when read. ``NoiseAverage(1.0)`` weighs all estimates alike. The products
    give the 90 % confidence interval of the noise scale.

    Attributes:
        theta: θ.
        weight: sum of the estimates' weights.
        squares: sum of their squared weights.
        sums: weighted sums of T, S, T², TS and S², with T the estimate of tr Σ and S that of |G|².

    >>> all_alike = NoiseAverage(1.0)
    >>> for trace, square in ((40, 4), (60, 1), (20, 0.5)):
    ...     all_alike.add(NoiseEstimate(trace, square))
    >>> round(all_alike.band().scale, 6)
    21.818182
    """

    theta: float
    weight: float = 0.0
    squares: float = 0.0
    sums: tuple[float, ...] = (0.0,) * 5

    def add(self, estimate: NoiseEstimate) -> None:
        """Add one step's estimates of the gradient noise to the averages, unless one of them is not finite.

        Args:
            estimate: a named tuple of ``trace``, the estimate of tr Σ (trace of the covariance of one sample's
                gradient), and ``square``, that of |G|² (squared norm of the expected gradient).
        """
        trace, square = estimate
        products = (trace, square, trace**2, trace * square, square**2)
        if not all(map(math.isfinite, products)):
            return
        keep = self.theta
        take = 1 - keep if keep < 1 else 1.0
        self.sums = tuple(keep * before + take * now for before, now in zip(self.sums, products, strict=True))
        self.weight, self.squares = keep * self.weight + take, keep**2 * self.squares + take**2

    @property
    def steps(self) -> float:
        """Effective number of steps in the averages of the gradient noise, by the steps' weights w: (Σw)² / Σw².

        It is the number of estimates if all weigh alike; 0 without any.
        """
        return self.weight**2 / self.squares if self.squares else 0.0

    def band(self) -> NoiseBand:
        """Return the averaged noise scale tr Σ / |G|², in samples, with its 90 % confidence interval.

        tr Σ is the trace of the covariance of one sample's gradient, |G|² the squared norm of the expected gradient.
        From fewer than 4 estimates the interval is (0, ∞). The scale is ∞ if the average of |G|² is not positive.

        Returns:
            A ``NoiseBand``: ``scale``, and ``low`` and ``high``, the ends of the interval, all in samples.

        Raises:
            ValueError: there is no estimate.
        """
        if not self.weight:
            raise ValueError("the noise of no step was measured")
        t, s, tt, ts, ss = (total / self.weight for total in self.sums)
        scale, steps = simple_noise_scale(t, s), self.steps
        # The mean's variance is the sample variance, with its (n - 1), divided by n.
        if steps < _FEWEST - 1e-9:
            return NoiseBand(scale, 0.0, math.inf)
        covariance = ((tt - t * t) / (steps - 1), (ts - t * s) / (steps - 1), (ss - s * s) / (steps - 1))
        return NoiseBand(scale, *ratio_band((t, s), covariance, steps - 1))

    def state(self) -> dict[str, float | list[float]]:
        """Return the averages of the gradient noise for a checkpoint, as a dictionary.

        Keys are ``weight`` and ``squares``, sums of the estimates' weights and squared weights, and ``sums``, the list
        of the weighted sums of T, S, T², TS and S², with T the estimate of tr Σ (trace of the covariance of one
        sample's gradient) and S that of |G|² (squared norm of the expected gradient).
        """
        return {"weight": self.weight, "squares": self.squares, "sums": list(self.sums)}

    def load(self, saved: Mapping[str, float | list[float]]) -> None:
        """Restore the averages of the gradient noise from a checkpoint.

        Args:
            saved: the result of ``state``: ``weight``, ``squares`` and ``sums``, a list of five numbers.

        Raises:
            ValueError, KeyError, TypeError: ``saved`` is malformed.
        """
        weight, squares, sums = saved["weight"], saved["squares"], saved["sums"]
        if not isinstance(sums, list) or isinstance(weight, list) or isinstance(squares, list) or len(sums) != 5:
            raise ValueError("sums of five products, and two weights, are expected")
        numbers = [float(weight), float(squares), *map(float, sums)]
        if not all(map(math.isfinite, numbers)) or numbers[0] < 0 or numbers[1] < 0:
            raise ValueError(f"the averages are {numbers}")
        self.weight, self.squares, self.sums = numbers[0], numbers[1], tuple(numbers[2:])


def mean_noise(estimates: Iterable[NoiseEstimate]) -> NoiseAverage:
    """Return the average of several steps' estimates of gradient noise, all with equal weight.

    Args:
        estimates: for each step a named tuple of ``trace``, the estimate of tr Σ (trace of the covariance of one
            sample's gradient), and ``square``, that of |G|² (squared norm of the expected gradient). Those that are not
            finite are left out.

    Returns:
        A ``NoiseAverage``, whose method ``band`` returns the noise scale and its confidence interval, or raises
        ValueError if there is no estimate.
    """
    average = NoiseAverage(1.0)
    for estimate in estimates:
        average.add(estimate)
    return average
