"""The barrier of a synchronous server: what workers push in one step, added in one fixed tree. Pure: no network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from tutti.exchanges.server.shelf import Vectors
from tutti.schedules.tree import Node, children, settle

MOST_BEHIND = 256
"""Steps that a rank may be behind the others where backup workers let it; so long their results are kept."""


@dataclass
class Leaf:
    """Gradients and totals of one worker, or the sum over several; ``owned``: in memory of the server's own."""

    vectors: Vectors
    totals: Tensor
    owned: bool


class Rounds:
    """One step after the other.

    Args:
        leaves: contributions to a step.
        backup: how many of them need not be waited for.
    """

    def __init__(self, leaves: int, backup: int = 0) -> None:
        self._leaves, self._backup = leaves, backup
        self.clock: int | None = None
        self._pieces: dict[Node, Leaf] = {}
        self._came: set[int] = set()
        self._sum: Leaf | None = None
        self.counted: frozenset[int] = frozenset()
        self._free: list[Vectors] = []
        self._results: dict[int, list[float]] = {}
        self.late = 0

    def push(self, leaf: int, clock: int, vectors: Vectors, totals: Tensor) -> bool:
        """Take a contribution, whose vectors are the caller's memory; False where its step is over or has it.

        Raises ValueError where the step has not come yet: this server has forgotten some.
        """
        self.clock = clock if self.clock is None else self.clock
        if clock > self.clock:
            raise ValueError(f"step {clock} is pushed in step {self.clock}")
        if clock < self.clock or self._sum is not None or leaf in self._came:
            self.late += clock < self.clock or self._sum is not None
            return False
        self._came.add(leaf)
        node = (leaf, leaf + 1)
        self._pieces[node] = Leaf(vectors, totals, owned=False)
        if not self._backup:
            settle(self._pieces, leaf, self._leaves, self._add)
        if node in self._pieces and not self._pieces[node].owned:
            self._pieces[node] = self._copied(self._pieces[node])
        return True

    def total(self, counted: Collection[int] | None = None) -> Leaf | None:
        """The sum of the step under way; None while too few have come.

        ``counted``: the leaves that another server has decided on; None to take those that are here.
        """
        if self._sum is None:
            chosen = self._came if counted is None else set(counted)
            if not chosen <= self._came or len(chosen) < max(self._leaves - self._backup, 1):
                return None
            for leaf in self._came - chosen:
                self._give_back(self._pieces.pop((leaf, leaf + 1)))
            self._sum, self.counted = self._fold((0, self._leaves)), frozenset(chosen)
        return self._sum

    def finish(self, result: list[float]) -> None:
        """The step is over, and what came of it is kept for a while."""
        if self.clock is None or self._sum is None:
            raise ValueError("no step is under way")
        self._results[self.clock] = result
        self._results.pop(self.clock - MOST_BEHIND, None)
        self._give_back(self._sum)
        self._sum, self._pieces, self._came = None, {}, set()
        self.clock += 1

    def result(self, clock: int) -> list[float] | None:
        """What came of a step that is over."""
        return self._results.get(clock)

    def _fold(self, node: Node) -> Leaf | None:
        """The sum over the leaves below ``node`` that are there, in the tree's order."""
        if node in self._pieces:
            return self._pieces.pop(node)
        if node[1] - node[0] == 1:
            return None
        left, right = (self._fold(child) for child in children(node))
        return self._add(left, right) if left is not None and right is not None else left or right

    def _add(self, left: Leaf, right: Leaf) -> Leaf:
        """left + right, in whichever is the server's own memory: a sum of two does not depend on their order."""
        into, other = (left, right) if left.owned else (right, left)
        if not into.owned:
            into = self._copied(into)
        for mine, theirs in zip(into.vectors, other.vectors, strict=True):
            mine.add_(theirs)
        totals = left.totals + right.totals
        if other.owned:
            self._give_back(other)
        return Leaf(into.vectors, totals, owned=True)

    def _copied(self, leaf: Leaf) -> Leaf:
        own = self._free.pop() if self._free else [vector.clone() for vector in leaf.vectors]
        for mine, theirs in zip(own, leaf.vectors, strict=True):
            mine.copy_(theirs)
        return Leaf(own, leaf.totals, owned=True)

    def _give_back(self, leaf: Leaf) -> None:
        if leaf.owned:
            self._free.append(leaf.vectors)
