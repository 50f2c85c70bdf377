"""Check the bounds of numbers that options of several commands state. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral

from tutti.errors import UsageError


def check_least(numbers: Mapping[str, object], least: int = 1) -> None:
    """Raise UsageError, naming the option, if a value is no whole number, or below ``least``.

    Args:
        numbers: values by option, such as ``--steps``; None, for an option that is not given, passes.
        least: smallest permitted value.

    >>> check_least({"--steps": 0})
    Traceback (most recent call last):
    tutti.errors.UsageError: --steps is 0. Give a whole number of at least 1.
    """
    for option, number in numbers.items():
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
            raise UsageError(f"{option} is {number!r}", remedy=f"give a whole number of at least {least}")


def check_above_zero(numbers: Mapping[str, float | None]) -> None:
    """Raise UsageError, naming the option, if a number is not finite and above 0.

    Args:
        numbers: values by option, such as ``--clip``; None, for an option that is not given, passes.
    """
    for option, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"{option} is {number:g}", remedy="give a number above 0")
