"""Statistics of paired measurements: every round measures all contestants, so that a slow drift cancels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of time ÷ reference time, with its 95 % interval from ``low`` to ``high``."""

    median: float
    low: float
    high: float

    def above(self, limit: float) -> bool:
        """Whether the whole interval lies above ``limit``: slower, and not by chance."""
        return self.low > limit


def order(contestants: int, seed: int, launch: int, turn: int) -> list[int]:
    """The random order of a round; the same on every rank, for it depends on the arguments alone."""
    return [int(index) for index in np.random.default_rng((seed, launch, turn)).permutation(contestants)]


def paired_ratio(times: NDArray[np.float64], reference: NDArray[np.float64], seed: int = 0) -> Ratio:
    """The median of the rounds' ratios, with its percentile interval from a two-stage bootstrap.

    Launches are drawn again and then rounds within each (Davison and Hinkley 1997, section 3.8): where a process
    happens to place its tensors is the luck of a launch, which more rounds do not average out. Rounds are drawn
    whole, so that a round's two times stay together.

    Args:
        times: [launches, rounds], positive, any unit.
        reference: the times of the other in the same rounds, same shape and unit.
        seed: of the drawing.

    Raises:
        ValueError: the shapes differ, or there are fewer than two rounds.
    """
    if times.shape != reference.shape or times.ndim != 2 or times.size < 2:
        raise ValueError(f"paired times are {times.shape} and {reference.shape}, not both [launches, rounds]")
    ratios = times / reference
    launches, rounds = ratios.shape
    generator = np.random.default_rng(seed)
    launch = generator.integers(launches, size=(RESAMPLES, launches, 1))
    turn = generator.integers(rounds, size=(RESAMPLES, launches, rounds))
    low, high = np.quantile(np.median(ratios[launch, turn], axis=(1, 2)), [0.025, 0.975])
    return Ratio(float(np.median(ratios)), float(low), float(high))
