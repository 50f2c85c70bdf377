"""Numbers in JSON files, which have no NaN and no infinity: null stands for both."""

from __future__ import annotations

import math


def to_json_number(value: float | None) -> float | None:
    """Return a number as a JSON value: None in place of NaN and infinity, and of a missing number.

    >>> to_json_number(0.5), to_json_number(math.inf)
    (0.5, None)
    """
    return value if value is None or math.isfinite(value) else None


def from_json_number(value: float | None) -> float:
    """Return a number from a JSON value, in which null stands for a number that is not finite: None becomes NaN."""
    return math.nan if value is None else float(value)
