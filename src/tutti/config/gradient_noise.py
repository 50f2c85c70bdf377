"""Multiplicative gradient noise: give a large batch's gradient the noise of a smaller batch. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.config.spec import Spec
from tutti.errors import UsageError

_OPTION = "--gradient-noise"


@dataclass(frozen=True, kw_only=True)
class MultiplicativeNoise:
    """Multiplicative noise: the gradient of a batch of M samples is (1/M) Σ zₙ gₙ.

    gₙ is the gradient of sample n, and zₙ a random weight of mean 1 and variance M/M₀ - 1, normally distributed (Hoffer
    et al. 2017, arXiv 1705.08741, §4).

    Attributes:
        base_batch: M₀, the global batch with the desired noise, in samples; must be given.

    Raises:
        ValueError: ``base_batch`` is below 1 or not given.
    """

    base_batch: int = 0

    def __post_init__(self) -> None:
        if self.base_batch < 1:
            raise ValueError("it needs base_batch=N, the global batch whose noise the gradient is to have")

    def sigma(self, batch: int) -> float:
        """Return σ = √(M/M₀ - 1), the standard deviation of the random weights by which samples' losses are multiplied.

        Weights of mean 1 and this σ give the gradient of M samples the noise of M₀ samples, the option ``base_batch``
        of ``--gradient-noise``.

        Args:
            batch: M, samples in the global batch.

        Returns:
            σ; 0 if M is at most M₀.

        >>> round(MultiplicativeNoise(base_batch=128).sigma(1024), 9)
        2.645751311
        """
        return math.sqrt(max(batch / self.base_batch - 1, 0.0))


@dataclass(frozen=True, kw_only=True)
class _None:
    """No noise: the gradient as it is."""


KINDS: Mapping[str, type[Any]] = {"none": _None, "multiplicative": MultiplicativeNoise}


def check_noise(text: str, batch: int, adaptive: bool) -> MultiplicativeNoise | None:
    """Parse ``--gradient-noise``: ``none`` or ``multiplicative:base_batch=N``; return its options, None for ``none``.

    ``multiplicative`` multiplies the samples' losses by random weights, so that the gradient of the global batch is as
    noisy as the gradient of N samples.

    Args:
        text: value of the option.
        batch: global batch, in samples.
        adaptive: whether the run uses ``--lr-scale adascale``.

    Returns:
        A ``MultiplicativeNoise``, whose integer ``base_batch`` is N; None for ``none``.

    Raises:
        UsageError: the text is malformed, a name or key is unknown (naming the nearest), ``base_batch`` is missing or
            larger than ``batch``, or noise is combined with ``--lr-scale adascale``.
    """
    spec = Spec.parse(text, _OPTION)
    noise = spec.build(spec.choose(KINDS, "gradient noise"), _OPTION)
    if not isinstance(noise, MultiplicativeNoise):
        return None
    if noise.base_batch > batch:
        raise UsageError(
            f"base_batch={noise.base_batch} is larger than the global batch of {batch}",
            where=_OPTION,
            why="a smaller batch has more noise already, and noise cannot be removed",
            remedy=f"take base_batch={batch} or less, or a larger batch",
        )
    if adaptive:
        raise UsageError(
            "--gradient-noise cannot be combined with --lr-scale adascale",
            why="adascale would measure the added noise, too, and raise the rate",
            remedy="leave out one of the two",
        )
    return noise


def per_worker_option(adaptive: bool, noise: MultiplicativeNoise | None, noise_every: int | None) -> str | None:
    """Return the first option in use that needs each logical worker's own gradient, before the sum over workers.

    A logical worker is one of N fixed shares of the global batch. The result is the option's text for an error message:
    ``--lr-scale adascale``, else ``--noise-every``, else ``--gradient-noise``; None if none of them is in use.

    Args:
        adaptive: whether the run uses ``--lr-scale adascale``, which needs each worker's gradient.
        noise: noise on the gradient, whose random weights are drawn for each worker; None for no noise.
        noise_every: interval in steps at which the noise scale is measured, which needs each worker's gradient; None
            for never.
    """
    if adaptive:
        return "--lr-scale adascale"
    if noise_every is not None:
        return "--noise-every"
    return None if noise is None else _OPTION
