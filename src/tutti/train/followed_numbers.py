"""Python numbers that remember from which logical workers' samples they were computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


class FollowedFloat(float):
    """A float whose results of arithmetic have its origins; ``followed`` makes it. A copy or pickle is a float."""

    origins: Mapping[Any, str]
    is_followed: Callable[[], bool]

    def __reduce__(self) -> Any:
        return float, (float(self),)


class FollowedInt(int):
    """An int whose results of arithmetic have its origins; ``followed`` makes it. A copy or pickle is an int."""

    origins: Mapping[Any, str]
    is_followed: Callable[[], bool]

    def __reduce__(self) -> Any:
        return int, (int(self),)


def followed(value: Any, origins: Mapping[Any, str], is_followed: Callable[[], bool]) -> Any:
    """Return a number that has the given origins, and gives them to each result of arithmetic with it.

    Args:
        value: a float or an int; a value of another type is returned as it is.
        origins: logical workers of which samples the number was computed.
        is_followed: whether results are to have origins still; if not, they are plain numbers.
    """
    kinds: dict[type, type[FollowedFloat] | type[FollowedInt]] = {float: FollowedFloat, int: FollowedInt}
    kind = kinds.get(type(value))
    if kind is None:
        return value
    number = kind(value)
    number.origins, number.is_followed = origins, is_followed
    return number


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, FollowedFloat) else int(value) if isinstance(value, FollowedInt) else value


def _joined(result: Any, *numbers: Any) -> Any:
    some = [each for each in numbers if isinstance(each, FollowedFloat | FollowedInt) and each.is_followed()]
    origins: dict[Any, str] = {}
    for each in some:
        origins |= each.origins
    return followed(result, origins, some[0].is_followed) if some else result


def _binary(function: Callable[[Any, Any], Any], swap: bool) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        one, two = (other, self) if swap else (self, other)
        return _joined(function(_plain(one), _plain(two)), one, two)

    return operate


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *more: _joined(function(_plain(self), *more), self)


for _kind in (FollowedFloat, FollowedInt):
    for _name in _BINARY:
        setattr(_kind, f"__{_name}__", _binary(getattr(operator, _name), swap=False))
        setattr(_kind, f"__r{_name}__", _binary(getattr(operator, _name), swap=True))
    _unaries: dict[str, Callable[..., Any]] = {"neg": operator.neg, "pos": operator.pos, "abs": abs, "round": round}
    for _name, _function in _unaries.items():
        setattr(_kind, f"__{_name}__", _unary(_function))
