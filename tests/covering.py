"""Which cases of a table ``make test`` runs: few that hold every pair of values; ``make full`` runs the others.

The equivalence table has a choice of its own, which knows what its cases cost (``tests/contract/table.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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


def fewest(held: Sequence[AbstractSet[Hashable]]) -> set[int]:
    """Numbers of few sets that together hold what all of them hold."""
    missing: set[Hashable] = set().union(*held)
    chosen = set()
    while missing:
        best = max(range(len(held)), key=lambda number: len(held[number] & missing))
        chosen.add(best)
        missing -= held[best]
    return chosen


def table(*columns: Sequence[Any], strength: int = 2) -> list[Any]:
    """All rows of a table for ``parametrize``; those outside its covering are marked ``full``."""
    return marked(list(product(*columns)), strength)


@dataclass(frozen=True)
class Directions:
    """Which of two others a checkpoint is continued by: both, or the one whose turn it is."""

    turn: int | None = None

    def __call__(self, one: Any, other: Any, number: int) -> tuple[Any, ...]:
        return (one, other) if self.turn is None else ((one, other)[(number + self.turn) % 2],)


def both_or_in_turn(*names: str) -> list[Any]:
    """For ``parametrize``: each name with others in turn, other ones for the next name; marked ``full``: with both."""
    ordinary = [pytest.param(name, Directions(turn), id=f"{name} in turn") for turn, name in enumerate(names)]
    return ordinary + [pytest.param(name, Directions(), id=name, marks=pytest.mark.full) for name in names]


def marked(rows: Sequence[Row], strength: int = 2) -> list[Any]:
    """The same of rows that are no whole product."""
    ordinary = covering(rows, strength)
    return [row if row in ordinary else pytest.param(*row, marks=pytest.mark.full) for row in rows]
