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
class Multiplicative:
    """Multiplicative noise: the gradient of a batch of M is (1/M) Σ zₙ gₙ with z ~ N(1, M/M₀ - 1).

    Hoffer et al. 2017, arXiv 1705.08741, §4.

    Attributes:
        base_batch: M₀, the global batch with the desired noise, in samples.
    """

    base_batch: int = 0

    def __post_init__(self) -> None:
        if self.base_batch < 1:
            raise ValueError("it needs base_batch=N, the global batch whose noise the gradient is to have")

    def sigma(self, batch: int) -> float:
        """Return the standard deviation of the random weights on samples' losses that add the noise: σ = √(M/M₀ - 1).

        Args:
            batch: M, samples in the global batch; M₀ is ``base_batch``.

        Returns:
            σ; 0 for a batch no larger than the base.

        >>> round(Multiplicative(base_batch=128).sigma(1024), 9)
        2.645751311
        """
        return math.sqrt(max(batch / self.base_batch - 1, 0.0))


@dataclass(frozen=True, kw_only=True)
class _None:
    """No noise: the gradient as it is."""


KINDS: Mapping[str, type[Any]] = {"none": _None, "multiplicative": Multiplicative}


def check_noise(text: str, batch: int, adaptive: bool) -> Multiplicative | None:
    """Parse ``--gradient-noise``: ``none`` or ``multiplicative:base_batch=N``; return None for no noise.

    The noise makes the gradient of a large batch as noisy as that of ``base_batch`` samples.

    Args:
        text: value of the option.
        batch: global batch, in samples.
        adaptive: whether the run uses ``--lr-scale adascale``.

    Raises:
        UsageError: the text is malformed, a name or key is unknown (naming the nearest), the base is missing or larger
            than the batch, or the run is adaptive.
    """
    spec = Spec.parse(text, _OPTION)
    noise = spec.build(spec.choose(KINDS, "gradient noise"), _OPTION)
    if not isinstance(noise, Multiplicative):
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


def per_worker_option(adaptive: bool, noise: Multiplicative | None, noise_every: int | None) -> str | None:
    """Return the name of an option in use that needs each logical worker's gradient before the sum; None for none.

    With several such options the first in the order of the arguments is named, for an error message.

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
