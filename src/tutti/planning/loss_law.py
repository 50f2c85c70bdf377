"""Fit the loss of runs over model size and data by variable projection, with intervals from a bootstrap over runs.

The law is L = E + A/N^α + B/D^β (Hoffmann et al. 2022, arXiv 2203.15556, eq. 2), or L = E + B/D^β where all runs have
one model size N. Given the exponents it is linear in E, A and B, so that a grid over the exponents and a linear
solution find the region of the optimum; the objective there is the sum of Huber losses of log errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.errors import UsageError
from tutti.planning.scaling_laws import Array

_HUBER = 1e-3
_DRAWS = 100
_EXPONENTS = np.linspace(0.05, 1.5, 30)
_FLOOR_SHARE = 0.1
_FAR = 5.0
_JUDGED = 8


@dataclass(frozen=True)
class LossLaw:
    """Constants of the loss law L = E + A/N^α + B/D^β, fitted to training runs.

    Attributes:
        irreducible: E, the loss of unlimited model size and data.
        size_factor, size_exponent: A and α, for N in parameters; both 0 where all runs have one size.
        data_factor, data_exponent: B and β, for D in samples or tokens.
    """

    irreducible: float
    size_factor: float
    size_exponent: float
    data_factor: float
    data_exponent: float

    def loss(self, parameters: Array, data: Array) -> Array:
        """Return the loss that the law L = E + A/N^α + B/D^β predicts for training runs.

        Args:
            parameters: N, (n,) number of parameters of each run.
            data: D, (n,) samples or tokens of each run.

        Returns:
            Array of shape (n,): the loss of each run.
        """
        size = self.size_factor * parameters**-self.size_exponent if self.size_factor else 0.0
        return np.asarray(self.irreducible + size + self.data_factor * data**-self.data_exponent)


@dataclass(frozen=True)
class FittedLoss:
    """The loss law L = E + A/N^α + B/D^β fitted to training runs, with bootstrap draws of it.

    Attributes:
        law: the law fitted to all runs.
        draws: one law for each bootstrap draw, fitted to runs drawn with replacement.
    """

    law: LossLaw
    draws: tuple[LossLaw, ...]

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 5 % and 95 % quantile, in this order, of a constant of the law L = E + A/N^α + B/D^β.

        L is the loss of a training run, N its number of parameters, D its samples or tokens. The quantiles are over the
        laws that were fitted to bootstrap draws of the runs.

        Args:
            name: ``irreducible`` (E), ``size_factor`` (A), ``size_exponent`` (α), ``data_factor`` (B) or
                ``data_exponent`` (β).

        Returns:
            The two quantiles, as Python floats; (0, 0) for A and α where all runs have one model size. Both are NaN
            where constants of draws overflow, because drawn runs are too few to determine the law.
        """
        low, high = _quantiles(np.array([getattr(draw, name) for draw in self.draws]))
        return float(low), float(high)


def fit_loss(parameters: Array, data: Array, loss: Array, draws: int = _DRAWS) -> FittedLoss:
    """Fit the law of the loss L = E + A/N^α + B/D^β to training runs, and again to bootstrap draws of the runs.

    Where all runs have one model size N, the term A/N^α is left out.

    Args:
        parameters: (runs,) number of parameters N of each run.
        data: (runs,) samples or tokens D of each run.
        loss: (runs,) loss of each run, above 0.
        draws: number of bootstrap draws (runs drawn with replacement).

    Returns:
        A ``FittedLoss``: ``law``, the law with its constants (E, A, α, B, β), fitted to all runs, and ``draws``, one
        law for each bootstrap draw.

    Raises:
        UsageError: there are fewer than 6 runs or 3 different model sizes (where all runs have one size: fewer than 4
            runs), or fewer than 3 different amounts of data.
    """
    by_size = len(np.unique(parameters)) > 1
    _check_enough(parameters, data, by_size)
    law = _fit(parameters, data, loss, by_size, None)
    generator = np.random.default_rng(0)
    found: list[LossLaw] = []
    while len(found) < draws:
        rows = generator.integers(0, len(loss), len(loss))
        if len(np.unique(data[rows])) < 3 or (by_size and len(np.unique(parameters[rows])) < 3):
            continue
        found.append(_fit(parameters[rows], data[rows], loss[rows], by_size, law))
    return FittedLoss(law, tuple(found))


def loss_band(fitted: FittedLoss, spread: float, parameters: Array, data: Array) -> tuple[Array, Array]:
    """Return the 90 % band of the loss of further training runs, by a law that was fitted to earlier runs.

    The band covers the laws fitted to bootstrap draws of the earlier runs, each with the random spread of a run around
    its law.

    Args:
        fitted: the law L = E + A/N^α + B/D^β, fitted to runs and to bootstrap draws of them.
        spread: standard deviation of the natural logarithm of a run's loss around the law.
        parameters, data: (runs,) number of parameters N and samples or tokens D of the further runs.

    Returns:
        A pair of arrays of shape (runs,): low and high end of the band of each run; both NaN where drawn runs are too
        few to determine the law.
    """
    generator = np.random.default_rng(1)
    with np.errstate(invalid="ignore"):
        drawn = np.stack([draw.loss(parameters, data) for draw in fitted.draws for _ in range(8)])
    return _quantiles(drawn * np.exp(spread * generator.standard_normal(drawn.shape)))


def _quantiles(drawn: Array) -> tuple[Array, Array]:
    """Return the 5 % and 95 % quantile over the first dimension; NaN for both where one of the two is not finite."""
    with np.errstate(invalid="ignore"):
        low, high = np.quantile(drawn, [0.05, 0.95], axis=0)
    known = np.isfinite(low) & np.isfinite(high)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def loss_spread(law: LossLaw, parameters: Array, data: Array, loss: Array) -> float:
    """Return the robust standard deviation of the logarithm of runs' losses around a law.

    The estimate is 1.4826 times the median of |log(predicted/measured)|.

    Args:
        law: the loss law L = E + A/N^α + B/D^β.
        parameters, data, loss: (runs,) number of parameters N, samples or tokens D, and measured loss of each run.
    """
    return float(1.4826 * np.median(np.abs(np.log(law.loss(parameters, data) / loss))))


def largest_tenth(parameters: Array, data: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split training runs into the largest tenth (rounded down, but at least one) and all others, by N · D.

    Args:
        parameters, data: (runs,) number of parameters N and samples or tokens D of each run.

    Returns:
        A pair of integer arrays: indices of the other runs, then indices of the largest runs. Each array is in rising
        order of N · D.
    """
    order = np.argsort(parameters * data, kind="stable")
    count = max(1, len(order) // 10)
    return order[:-count], order[-count:]


def larger_run_spread(fitted: FittedLoss, parameters: Array, data: Array, loss: Array) -> float:
    """Estimate how far the losses of larger runs lie from the law: the standard deviation of their logarithms.

    The estimate is the larger of two root mean square errors of log loss: the error of the law on the runs that it is
    fitted to, and the error on the largest tenth of the runs of a law that is fitted to all other runs. Where the other
    runs are too few for a fit, the estimate is the first error.

    Args:
        fitted: the law L = E + A/N^α + B/D^β, fitted to all of these runs.
        parameters, data, loss: (runs,) number of parameters N, samples or tokens D, and loss of each run.
    """
    own = float(np.sqrt(np.mean(np.log(fitted.law.loss(parameters, data) / loss) ** 2)))
    rest, last = largest_tenth(parameters, data)
    try:
        law = fit_loss(parameters[rest], data[rest], loss[rest], draws=0).law
    except UsageError:
        return own
    errors = np.log(law.loss(parameters[last], data[last]) / loss[last])
    return max(own, float(np.sqrt(np.mean(errors**2))))


def loss_regions(law: LossLaw, parameters: Array, data: Array, loss: Array) -> list[str]:
    """Sort training runs into three regions of their loss: ``irreducible``, ``power law`` and ``small data``.

    ``irreducible``: the law's constant E is more than 90 % of the run's loss (a choice). ``small data``: the run is in
    the quarter of runs with the least data, and the logarithm of its loss deviates from a law fitted to the other three
    quarters by more than five times these runs' spread (``loss_spread``, 0.001 at least); only with at least 8 runs,
    and three different amounts of data among these quarters. Where the three quarters are too few to fit, ``law`` takes
    the place of their law. All other runs are ``power law``.

    Args:
        law: the law L = E + A/N^α + B/D^β, fitted to all runs; E is the loss of unlimited model size and data.
        parameters, data, loss: (runs,) number of parameters N, samples or tokens D, and loss of each run.

    Returns:
        The name of the region of each run, in the order of the runs. A run in two regions is ``small data``.

    Source of the regions: Hestness et al. 2017, arXiv 1712.00409, §5.
    """
    off = np.zeros(len(loss), dtype=bool)
    few = data <= np.quantile(data, 0.25)
    if len(loss) >= _JUDGED and len(np.unique(data[~few])) >= 3:
        try:
            rest = fit_loss(parameters[~few], data[~few], loss[~few], draws=0).law
        except UsageError:
            rest = law
        spread = max(loss_spread(rest, parameters[~few], data[~few], loss[~few]), 1e-3)
        off = few & (np.abs(np.log(rest.loss(parameters, data) / loss)) > _FAR * spread)
    floor = law.irreducible > (1 - _FLOOR_SHARE) * loss
    return ["small data" if o else "irreducible" if f else "power law" for o, f in zip(off, floor, strict=True)]


def _check_enough(parameters: Array, data: Array, by_size: bool) -> None:
    constants = 5 if by_size else 3
    counts = [("run", "runs", len(data), constants + 1), ("amount of data", "amounts of data", len(np.unique(data)), 3)]
    if by_size:
        counts.append(("model size", "model sizes", len(np.unique(parameters)), 3))
    for one, several, have, need in counts:
        if have < need:
            raise UsageError(
                f"{have} {one if have == 1 else several} cannot fit a law of {constants} constants",
                remedy=f"give at least {need} different {several}"
                + ", or runs of one model size, which need 4" * by_size,
            )


def _fit(parameters: Array, data: Array, loss: Array, by_size: bool, start: LossLaw | None) -> LossLaw:
    """Return the law at the minimum of Σ Huber(log predicted − log measured), from ``start`` or from a grid."""
    from scipy.optimize import minimize

    middles = (float(np.exp(np.log(parameters).mean())), float(np.exp(np.log(data).mean())))
    columns = (parameters / middles[0], data / middles[1]) if by_size else (data / middles[1],)
    powers, factors = _projected(columns, loss) if start is None else _scaled(start, middles, by_size)

    def objective(logs: Array) -> float:
        terms = np.exp(logs[: len(columns) + 1])
        exponents = np.exp(logs[len(columns) + 1 :])
        predicted = terms[0] + sum(t * c**-p for t, c, p in zip(terms[1:], columns, exponents, strict=True))
        miss = np.abs(np.log(predicted / loss))
        return float(np.where(miss < _HUBER, 0.5 * miss**2, _HUBER * (miss - 0.5 * _HUBER)).sum()) * 1e4

    begin = np.log(np.maximum(np.concatenate([factors, powers]), 1e-6))
    if start is None:
        options = {"maxiter": 4000, "maxfev": 4000, "fatol": 1e-9}
        begin = minimize(objective, begin, method="Nelder-Mead", options=options).x
    best = minimize(objective, begin, method="BFGS").x
    terms, exponents = np.split(np.exp(best), [len(columns) + 1])
    data_factor = float(terms[-1] * middles[1] ** exponents[-1])
    size_factor = float(terms[1] * middles[0] ** exponents[0]) if by_size else 0.0
    return LossLaw(
        float(terms[0]), size_factor, float(exponents[0]) if by_size else 0.0, data_factor, float(exponents[-1])
    )


def _projected(columns: Sequence[Array], loss: Array) -> tuple[Array, Array]:
    """Return exponents and non-negative factors (E first) with the least relative errors over a grid of exponents."""
    from scipy.optimize import nnls

    best = (np.inf, np.empty(0), np.empty(0))
    for powers in np.stack(np.meshgrid(*[_EXPONENTS] * len(columns)), axis=-1).reshape(-1, len(columns)):
        design = np.stack([np.ones_like(loss), *(c**-p for c, p in zip(columns, powers, strict=True))], axis=1)
        factors, rest = nnls(design / loss[:, None], np.ones_like(loss))
        if rest < best[0]:
            best = (float(rest), powers, factors)
    return best[1], best[2]


def _scaled(law: LossLaw, middles: tuple[float, float], by_size: bool) -> tuple[Array, Array]:
    """Return exponents and factors of a law, for N and D in units of their middles."""
    size = [(law.size_exponent, law.size_factor * middles[0] ** -law.size_exponent)] if by_size else []
    terms = [*size, (law.data_exponent, law.data_factor * middles[1] ** -law.data_exponent)]
    return np.array([power for power, _ in terms]), np.array([law.irreducible, *(factor for _, factor in terms)])
