"""The barrier of a synchronous server: collects a step's pushes and sums them in a fixed tree. Pure: no network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from tutti.comm.summation_tree import Node, children, merge_siblings
from tutti.parallel.parameter_server.parameter_shard import Vectors

MOST_BEHIND = 256
"""Steps that a rank may be behind the foremost one with backup workers; results are kept for as many steps."""


@dataclass
class Leaf:
    """The gradients of one push to a synchronous server, or the sum of several: a node of the summation tree.

    Attributes:
        vectors: gradients, one flat tensor for each dtype of the parameters.
        totals: (k,) float64, loss sums and digests that were pushed with the gradients.
        owned: whether ``vectors`` are the server's own memory, and not the sender's buffer.
    """

    vectors: Vectors
    totals: Tensor
    owned: bool


class ServerBarrier:
    """Sums the gradients that the logical workers or ranks push to one synchronous server, one step after the other.

    A logical worker is one of N fixed shares of the global batch. Without backup workers the order of summation is that
    of a fixed tree, whatever the order of arrival.

    Args:
        leaves: number of gradients (contributions) to a step, one of each logical worker or of each rank.
        backup: number of contributions that are not waited for.

    Attributes:
        clock: number of the step under way; None before the first push, which sets it.
        counted: indices of the contributions in the latest sum.
        late: number of contributions dropped because their sum had been made already.
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
        """Add the gradients of one logical worker or rank to this parameter server's sum of a step.

        A logical worker is one of N fixed shares of the global batch. ``vectors`` are read during the call only: the
        caller may overwrite them afterwards.

        Args:
            leaf: index of the worker or rank, below the constructor's ``leaves``.
            clock: number of the step.
            vectors: gradients, one flat tensor for each dtype of the parameters; they stay as they are.
            totals: loss sums and digests (hashes by which ranks in different steps are found), float64, of the same
                length in all pushes; kept, not copied.

        Returns:
            True if the gradients are part of the sum. False if the gradients are dropped, because the step's sum has
            been made already or ``leaf`` has pushed before in this step.

        Raises:
            ValueError: the step is later than the one under way, so that this server has missed some.
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
            merge_siblings(self._pieces, leaf, self._leaves, self._add)
        if node in self._pieces and not self._pieces[node].owned:
            self._pieces[node] = self._copied(self._pieces[node])
        return True

    def total(self, counted: Collection[int] | None = None) -> Leaf | None:
        """Return this server's sum of the gradients pushed in the step under way, once enough of them have arrived.

        Gradients come from logical workers (fixed shares of the global batch) or from ranks. Without backup workers the
        sum is made when all gradients have arrived; with b backup workers, as soon as all but b have. Further calls
        return the same object until ``finish``.

        Args:
            counted: indices of the workers or ranks whose gradients are to be summed, as the first server has chosen
                them; None to take all that have arrived.

        Returns:
            A ``Leaf`` with the summed gradients (``vectors``, one flat tensor for each dtype) and the summed loss sums
            and digests (``totals``); None while too many gradients are missing. The caller may change ``vectors`` in
            place; after ``finish`` they are reused for later gradients.
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
        """End the step whose gradients were summed on this server, and advance ``clock`` to the next step.

        The statistics of the step are kept for 256 steps, for ranks that ask later by the method ``result``.

        Args:
            result: statistics of the step, as a list of floats: digests, loss sums and sums of squares of the
                gradients.

        Raises:
            ValueError: no step is under way.
        """
        if self.clock is None:
            raise ValueError("no step is under way")
        self._results[self.clock] = result
        self._results.pop(self.clock - MOST_BEHIND, None)
        if self._sum is not None:
            self._give_back(self._sum)
        self._sum, self._pieces, self._came = None, {}, set()
        self.clock += 1

    def result(self, clock: int) -> list[float] | None:
        """Return the statistics of an earlier step that this server has finished, as given to ``finish``.

        Args:
            clock: number of the step.

        Returns:
            The list of floats: digests, loss sums and sums of squares of the gradients. None for a step that is not
            finished, or that is 256 or more steps before the latest finished one.
        """
        return self._results.get(clock)

    def _fold(self, node: Node) -> Leaf | None:
        """Return the sum of the contributions below ``node``, in the tree's order; None if there are none."""
        if node in self._pieces:
            return self._pieces.pop(node)
        if node[1] - node[0] == 1:
            return None
        left, right = (self._fold(child) for child in children(node))
        return self._add(left, right) if left is not None and right is not None else left or right

    def _add(self, left: Leaf, right: Leaf) -> Leaf:
        """Return left + right, added in place in the one that is the server's own memory: addition is commutative."""
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
