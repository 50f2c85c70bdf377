"""Monte Carlo draws of uncertain quantities."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tutti.planning.scaling_laws import Array

DRAWS = 256
"""Monte Carlo draws of an uncertain quantity, the length of its array."""
GUESSED_JITTER = 0.02
"""Standard deviation of a rank's seconds of computing over their mean, where it was not measured: a guess."""


def median_draw(draws: Array) -> float:
    """Return the median of one-dimensional draws, as ``numpy.median`` does, in a fifth of its time.

    Args:
        draws: (n,) draws of a quantity, n at least 1; the median is in its unit.

    >>> median_draw(np.array([4.0, 1.0, 3.0, 2.0])), median_draw(np.array([3.0, 1.0, 2.0]))
    (2.5, 2.0)
    """
    ordered = np.sort(draws)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def slowest_factor(ranks: int, sigma: float) -> Array:
    """Return 256 random draws of the ratio by which the slowest of N ranks takes longer than the typical one.

    A draw is 1 + σ·z, but at least 1, where z is the largest of N standard normal numbers, with the distribution
    function Φ(z)^N. All calls transform the same 256 uniform numbers (``DRAWS`` of them, from a fixed seed), so that
    equal arguments give equal ratios, and element i of every result comes from the same uniform number.

    Args:
        ranks: N, at least 1.
        sigma: σ, standard deviation of one rank's seconds over their mean; 0 or more.

    Returns:
        Ratios of seconds, a new array of shape (256,), each at least 1.

    >>> bool(slowest_factor(2, 0.1).mean() < slowest_factor(1024, 0.1).mean() < 1.4)
    True
    """
    return np.asarray(np.maximum(1.0, 1 + sigma * _largest_normal(ranks)))


@lru_cache(maxsize=64)
def _largest_normal(ranks: int) -> Array:
    from scipy.special import ndtri

    uniform = np.random.default_rng(1).random(DRAWS)
    return np.asarray(ndtri(uniform ** (1 / ranks)))
