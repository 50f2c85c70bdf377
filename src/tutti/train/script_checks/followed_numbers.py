"""Python numbers that remember from which logical workers' samples they were computed."""

from __future__ import annotations

import functools
import gc
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from types import CellType
from typing import Any

import torch

_FEW = 200
"""Most objects whose containers Python looks for by itself."""
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


class FollowedNumber:
    """Base of numbers that remember their origins: the micro-batches from whose samples they were computed.

    ``FollowedNumbers.follow`` makes them. The result of ``+``, ``-``, ``*``, ``/``, ``//``, ``%``, ``**``, ``abs`` and
    ``round`` with such a number is such a number, too, with the origins of all operands, while ``is_followed`` of
    its ``group`` returns True. ``float()``, ``int()``, copies and pickles are plain numbers.

    Attributes:
        origins: for each place (logical worker, a fixed share of the global batch, and micro-batch) of whose samples
            the number was computed, a line of the script.
        group: the object that made the number.
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

    ``make_plain`` replaces them by plain numbers once the origins are no longer needed.

    Args:
        is_followed: returns whether results of arithmetic are to have origins now; if not, they are plain numbers. A
            script may keep numbers, and with them this function, longer than its run.
    """

    def __init__(self, is_followed: Callable[[], bool]) -> None:
        self.is_followed = is_followed
        self._made: list[FollowedNumber] = []

    def follow(self, value: Any, origins: Mapping[Any, str]) -> Any:
        """Return a number that has the given origins, and gives them to each result of arithmetic with it.

        Args:
            value: a float or an int; a value of another type, also of a subclass such as bool, is returned as it is.
            origins: a line of the script, as text for an error, for each micro-batch (``Place``: index of the logical
                worker, a fixed share of the global batch, and of the micro-batch) from whose samples the number was
                computed: the line where values of this micro-batch met those of another one.

        Returns:
            A ``FollowedFloat`` or ``FollowedInt``, a subclass of the type of ``value``, with ``origins`` as attribute.
        """
        kinds: dict[type, Callable[[Any], FollowedNumber]] = {float: FollowedFloat, int: FollowedInt}
        kind = kinds.get(type(value))
        if kind is None:
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
        _replace(made, [_plain(number) for number in made], depth=3)


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


def _replace(old: Sequence[Any], new: Sequence[Any], depth: int) -> None:
    """Put new objects in the place of old ones in containers; a tuple of an old one is replaced by another tuple.

    Args:
        old: the objects; this list is left as it is.
        new: an object for each of them.
        depth: how many tuples deep to look.
    """
    if not old or depth == 0:
        return
    by_id = dict(zip(map(id, old), new, strict=True))

    def now(value: Any) -> Any:
        return by_id.get(id(value), value)

    tuples = []
    # gc.get_referrers compares each reference of the process with each object, which takes minutes for many.
    for holder in gc.get_referrers(*old) if len(old) <= _FEW else gc.get_objects():
        if holder is old or by_id.keys().isdisjoint(map(id, gc.get_referents(holder))):
            continue
        held = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if type(holder) is tuple:
            tuples.append(holder)
        elif type(holder) in (list, deque):
            for index, value in enumerate(holder):
                holder[index] = now(value)
        elif type(holder) is CellType:
            holder.cell_contents = now(holder.cell_contents)
        elif type(held) is dict:
            held.update({key: now(value) for key, value in held.items() if id(value) in by_id})
    _replace(tuples, [tuple(map(now, each)) for each in tuples], depth - 1)


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
