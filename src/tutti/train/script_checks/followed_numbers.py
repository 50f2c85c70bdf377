"""Python numbers that remember from which logical workers' samples they were computed."""

from __future__ import annotations

import functools
import operator
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CellType
from typing import Any

import torch

from tutti.config.variables import is_off
from tutti.python_compat import holders_of

_DEPTH = 3
"""How many tuples deep numbers are replaced."""
_DICTS = dict, defaultdict, OrderedDict, Counter
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


class FollowedNumber:
    """Base of numbers that remember their origins, such as the micro-batches from whose samples they were computed.

    ``FollowedNumbers.follow`` makes them. The result of ``+``, ``-``, ``*``, ``/``, ``//``, ``%``, ``**``, ``abs`` and
    ``round`` with such a number is such a number, too, with the origins of all operands, while ``is_followed`` of
    its ``group`` returns True. ``float()``, ``int()``, copies and pickles are plain numbers.

    Attributes:
        origins: a line of the script, or an empty text, for each origin of the number: in ``CrossWorkerWatch`` a
            micro-batch (``MicroBatchKey``); in ``CrossStepWatch`` a kept value, or the number of a step.
        group: the ``FollowedNumbers`` that made the number.
        plain_type: type of the number without origins.
    """

    origins: Mapping[Any, str]
    group: FollowedNumbers
    plain_type: Any

    def __reduce__(self) -> Any:
        return self.plain_type, (self.plain_type(self),)


class FollowedFloat(FollowedNumber, float):
    """A float that remembers from which micro-batches' samples it was computed, and passes this on in arithmetic."""

    plain_type = float


class FollowedInt(FollowedNumber, int):
    """An int that remembers from which micro-batches' samples it was computed, and passes this on in arithmetic."""

    plain_type = int


class FollowedNumbers:
    """Makes numbers that remember from which micro-batches' samples they were computed (their origins).

    ``make_plain`` replaces them by plain numbers once the origins are no longer needed. With ``TUTTI_DIAGNOSTICS=off``
    it makes none.

    Args:
        is_followed: returns whether results of arithmetic are to have origins now; if not, they are plain numbers. A
            script may keep numbers, and with them this function, longer than its run.
    """

    def __init__(self, is_followed: Callable[[], bool]) -> None:
        self.is_followed = is_followed
        self._enabled = not is_off("DIAGNOSTICS", os.environ)
        self._made: list[FollowedNumber] = []

    def follow(self, value: Any, origins: Mapping[Any, str]) -> Any:
        """Return a number that has the given origins, and gives them to each result of arithmetic with it.

        Args:
            value: a float or an int; a value of another type, also of a subclass such as bool, is returned as it is; so
                is every value with ``TUTTI_DIAGNOSTICS=off``.
            origins: the number's attribute ``origins``: for each origin, such as a micro-batch, the line of the script
                where its values met those of the present micro-batch, as text for an error; or an empty text.

        Returns:
            A ``FollowedFloat`` or ``FollowedInt``, a subclass of the type of ``value``, with ``origins`` as attribute.
        """
        kinds: dict[type, Callable[[Any], FollowedNumber]] = {float: FollowedFloat, int: FollowedInt}
        kind = kinds.get(type(value))
        if kind is None or not self._enabled:
            return value
        _save_plain_numbers()
        number = kind(value)
        number.origins, number.group = origins, self
        self._made.append(number)
        return number

    def make_plain(self) -> None:
        """Replace followed numbers that a script keeps in lists, dicts, objects and closures by plain floats and ints.

        To be called once the origins of numbers are no longer needed, so that files of ``torch.save`` hold floats:
        ``torch.load(weights_only=True)`` accepts no other class; until then ``torch.save`` replaces them itself. Local
        variables, and tuples that are not elements of such containers, keep the followed numbers. Looks at all
        containers of the process, which takes tenths of a second; does nothing if ``follow`` has made no number since
        the previous call.
        """
        if not self._made:
            return
        made, self._made = self._made, []
        for holder in holders_of(made, _DEPTH):
            self._replace_in(holder)

    def _replace_in(self, holder: Any) -> None:
        """Replace this object's numbers in a list, deque, dict, cell or the attributes of an object.

        Another thread may change the container meanwhile. CPython goes on with another thread after a call and at the
        end of a loop, and so never between a comparison here and the assignment after it.
        """
        if type(holder) in (list, deque):
            for index, old in enumerate(tuple(holder)):
                new = self._replaced(old)
                with suppress(IndexError):
                    if new is not old and holder[index] is old:
                        holder[index] = new
        elif type(holder) is CellType:
            with suppress(ValueError):
                old = holder.cell_contents
                new = self._replaced(old)
                if holder.cell_contents is old:
                    holder.cell_contents = new
        else:
            held = holder if type(holder) in _DICTS else _attributes(holder)
            for key, old in tuple(held.items()):
                new = self._replaced(old)
                if new is not old and key in held and held[key] is old:
                    held[key] = new

    def _replaced(self, value: Any, depth: int = _DEPTH) -> Any:
        """Return a plain number for one of this object's, a tuple of plain numbers for one with some, or the value."""
        # isinstance would ask other objects for their class: torch.distributed.reduce_op warns then.
        if issubclass(type(value), FollowedNumber):
            return _plain(value) if value.group is self else value
        if type(value) is not tuple or not depth:
            return value
        new = tuple([self._replaced(each, depth - 1) for each in value])
        return value if all(map(operator.is_, value, new)) else new


@functools.cache
def _save_plain_numbers() -> None:
    """Make ``torch.save`` of this process write followed numbers as floats and ints: see ``make_plain``."""
    inner = torch.save

    @functools.wraps(inner)
    def save(obj: object, *args: Any, **named: Any) -> None:
        inner(_without_origins(obj), *args, **named)

    torch.save = torch.serialization.save = save


def _without_origins(value: Any, within: frozenset[int] = frozenset()) -> Any:
    """Return a value with plain numbers in place of followed ones in lists, tuples and dicts; itself if it has none.

    Args:
        value: any object; it stays as it is.
        within: ids of the containers that it is in.
    """
    if type(value) not in (list, tuple, dict, OrderedDict) or id(value) in within:
        return _plain(value)
    within |= {id(value)}
    old = list(value.values()) if isinstance(value, dict) else value
    new = [_without_origins(each, within) for each in old]
    if all(map(operator.is_, old, new)):
        return value
    return type(value)(zip(value, new, strict=True) if isinstance(value, dict) else new)


def _plain(value: Any) -> Any:
    return value.plain_type(value) if isinstance(value, FollowedNumber) else value


def _attributes(holder: Any) -> dict[Any, Any]:
    """Return the dict of an object's attributes; an empty one if it has none."""
    try:
        # Not the object's own __getattr__, nor a property.
        held = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return held if type(held) is dict else {}


def _joined(result: Any, *numbers: Any) -> Any:
    some = [each for each in numbers if isinstance(each, FollowedNumber) and each.group.is_followed()]
    origins: dict[Any, str] = {}
    for each in some:
        origins |= each.origins
    return some[0].group.follow(result, origins) if some else result


def _binary(function: Callable[[Any, Any], Any], swap: bool) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        one, two = (other, self) if swap else (self, other)
        return _joined(function(_plain(one), _plain(two)), one, two)

    return operate


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *more: _joined(function(_plain(self), *more), self)


for _name in _BINARY:
    setattr(FollowedNumber, f"__{_name}__", _binary(getattr(operator, _name), swap=False))
    setattr(FollowedNumber, f"__r{_name}__", _binary(getattr(operator, _name), swap=True))
_unaries: dict[str, Callable[..., Any]] = {"neg": operator.neg, "pos": operator.pos, "abs": abs, "round": round}
for _name, _function in _unaries.items():
    setattr(FollowedNumber, f"__{_name}__", _unary(_function))
