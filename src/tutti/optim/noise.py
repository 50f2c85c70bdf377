"""The noise of a smaller batch, put back into the gradient of a large one. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.errors import UsageError
from tutti.laws.noise import multiplicative_sigma
from tutti.spec import Spec

_OPTION = "--gradient-noise"


@dataclass(frozen=True, kw_only=True)
class Multiplicative:
    """(1/M) Σ zₙ gₙ with z ~ N(1, M/M₀ - 1) as the gradient of a batch of M.

    Hoffer et al. 2017, arXiv 1705.08741, §4.

    Attributes:
        base_batch: M₀, the global batch whose noise it is.
    """

    base_batch: int = 0

    def __post_init__(self) -> None:
        if self.base_batch < 1:
            raise ValueError("it needs base_batch=N, the global batch whose noise the gradient is to have")

    def sigma(self, batch: int) -> float:
        """σ of the weights at ``batch`` samples; 0 for a last batch that is no larger than the base."""
        return multiplicative_sigma(batch, self.base_batch) if batch > self.base_batch else 0.0


@dataclass(frozen=True, kw_only=True)
class _None:
    """The gradient as it is."""


KINDS: Mapping[str, type[Any]] = {"none": _None, "multiplicative": Multiplicative}


def check_noise(text: str, batch: int, adaptive: bool) -> Multiplicative | None:
    """What ``--gradient-noise`` says for a global batch of ``batch``; None for none.

    ``adaptive``: with ``--lr-scale adascale``.

    Raises UsageError, naming the nearest name or key, and where the base is larger than the batch, or the run
    adaptive.
    """
    spec = Spec.parse(text, _OPTION)
    noise = spec.build(spec.choose(KINDS, "gradient noise"), _OPTION)
    if not isinstance(noise, Multiplicative):
        return None
    if noise.base_batch > batch:
        raise UsageError(
            f"base_batch={noise.base_batch} is larger than the global batch of {batch}",
            where=_OPTION,
            why="a smaller batch has more noise already, and none can be taken away",
            remedy=f"take base_batch={batch} or less, or a larger batch",
        )
    if adaptive:
        raise UsageError(
            "--gradient-noise does not go with --lr-scale adascale",
            why="adascale raises the rate by as much noise as it measures, that which was added too",
            remedy="leave out one of the two",
        )
    return noise


def by_worker(adaptive: bool, noise: Multiplicative | None) -> str | None:
    """The option, if any, that needs each worker computed by itself: AdaScale its gradient, noise its draws."""
    if adaptive:
        return "--lr-scale adascale"
    return None if noise is None else _OPTION
