"""AdaScale: each step's rate by what the gradients of several workers are worth. No torch.

Johnson, Agrawal, Gu, Guestrin 2020, arXiv 2007.05105, Alg. 1 and App. B.3. The base is one worker with its own batch of
b = B/N samples. A step on M = S·b samples is worth r of the base's, 1 ≤ r ≤ S: it is made at r times the rate, and the
schedule and the run's length count it as r. A last batch has a smaller S; where that is below 1, so is r.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from tutti.laws.noise import Averages, adascale_gain, simple_noise_scale, weighted_moments
from tutti.types import Agreed, Tick


class AdaScale:
    """The gain of one run's steps. Every rank has its own, fed by what all agreed on, so that all are equal.

    The estimates of σ² and μ² are averaged with θ = max(1 - N/1000, 0), debiased, then divided and clamped. They are
    from gradients before clipping. A step that is skipped, and one in which fewer than two workers had samples, leave
    them alone.

    Args:
        batch: samples in a global batch B.
        workers: N, at least 2.

    Attributes:
        tau: τ, steps of the base that the run's steps were worth: the sum of their gains.
        gain: r of the last step; None where it was skipped.
    """

    def __init__(self, batch: int, workers: int) -> None:
        self.tau = 0.0
        self.gain: float | None = None
        self._batch, self._workers = batch, workers
        self._averages = Averages(max(1 - workers / 1000, 0.0))

    def __call__(self, agreed: Agreed, tick: Tick) -> Tick:
        """Take in a step's gradients before its update, which is to be made with the returned tick."""
        self.gain = None
        if not agreed.finite:
            return tick
        shares = tick.samples * self._workers / self._batch
        self._measure(agreed, shares)
        if self._averages.weight:
            self.gain = adascale_gain(self._averages.first, self._averages.second, shares)
        else:
            self.gain = min(shares, 1.0)
        self.tau += self.gain
        return dataclasses.replace(tick, lr_factor=self.gain * (1.0 if tick.lr_factor is None else tick.lr_factor))

    def _measure(self, agreed: Agreed, shares: float) -> None:
        spread = agreed.spread
        if spread is not None and spread.workers > 1:
            found = weighted_moments(spread.mean_of_squares, agreed.grad_norm**2, spread.workers, shares)
            # Squares may overflow where the gradient itself does not.
            if all(map(math.isfinite, found)):
                self._averages.add(*found)

    def values(self) -> dict[str, float]:
        """τ, the last step's gain, and the simple noise scale in samples (McCandlish et al. 2018, arXiv 1812.06162)."""
        found = {} if self.gain is None else {"gain": self.gain}
        found["tau"] = self.tau
        if self._averages.weight:
            found["noise_scale"] = simple_noise_scale(
                self._averages.first * self._batch / self._workers, self._averages.second
            )
        return found

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        first, second = self._averages.sums
        return {"tau": self.tau, "variance": first, "square": second, "weight": self._averages.weight}

    def load(self, saved: Mapping[str, float]) -> None:
        """Continue from ``state``. Raises ValueError, KeyError or TypeError where that is none."""
        tau, first, second, weight = (float(saved[name]) for name in ("tau", "variance", "square", "weight"))
        if not (all(map(math.isfinite, (tau, first, second))) and tau >= 0 and 0 <= weight <= 1):
            raise ValueError(f"τ {tau:g}, σ² {first:g}, μ² {second:g}, weight {weight:g}")
        self.tau, self._averages.sums, self._averages.weight = tau, (first, second), weight
