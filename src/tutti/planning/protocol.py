"""Predictions of one group under one protocol, the unit of a back-test."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tutti.planning.conformal_band import CheckedPrediction

NOT_STATED = "{} not stated"
"""Name of a group whose table does not say which it is."""

ZERO_SHOT = "zero-shot"
ANCHORED = "anchored"
EXTRAPOLATED = "extrapolated"

SEVERAL_SIZES = "several measured sizes"
ONE_ROW = "one measured row"
OTHER_SPLIT = "one measured row of another split of the model"
ONE_LENGTH = "one measured row of another sequence length"
PUBLISHED_ROWS = "published rows of the hardware"
PUBLISHED_ROWS_SPLIT = "published rows of the hardware and a split model"
OTHER_HARDWARE = "published rows of other hardware"
OTHER_HARDWARE_SPLIT = "published rows of other hardware and a split model"

_Element = TypeVar("_Element")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass
class GroupPredictions:
    """Predictions of one group of measurements under one protocol of the back-test, or the reason why there are none.

    The back-test predicts a part of published measurements from the rest, to learn how far predictions are off.

    Attributes:
        group: published source or workload, and hardware.
        protocol: measurements that the predictions may use: ``zero-shot`` none of the group, ``anchored`` the
            smallest, ``extrapolated`` sizes of at most half the predicted one; words behind a comma name a variant,
            such as ``extrapolated, more than 4 ×``.
        predictions: each with its measurement.
        reason: reason why measurements could not be predicted, or guesses in the predictions; may be empty.
        table: kind of the table of measurements, such as ``all-reduce``.
    """

    group: str
    protocol: str
    predictions: list[CheckedPrediction] = field(default_factory=list)
    reason: str = ""
    table: str = ""


def grouped(elements: Iterable[_Element], key: Callable[[_Element], _Key]) -> dict[_Key, list[_Element]]:
    """Group elements by ``key(element)``.

    Args:
        elements: the elements.
        key: function that returns the group of an element, a hashable value.

    Returns:
        A list of elements for each key; keys are in the order of first appearance, elements in their given order.
    """
    found: dict[_Key, list[_Element]] = {}
    for element in elements:
        found.setdefault(key(element), []).append(element)
    return found


def fit_limits(sizes: Sequence[float]) -> list[float]:
    """Return the limits at which a back-test divides measurements by size into a fitted and a predicted part.

    The back-test fits measurements of sizes (such as numbers of devices) up to a limit, and predicts measurements of at
    least twice the limit. For each power of two from 1 to half the largest size, the largest size up to this power is a
    limit, unless it is the smallest of all sizes.

    Args:
        sizes: sizes of the measurements, in any order.

    Returns:
        The limits in rising order; may be empty.

    >>> fit_limits([1, 2, 3, 4, 8, 16])
    [2, 4, 8]
    """
    ordered = sorted(set(sizes))
    found: list[float] = []
    power = 1.0
    while ordered and power <= ordered[-1] / 2:
        below = [size for size in ordered if size <= power]
        if len(below) >= 2 and below[-1] not in found and ordered[-1] >= 2 * below[-1]:
            found.append(below[-1])
        power *= 2
    return found
