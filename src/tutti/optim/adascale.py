"""AdaScale: multiply each step's learning rate by a gain estimated from the logical workers' gradients. No torch.

Johnson, Agrawal, Gu, Guestrin 2020, arXiv 2007.05105, Alg. 1 and App. B.3. The base is one logical worker with its own
batch of b = B/N samples. A step on M = S·b samples is worth r steps of the base, 1 ≤ r ≤ S: its rate is multiplied by
r, and the schedule and the run's length count it as r steps. The last batch has a smaller S; if S < 1, so is r.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from tutti.optim.noise_formulas import Averages, adascale_gain, simple_noise_scale, weighted_moments
from tutti.types.step_records import StepContext, StepStats


class AdaScale:
    """AdaScale's gain r: the factor on each step's learning rate, estimated from the variance of workers' gradients.

    Johnson et al. 2020, arXiv 2007.05105, Algorithm 1. The workers are N logical workers, equal shares of the global
    batch. r = (σ² + μ²) / (σ²/S + μ²), with σ² the variance of one worker's gradient, μ² the squared norm of the
    expected gradient, and S the step's samples in units of a worker's share. Estimates of σ² and μ² are averaged with θ
    = max(1 - N/1000, 0), debiased, then divided and clamped. They use gradients before clipping. Skipped steps, and
    steps in which fewer than two logical workers had samples, do not change the averages. Every rank computes the gain
    from globally reduced statistics; all gains are equal.

    Args:
        batch: samples in a global batch.
        workers: N, at least 2.

    Attributes:
        tau: τ, the sum of gains: the run's length in steps of a batch of one logical worker.
        gain: r of the most recent step; None if that step had a non-finite gradient, and before the first step.
    """

    def __init__(self, batch: int, workers: int) -> None:
        self.tau = 0.0
        self.gain: float | None = None
        self._batch, self._workers = batch, workers
        self._averages = Averages(max(1 - workers / 1000, 0.0))

    def __call__(self, stats: StepStats, step_context: StepContext) -> StepContext:
        """Estimate AdaScale's gain from a step's gradient variance; return the step context with it in ``lr_factor``.

        The gain multiplies the context's learning-rate factor (None counts as 1), and is added to ``tau``, the sum of
        gains. Before the first estimate of the variance the gain is min(S, 1), S the step's samples divided by those of
        one logical worker (share of the global batch). After a step with a non-finite gradient the context is returned
        as it is. Called by the run in each step, between the reduction of the gradients and the update. Not collective.

        Args:
            stats: results of the step, reduced over all ranks: gradient norm, and the mean of the squared norms of the
                gradients of the logical workers (shares of the global batch).
            step_context: number of samples and learning-rate factor of the step.
        """
        self.gain = None
        if not stats.finite:
            return step_context
        shares = step_context.samples * self._workers / self._batch
        self._measure(stats, shares)
        if self._averages.weight:
            self.gain = adascale_gain(self._averages.first, self._averages.second, shares)
        else:
            self.gain = min(shares, 1.0)
        self.tau += self.gain
        return dataclasses.replace(
            step_context, lr_factor=self.gain * (1.0 if step_context.lr_factor is None else step_context.lr_factor)
        )

    def _measure(self, stats: StepStats, shares: float) -> None:
        variance = stats.gradient_variance
        if variance is not None and variance.workers > 1:
            found = weighted_moments(variance.mean_of_squares, stats.grad_norm**2, variance.workers, shares)
            # Squares may overflow although the gradient is finite.
            if all(map(math.isfinite, found)):
                self._averages.add(*found)

    def values(self) -> dict[str, float]:
        """Return AdaScale's figures to log: ``tau`` (τ), ``gain`` (r) and ``noise_scale`` (in samples).

        τ is the sum of all gains r, by which the learning rates of steps were multiplied. ``gain`` is that of the most
        recent step. The dict lacks ``gain`` after a skipped step, and ``noise_scale`` before the first estimate. The
        simple noise scale is tr Σ / |G|² (trace of the covariance of one sample's gradient, by the squared norm of the
        expected gradient), McCandlish et al. 2018, arXiv 1812.06162.
        """
        found = {} if self.gain is None else {"gain": self.gain}
        found["tau"] = self.tau
        if self._averages.weight:
            found["noise_scale"] = simple_noise_scale(
                self._averages.first * self._batch / self._workers, self._averages.second
            )
        return found

    def state(self) -> dict[str, float]:
        """Return AdaScale's running estimates as a dict of four numbers, for a checkpoint and ``load``.

        AdaScale multiplies the learning rate of each step by a gain. Keys are ``tau``, the sum of the gains so far;
        ``variance`` and ``square``, exponentially weighted sums of the steps' estimates of the variance of one logical
        worker's gradient and of the squared norm of the expected gradient; and ``weight``, the sum of the weights, by
        which both sums are divided to get averages. A logical worker is a share of the global batch.
        """
        first, second = self._averages.sums
        return {"tau": self.tau, "variance": first, "square": second, "weight": self._averages.weight}

    def load(self, saved: Mapping[str, float]) -> None:
        """Restore AdaScale's sum of gains and running estimates of the gradient's variance from a checkpoint.

        Args:
            saved: the result of ``state``: ``tau``, ``variance``, ``square`` and ``weight``.

        Raises:
            ValueError, KeyError, TypeError: ``saved`` is malformed.
        """
        tau, first, second, weight = (float(saved[name]) for name in ("tau", "variance", "square", "weight"))
        if not (all(map(math.isfinite, (tau, first, second))) and tau >= 0 and 0 <= weight <= 1):
            raise ValueError(
                f"the saved averages are out of bounds: τ {tau:g}, σ² {first:g}, μ² {second:g}, weight {weight:g}"
            )
        self.tau, self._averages.sums, self._averages.weight = tau, (first, second), weight
