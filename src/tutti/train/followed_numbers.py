"""Python numbers that remember from which logical workers' samples they were computed."""

from __future__ import annotations

import gc
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import CellType
from typing import Any, TypeAlias

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


_Number: TypeAlias = FollowedFloat | FollowedInt
_made: list[_Number] = []
"""The numbers of ``followed`` since the last ``make_plain``."""


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
    _made.append(number)
    return number


def make_plain() -> None:
    """Replace the numbers of ``followed`` that a script keeps in lists, dicts, objects and closures by plain numbers.

    To be called once no number is followed any more: files of ``torch.save`` are to hold floats, which the loading of
    weights alone accepts. Local variables, and tuples that are not elements of such containers, keep them.
    """
    pairs = [(number, _plain(number)) for number in _made]
    _made.clear()
    _replace(pairs, depth=3)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, FollowedFloat) else int(value) if isinstance(value, FollowedInt) else value


def _replace(pairs: Sequence[tuple[Any, Any]], depth: int) -> None:
    """Put new objects in the place of others in containers; a tuple with one is replaced by another tuple."""
    if not pairs or depth == 0:
        return
    by_id = {id(old): new for old, new in pairs}

    def new(value: Any) -> Any:
        return by_id.get(id(value), value)

    tuples = []
    own = {id(pair) for pair in pairs}
    for holder in gc.get_referrers(*(old for old, _ in pairs)):
        held = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if type(holder) is tuple and id(holder) not in own:
            tuples.append((holder, tuple(map(new, holder))))
        elif type(holder) in (list, deque):
            for index, value in enumerate(holder):
                holder[index] = new(value)
        elif type(holder) is CellType:
            holder.cell_contents = new(holder.cell_contents)
        elif type(held) is dict:
            held.update({key: new(value) for key, value in held.items() if id(value) in by_id})
    _replace(tuples, depth - 1)


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
