"""Which cases of a table ``make test`` runs: few that hold every pair of values; ``make full`` runs the others.

Of each test with several parameters it runs few cases that hold every value of each (``conftest.py``). The equivalence
table has a choice of its own, which knows what its cases cost (``tests/contract/table.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]


def covering(rows: Sequence[Row], strength: int = 2) -> list[Row]:
    """Few of ``rows``, in their order, that hold every combination of values of any ``strength`` columns in them.

    Greedy: the row with most combinations that are missing, the first of several.

    >>> covering(list(product("ab", "cd", "ef")))
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    >>> covering(list(product("ab", "cd", "ef")), strength=1)
    [('a', 'c', 'e'), ('b', 'd', 'f')]
    """
    chosen = fewest([set(combinations(enumerate(map(str, row)), strength)) for row in rows])
    return [row for number, row in enumerate(rows) if number in chosen]


def thinned(rows: Sequence[Any], of: int, turn: int = 0) -> list[Any]:
    """For ``parametrize``: every ``of``-th row from row ``turn`` on; the rest are marked ``full``.

    >>> [row for row in thinned([(1,), (2,), (3,), (4,)], 3) if type(row) is tuple]
    [(1,), (4,)]
    """
    rest = {number: row if isinstance(row, tuple) else (row,) for number, row in enumerate(rows)}
    return [
        row if number % of == turn else pytest.param(*rest[number], marks=pytest.mark.full)
        for number, row in enumerate(rows)
    ]


def fewest(held: Sequence[AbstractSet[Hashable]], *, spread: bool = False) -> set[int]:
    """Numbers of few sets that together hold what all of them hold.

    Greedy: the set with most that is missing, the first of several; with ``spread`` the one of them whose members the
    chosen sets hold least often.
    """
    places: dict[Hashable, int] = {}
    # A number's bits are the members of a set: each process of the tests chooses 80 times among hundreds of sets.
    masks = [sum(1 << places.setdefault(member, len(places)) for member in members) for members in held]
    missing, used, chosen = (1 << len(places)) - 1, Counter[Hashable](), set[int]()
    while missing:
        gains = [(mask & missing).bit_count() for mask in masks]
        most = max(gains)
        best = (number for number, gain in enumerate(gains) if gain == most)
        number = min(best, key=lambda n: sum(used[m] for m in held[n])) if spread else next(best)
        chosen.add(number)
        missing &= ~masks[number]
        used.update(held[number])
    return chosen


def every_value(cases: Sequence[Row]) -> set[int]:
    """Numbers of few cases that together hold every value of each column, each beside many values of the others.

    >>> sorted(every_value(list(product("abcd", "xyz"))))
    [0, 4, 8, 9]
    >>> sorted(every_value(list(product("ab", "x"))))
    [0, 1]
    """
    return fewest([set(enumerate(case)) for case in cases], spread=True)


def table(*columns: Sequence[Any], strength: int = 2) -> list[Any]:
    """All rows of a table for ``parametrize``; those outside its covering are marked ``full``."""
    return marked(list(product(*columns)), strength)


@dataclass(frozen=True)
class Continuations:
    """Which places of a list save a checkpoint, all or every ``of``-th from ``turn`` on, and which continue it.

    All that are asked for, where all save; else the first of them, so that each place saves once, and continues once.
    """

    turn: int = 0
    of: int = 1

    def __call__(self, places: Sequence[Any], *offsets: int) -> Iterator[tuple[Any, list[Any]]]:
        """Each place that saves with those that continue it, which stand ``offsets`` behind it in the list.

        >>> list(Continuations(turn=1, of=2)("abcd", 1, 2))
        [('b', ['c']), ('d', ['a'])]
        >>> list(Continuations()("abc", 1, 2))
        [('a', ['b', 'c']), ('b', ['c', 'a']), ('c', ['a', 'b'])]
        """
        others = offsets if self.of == 1 else offsets[:1]
        for number in range(self.turn, len(places), self.of):
            yield places[number], [places[(number + offset) % len(places)] for offset in others]


def shared_out(*names: str) -> list[Any]:
    """For ``parametrize``: each name with its share of the places that save; marked ``full``: with all of them."""
    ordinary = [
        pytest.param(name, Continuations(turn, len(names)), id=f"{name} in turn") for turn, name in enumerate(names)
    ]
    return ordinary + [pytest.param(name, Continuations(), id=name, marks=pytest.mark.full) for name in names]


def in_turn(column: Sequence[Any], other: Sequence[Any], each: int = 1) -> list[Any]:
    """For ``parametrize``: each value of a column beside ``each`` of another in turn; beside the rest marked ``full``.

    >>> [row for row in in_turn("abcd", "xyz") if type(row) is tuple]
    [('a', 'x'), ('b', 'y'), ('c', 'z'), ('d', 'x')]
    """
    chosen = {(number, (number * each + more) % len(other)) for number in range(len(column)) for more in range(each)}
    places = product(range(len(column)), range(len(other)))
    return [
        (column[a], other[b]) if (a, b) in chosen else pytest.param(column[a], other[b], marks=pytest.mark.full)
        for a, b in places
    ]


def marked(rows: Sequence[Row], strength: int = 2) -> list[Any]:
    """The same of rows that are no whole product."""
    ordinary = covering(rows, strength)
    return [row if row in ordinary else pytest.param(*row, marks=pytest.mark.full) for row in rows]
