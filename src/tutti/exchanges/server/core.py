"""A parameter server without a network: clocks, staleness, and who may go on. Everything else is built around it.

Downpour: Dean et al., NIPS 2012, §4.1. Bounded staleness: Ho et al., NIPS 2013, §3. Rate over staleness: Zhang et al.
2016, arXiv 1511.05950, eq. 6.

A worker's *clock* is how many steps it has pushed. A push is known by its worker and clock, so that it counts once
however often and in whatever order it comes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple


class Pushed(NamedTuple):
    """What became of a push: whether it was taken, and how many updates came between its reading and it."""

    taken: bool
    staleness: int


class Core:
    """Of N workers.

    Args:
        workers: N.
        bound: steps that a worker may be ahead of the slowest, s; None for no bound.
        lease: seconds without a word after which a worker counts as gone.
        now: the time.
        gone: workers that will never say a word again; asked for where somebody has to wait.
        together: the run's steps are those of all workers together, and not what each makes.

    Attributes:
        version: updates made.
        staleness: how often which staleness was seen.
        stop_at: the step after which all are to stop, once one has asked for it; of each, or of all together.
        lost: updates that were acknowledged and are not here any more, as far as workers knew of them.
        stale: pushes that came back from the dead with parameters older than the bound allows, and were left out.
    """

    def __init__(
        self,
        workers: int,
        bound: int | None = None,
        lease: float = math.inf,
        now: Callable[[], float] = time.monotonic,
        gone: Callable[[], Collection[int]] = tuple,
        together: bool = False,
    ) -> None:
        self._together = together
        self._bound, self._lease, self._now = bound, lease, now
        self._look, self._gone = gone, frozenset[int]()
        self._clocks: list[int | None] = [None] * workers
        self._heard = [now()] * workers
        self.version = self.lost = self.stale = 0
        # Since this server was restored: from which version, what was lost before, who has not spoken.
        self._restored, self._lost_before, self._unheard = 0, 0, set[int]()
        self.staleness: Counter[int] = Counter()
        self.stop_at: int | None = None

    def hear(self, worker: int, clock: int, seen: int = 0) -> None:
        """A worker is at ``clock`` and has parameters of ``seen`` updates. All begin where the first one is."""
        if all(known is None for known in self._clocks):
            self._clocks = [clock] * len(self._clocks)
        self._heard[worker] = self._now()
        self._clocks[worker] = max(clock, self._clocks[worker] or 0)
        if worker in self._unheard:
            self._unheard.discard(worker)
            self.lost = max(self.lost, self._lost_before + seen - self._restored)

    def push(self, worker: int, clock: int, seen: int, update: Callable[[int], None] | None) -> Pushed:
        """One step of a worker: ``update(staleness)`` is called at most once for each; None for a step without.

        ``seen``: the version that it computed with.
        """
        # A worker that was taken for gone is not among those that this looks at.
        done, slowest = self._clocks[worker], self.slowest()
        self.hear(worker, clock, seen)
        if done is not None and clock < done:
            return Pushed(False, 0)
        self._clocks[worker] = clock + 1
        staleness = max(self.version - seen, 0)
        if self._bound is not None and clock + self._bound < slowest:
            self.stale += 1
            return Pushed(False, staleness)
        if update is not None:
            update(staleness)
            self.version += 1
            self.staleness[staleness] += 1
        return Pushed(update is not None, staleness)

    def slowest(self) -> int:
        """The smallest clock of the workers that are not gone."""
        now, workers = self._now(), enumerate(zip(self._clocks, self._heard, strict=True))
        alive = [clock or 0 for w, (clock, heard) in workers if now - heard <= self._lease and w not in self._gone]
        return min(alive, default=0)

    def may_proceed(self, worker: int) -> bool:
        """Whether a worker is at most ``bound`` steps ahead of the slowest, and may do another one.

        >>> core = Core(2, bound=2)
        >>> core.hear(0, 5), core.hear(1, 7), core.may_proceed(1)
        (None, None, True)
        >>> core.hear(1, 8), core.may_proceed(1), core.may_proceed(0)
        (None, False, True)
        """
        if self._bound is None or self._ahead(worker) <= self._bound:
            return True
        self._gone = frozenset(self._look())
        return self._ahead(worker) <= self._bound

    def _ahead(self, worker: int) -> int:
        return (self._clocks[worker] or 0) - self.slowest()

    def ask_to_stop(self) -> None:
        """A worker asks all to stop: after the first step that none of them can have begun without hearing of it."""
        if self.stop_at is None:
            self.stop_at = (self.clock if self._together else max(self.steps)) + 1

    def forget_workers(self) -> None:
        """All go on from where the first to speak is: another state was loaded."""
        self._clocks, self.stop_at = [None] * len(self._clocks), None

    @property
    def clock(self) -> int:
        """Steps that all workers have made together: as many as each would have made, were they equally fast.

        >>> core = Core(3)
        >>> [core.push(worker, clock, 0, None).taken for worker, clock in ((0, 0), (0, 1), (1, 0), (0, 2))]
        [False, False, False, False]
        >>> core.steps, core.clock
        ([3, 1, 0], 1)
        """
        return sum(self.steps) // len(self._clocks)

    @property
    def steps(self) -> list[int]:
        """Of each worker, as far as they are known."""
        return [clock or 0 for clock in self._clocks]

    def state(self) -> dict[str, Any]:
        """What is worth keeping, as a JSON value."""
        return {"version": self.version, "clocks": self._clocks, "lost": self.lost, "stop_at": self.stop_at}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was."""
        self.version, self.lost, self.stop_at = state["version"], state["lost"], state["stop_at"]
        self._clocks = list(state["clocks"])
        self._heard = [self._now()] * len(self._clocks)
        self._restored, self._lost_before = self.version, self.lost
        self._unheard = set(range(len(self._clocks)))
