"""When the numbers of a run look like one of the classic mistakes. Rules of thumb, each with where it comes from.

They warn and never refuse. The bounds are wide on purpose: a run that is merely unusual must stay silent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Optimizer → (rate, batch that it is commonly used with, power of the batch in its rule): Goyal et al. 2017, arXiv
# 1706.02677, for SGD with momentum; Kingma and Ba 2015, arXiv 1412.6980, and the square-root rule for Adam. A guess.
_USUAL: Mapping[str, tuple[float, int, float]] = {
    "sgd": (0.1, 256, 1.0),
    "adam": (1e-3, 256, 0.5),
    "adamw": (1e-3, 256, 0.5),
}
_FAR = 10.0
_FEW = 200
_LARGE_PART = 0.05


def usual_rate(optimizer: str, batch: int, momentum: float = 0.0) -> float | None:
    """The learning rate that a rule of thumb gives at ``batch``; None where there is no rule.

    >>> usual_rate("sgd", 512, 0.9), usual_rate("adam", 1024)
    (0.2, 0.002)
    """
    if optimizer not in _USUAL:
        return None
    rate, base, power = _USUAL[optimizer]
    if optimizer == "sgd":
        # Momentum m multiplies what a gradient does in the end by 1 / (1 - m); the rule is for m = 0.9.
        rate *= 0.1 / (1 - momentum) if momentum > 0.9 else 1.0
    return rate * float((batch / base) ** power)


def rate_is_far(rate: float, usual: float | None) -> float | None:
    """By which factor the rate is off, where that is more than tenfold.

    >>> rate_is_far(0.001, 0.2), rate_is_far(0.1, 0.2), rate_is_far(4.0, 0.2)
    (0.005, None, 20.0)
    """
    if usual is None or rate <= 0:
        return None
    factor = rate / usual
    return factor if not 1 / _FAR <= factor <= _FAR else None


def too_few_updates(updates: int, dataset: int, batch: int, workers: int) -> bool:
    """Whether a large batch leaves few updates: under 200 in a run whose batch is a twentieth of the data or more.

    Smith et al. 2018, arXiv 1711.00489, stop growing the batch at a tenth; Hoffer et al. 2017, arXiv 1705.08741, find
    that as many updates bring the accuracy back.

    >>> too_few_updates(156, 50_000, 4096, 8), too_few_updates(1176, 50_000, 512, 8), too_few_updates(9, 50_000, 64, 1)
    (True, False, False)
    """
    return workers > 1 and updates < _FEW and batch >= _LARGE_PART * dataset


def equal_pairs(digests: Sequence[int | None]) -> list[tuple[int, int]]:
    """Ranks whose data have the same digest; ranks without data have None.

    >>> equal_pairs([7, 8, 7, None, None])
    [(0, 2)]
    """
    first: dict[int, int] = {}
    found = []
    for rank, digest in enumerate(digests):
        if digest is None:
            continue
        if digest in first:
            found.append((first[digest], rank))
        else:
            first[digest] = rank
    return found


def padding(samples: Sequence[int], most: int) -> int:
    """How many samples at the end are those of the beginning again, as a distributed sampler's padding is.

    Args:
        samples: digests of samples, in order.
        most: the longest padding to look for.

    >>> padding([1, 2, 3, 4, 1, 2], 3), padding([1, 2, 3, 4], 3), padding([5, 5, 5, 5], 2)
    (2, 0, 0)
    """
    if len(set(samples)) < len(samples) / 2:
        return 0  # data that repeats everywhere says nothing
    return next((k for k in range(min(most, len(samples) // 2), 0, -1) if samples[-k:] == samples[:k]), 0)


def is_sum(once: float, twice: float) -> bool:
    """Whether a loss doubles when its batch is given twice over: a sum where a mean is expected.

    >>> is_sum(3.0, 6.0), is_sum(3.0, 3.0), is_sum(0.0, 0.0)
    (True, False, False)
    """
    return math.isfinite(once) and abs(once) > 1e-12 and math.isclose(twice, 2 * once, rel_tol=1e-3)
