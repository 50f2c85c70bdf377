"""Fit a law's constants to measurements, with a prior on each and a posterior to draw from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tutti.planning.monte_carlo import DRAWS
from tutti.planning.scaling_laws import Array, Inputs, ScalingLaw, samples_to_target

_RESIDUAL = 0.05
"""Relative error of a law at which a row's influence starts to level off (soft L1): a guess, the same for all laws."""

_UNKNOWN = 0.999
"""Posterior over prior standard deviation of a constant's logarithm above which measurements say nothing of it."""
_HOPELESS = 1e3
_INDEPENDENT = 100.0
"""Largest effective number of independent rows: the errors of a law repeat from row to row, so a thousand rows are no
proof."""

OTHER_SETS = 8.0
"""Effective number of independent rows of other sets than the predicted one: a guess."""


@dataclass(frozen=True)
class FittedLaw:
    """A fitted scaling law with the posterior of its constants' logarithms (normal, by Laplace's approximation).

    Attributes:
        law: the formula of the seconds, or of another measured quantity, with the names of its constants.
        log_constants: (constants,) natural logarithms of the constants at the optimum.
        covariance: (constants, constants) posterior covariance of these logarithms.
        rows: number of measurements that the law was fitted to.
        misfit: standard deviation of the errors of log seconds that the fit leaves.
    """

    law: ScalingLaw
    log_constants: Array
    covariance: Array
    rows: int
    misfit: float = _RESIDUAL

    def predict(self, inputs: Inputs, doublings: Array | float = 0.0) -> tuple[Array, Array]:
        """Predict by the fitted law the seconds, or other quantity, of further measurements from their inputs.

        Constants that the fitted measurements do not determine, such as the network's for measurements on one device,
        keep their prior. The prediction is the median over draws of these constants, with all other constants at the
        optimum, because a sum of uncertain positive costs is larger in the median than the sum of their medians.

        Args:
            inputs: an array (n,) for each input of the law by its name, such as ``ranks`` and ``bytes``.
            doublings: log₂ of the predicted size over the largest fitted one, 0 or more; one number or (n,).

        Returns:
            A pair of arrays of shape (n,), one element for each measurement: the predicted seconds, and the standard
            deviation s of the natural logarithm of a measurement. s² is the variance over random draws of the law's
            constants from their posterior, plus (1 + ``doublings``) · ``misfit``²: the errors of a law are guessed to
            grow like a random walk beyond the fitted sizes.
        """
        normal = np.random.default_rng(0).standard_normal((DRAWS, len(self.log_constants)))
        spread = np.asarray(self.law.spread)
        unknown = np.diag(self.covariance) > (_UNKNOWN * spread) ** 2
        if unknown.any():
            # Each draw and its opposite, and more of them: the error of the median would be one of all predictions.
            half = np.random.default_rng(1).standard_normal((2 * DRAWS, len(self.log_constants))) * spread * unknown
            centre = np.median(self._logs(self.log_constants + np.concatenate([half, -half]), inputs), axis=0)
        else:
            centre = self._logs(self.log_constants[None], inputs)[0]
        drawn = self._logs(self.log_constants + normal @ _root(self.covariance).T, inputs)
        misfit = self.misfit * np.sqrt(1 + np.maximum(doublings, 0.0))
        return np.exp(centre), np.hypot((drawn - centre).std(axis=0), misfit)

    def _logs(self, log_constants: Array, inputs: Inputs) -> Array:
        """Return log seconds of the law, (draws, n), for logarithms of its constants, (draws, constants)."""
        seconds = np.stack([self.law.seconds(np.exp(draw), inputs) for draw in log_constants])
        return np.log(np.maximum(seconds, 1e-300))

    def constants(self) -> dict[str, float]:
        """Return the constants of the scaling law, as fitted to measurements.

        Returns:
            Name of the constant, such as ``latency_s``, → its value at the optimum of the fit, a Python float. A name
            that ends in a unit, such as ``_s`` or ``_bytes_per_s``, is that of a value in this SI unit; all other
            constants have no unit.
        """
        return dict(zip(self.law.constants, np.exp(self.log_constants).tolist(), strict=True))


def _root(covariance: Array) -> Array:
    """Return a matrix whose product with its transpose is a covariance; it depends on the covariance continuously.

    Eigenvectors do not: constants of which the measurements say nothing have equal variances, and rounding errors turn
    their eigenvectors, and with them all draws.
    """
    try:
        return np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(covariance)
        return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))


def fit_law(law: ScalingLaw, inputs: Inputs, seconds: Array, independent: float = _INDEPENDENT) -> FittedLaw:
    """Fit the constants of a law to measured seconds, with a normal prior on each constant's logarithm.

    Maximum a posteriori: soft-L1 loss of the errors of log seconds.

    Args:
        law: formula of the seconds and its constants; the prior of the constants comes from ``law.centre`` and
            ``law.spread``.
        inputs: an array (n,) for each input of the law by its name, with one element for each measurement.
        seconds: (n,) measured seconds, or other quantity of the law, positive; for n = 0 the fit is the prior.
        independent: largest effective number of measurements: with more, each error weighs less, so that together they
            weigh as this number of independent ones. Pass the constant ``OTHER_SETS`` for measurements of other sources
            than the predicted one.

    Returns:
        A ``FittedLaw``: ``log_constants`` (natural logarithms at the optimum), ``covariance`` of them, (JᵀJ)⁻¹ at the
        optimum with the prior included, ``rows`` = n, and ``misfit``, the standard deviation of the fit's errors in log
        seconds; its method ``predict`` returns the seconds of further measurements.
    """
    from scipy.optimize import least_squares

    start = np.log(law.centre(inputs, seconds))
    spread = np.asarray(law.spread)
    if not len(seconds):
        return FittedLaw(law, start, np.diag(spread**2), 0)
    weight = np.sqrt(min(1.0, independent / max(len(seconds), 1))) / _RESIDUAL

    def errors(logs: Array) -> Array:
        predicted = np.maximum(law.seconds(np.exp(logs), inputs), 1e-300)
        misses = np.nan_to_num(weight * np.log(predicted / seconds), nan=_HOPELESS, posinf=_HOPELESS, neginf=-_HOPELESS)
        return np.concatenate([misses, (logs - start) / spread])

    bounds = (start - 6 * spread, start + 6 * spread)
    found = least_squares(errors, start, loss="soft_l1", max_nfev=200, bounds=bounds)
    precision = found.jac.T @ found.jac + 1e-9 * np.eye(len(start))
    left = errors(found.x)[: len(seconds)] / weight
    # The assumed residual counts as many rows as the law has constants: few rows do not show how far a law is off.
    misfit = np.sqrt((len(start) * _RESIDUAL**2 + left @ left) / (len(start) + len(left)))
    return FittedLaw(law, found.x, np.linalg.inv(precision), len(seconds), float(misfit))


@dataclass(frozen=True)
class TargetPosterior:
    """Posterior of the law E(B) = E_min(1 + B/B_crit), the data that training needs to a target at batch size B.

    The posterior has weights over a grid of log B_crit, with the log E_min that fits best at each grid point.

    Attributes:
        log_critical: (grid,) natural logarithms of critical batch sizes B_crit.
        log_least: (grid,) natural logarithm of the best-fitting E_min at each.
        weights: (grid,) posterior weights, which sum to 1.
        seed: standard deviation of log E between runs.
    """

    log_critical: Array
    log_least: Array
    weights: Array
    seed: float

    def predict(self, batch: float) -> tuple[float, float]:
        """Predict how much data training needs to the target metric at a batch size, by E(B) = E_min(1 + B/B_crit).

        Args:
            batch: B, samples of a global batch.

        Returns:
            A pair of Python floats: the posterior median of the data E, in the unit of the fitted data (samples or
            epochs), and the posterior standard deviation of ln E.
        """
        logs = np.log(samples_to_target(np.array(batch), np.exp(self.log_least), np.exp(self.log_critical)))
        order = np.argsort(logs)
        middle = float(np.interp(0.5, np.cumsum(self.weights[order]), logs[order]))
        mean = float(self.weights @ logs)
        return float(np.exp(middle)), float(np.sqrt(self.weights @ (logs - mean) ** 2 + self.seed**2))


_CRITICAL_FACTOR = 64.0
_CRITICAL_SPREAD = 2.0
_SEED = 0.03
_FREEDOM = 3.0


def fit_target(
    batches: Array,
    data: Array,
    runs: Array,
    spreads: Array | float = 0.0,
    noise: float | None = None,
    noise_spread: float = 0.7,
) -> TargetPosterior:
    """Fit E(B) = E_min(1 + B/B_crit), the data to a target at batch size B, to measured batch sizes.

    The posterior of B_crit is computed on a grid; E_min is the best fit at each grid point. The likelihood is Student's
    t, since the spread between runs is unknown too. The prior is log B_crit ~ N(log B_simple, ``noise_spread``²).
    Without a noise scale it is log B_crit ~ N(log 64·max B, 2²), a guess from published submissions, whose batches are
    well below the critical one.

    Args:
        batches: (n,) batch sizes in samples.
        data: (n,) samples, or epochs, that training needed to the target at each batch size.
        runs: (n,) number of runs that each value comes from; two or more count for more than one, with diminishing
            returns.
        spreads: (n,) standard deviations of ln ``data``, or one for all, since a run reaches the target somewhere
            between two evaluations. They lower the weights of the values.
        noise: measured gradient noise scale B_simple in samples; None if there is none.
        noise_spread: standard deviation of log B_crit given the noise scale.

    Returns:
        A ``TargetPosterior``: ``log_critical``, (400,) values of log B_crit; ``log_least``, (400,) log E_min that fits
        best at each; ``weights``, (400,) posterior weights, which sum to 1; ``seed``, the assumed standard deviation of
        log E between runs.
    """
    middle = np.log(_CRITICAL_FACTOR * batches.max() if noise is None else noise)
    spread = _CRITICAL_SPREAD if noise is None else noise_spread
    grid = np.linspace(middle - 6 * spread, middle + 6 * spread, 400)
    weight = 1 / ((runs + 1) / (2 * runs) + (spreads / _SEED) ** 2)
    least = np.log(data)[None] - np.log1p(batches[None] / np.exp(grid)[:, None])
    centre = (least * weight).sum(1) / weight.sum()
    square = (weight * (least - centre[:, None]) ** 2).sum(1)
    freedom = _FREEDOM + len(batches) - 1
    log_density = -0.5 * freedom * np.log1p(square / (_FREEDOM * _SEED**2)) - 0.5 * ((grid - middle) / spread) ** 2
    weights = np.exp(log_density - log_density.max())
    return TargetPosterior(grid, centre, weights / weights.sum(), _SEED)
