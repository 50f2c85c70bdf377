"""Clocks and staleness of the workers of an asynchronous parameter server, without network or tensors.

Downpour: Dean et al., NIPS 2012, §4.1. Bounded staleness: Ho et al., NIPS 2013, §3. Rate over staleness: Zhang et al.
2016, arXiv 1511.05950, eq. 6.

The *clock* of a logical worker is the number of steps it has pushed. Worker and clock identify a push, so that repeated
or reordered pushes count once.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple


class Pushed(NamedTuple):
    """Outcome of a push of a gradient to an asynchronous parameter server by a logical worker.

    A logical worker is a share of the global batch that steps by itself.

    Attributes:
        taken: whether an update was made.
        staleness: number of updates between the worker's read of the parameters and its push; 0 for a repeated push.
    """

    taken: bool
    staleness: int


class StalenessTracker:
    """Tracks steps, staleness and lost updates of the logical workers of one asynchronous parameter server.

    A logical worker is one of N fixed shares of the global batch, with its own numbering of steps. Also decides which
    workers may begin a step, where a worker may be only so many steps ahead of the slowest.

    Args:
        workers: number of logical workers.
        bound: steps that a worker may be ahead of the slowest; None for no bound.
        lease: seconds without a request after which a worker counts as gone.
        now: returns the time in seconds.
        gone: returns the indices of the workers of lost ranks; called only when a worker would have to wait.
        together: count the run's steps over all workers together (``steps=all``), not for each worker.

    Attributes:
        version: number of updates made.
        staleness: how many updates have had each staleness, by staleness: the number of updates made between a worker's
            read and its push.
        stop_at: number of the step after which all workers stop; None before a worker has asked for it. It counts
            ``clock`` with ``together``, else the steps of each worker.
        lost: acknowledged updates that are missing since the server was restored, as far as workers have seen them.
        stale: pushes dropped because their worker, after its lease had run out, was behind the slowest by more than
            the bound.
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
        # Since this server was restored: restored version, updates lost before, workers without a request since.
        self._restored, self._lost_before, self._unheard = 0, 0, set[int]()
        self.staleness: Counter[int] = Counter()
        self.stop_at: int | None = None

    def hear(self, worker: int, clock: int, seen: int = 0) -> None:
        """Record a request of a logical worker to this server: its number of steps, and the time of the request.

        A logical worker is a share of the global batch that steps by itself. The worker's lease, the time without a
        request after which the worker counts as gone, begins anew. The very first request sets the steps of all
        workers. After a restore of the server, ``seen`` shows how many updates were lost.

        Args:
            worker: index of the logical worker.
            clock: steps that the worker has pushed.
            seen: version of the worker's parameters: the number of updates that these parameters contain.
        """
        if all(known is None for known in self._clocks):
            self._clocks = [clock] * len(self._clocks)
        self._heard[worker] = self._now()
        self._clocks[worker] = max(clock, self._clocks[worker] or 0)
        if worker in self._unheard:
            self._unheard.discard(worker)
            self.lost = max(self.lost, self._lost_before + seen - self._restored)

    def push(self, worker: int, clock: int, seen: int, update: Callable[[int], None] | None) -> Pushed:
        """Record that a logical worker pushes the gradient of one step to this server, and make its update.

        A logical worker is a share of the global batch that steps by itself. Two kinds of push make no update: a
        repeated push, and a push of a worker that is behind the slowest by more than the staleness bound (its lease had
        run out).

        Args:
            worker: index of the logical worker.
            clock: steps that the worker had pushed before.
            seen: number of updates in the parameters that the gradient was computed with.
            update: called as ``update(staleness)`` to make the update; None for a step without one.

        Returns:
            A ``Pushed`` of two: ``taken``, whether an update was made, and ``staleness``, the number of updates since
            the worker's read of the parameters, 0 for a repeated push.
        """
        # Computed before ``hear``, so that a worker whose lease had run out does not count in it.
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
        """Return the number of steps that the slowest logical worker has pushed; 0 where all workers are gone.

        A logical worker is a share of the global batch that steps by itself. A worker that has sent no request for the
        lease time, or whose rank is known to be lost, is gone and does not count.
        """
        now, workers = self._now(), enumerate(zip(self._clocks, self._heard, strict=True))
        alive = [clock or 0 for w, (clock, heard) in workers if now - heard <= self._lease and w not in self._gone]
        return min(alive, default=0)

    def may_proceed(self, worker: int) -> bool:
        """Return whether a logical worker may begin a step: it is at most ``bound`` steps ahead of the slowest worker.

        A logical worker is a share of the global batch that steps by itself. Always True without a bound. Where the
        worker is too far ahead, the call looks up which ranks are lost; from then on their workers do not count as the
        slowest.

        Args:
            worker: index of the logical worker.

        >>> core = StalenessTracker(2, bound=2)
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
        """Choose the step after which all logical workers stop, and store it in ``stop_at``.

        Workers step at their own speeds. ``stop_at`` is 1 + the largest number of steps that any worker has pushed, or
        1 + the mean number where the run counts the steps of all workers together. The server's next replies carry it
        to the workers, so that each of them knows it before it completes that step. Later calls change nothing.
        """
        if self.stop_at is None:
            self.stop_at = (self.clock if self._together else max(self.steps)) + 1

    def forget_workers(self) -> None:
        """Forget this server's step numbers of all logical workers, and the step after which they stop (``stop_at``).

        Called after a checkpoint was loaded into the server. Logical workers are fixed shares of the global batch.
        ``stop_at`` becomes None; the next request of a worker sets the step numbers of all of them.
        """
        self._clocks, self.stop_at = [None] * len(self._clocks), None

    @property
    def clock(self) -> int:
        """The mean number of steps that the logical workers have pushed to this server, rounded down.

        The run's step, where the steps of all workers count together. Logical workers are the N fixed shares of the
        global batch.

        >>> core = StalenessTracker(3)
        >>> [core.push(worker, clock, 0, None).taken for worker, clock in ((0, 0), (0, 1), (1, 0), (0, 2))]
        [False, False, False, False]
        >>> core.steps, core.clock
        ([3, 1, 0], 1)
        """
        return sum(self.steps) // len(self._clocks)

    @property
    def steps(self) -> list[int]:
        """The number of steps that each logical worker has pushed, a list in the order of the workers' indices.

        A logical worker is a share of the global batch that steps by itself. All are 0 before the first request.
        """
        return [clock or 0 for clock in self._clocks]

    def state(self) -> dict[str, Any]:
        """Return the logical workers' progress, for a snapshot of this asynchronous parameter server.

        Returns:
            A dict that JSON can represent: ``version`` (updates made), ``clocks`` (list of the steps of each logical
            worker, a share of the global batch; None for unknown), ``lost`` (updates that crashed server processes had
            made after their newest snapshot) and ``stop_at`` (step after which all workers stop, or None). ``clocks``
            is not copied: later requests change it. The method ``load`` takes the dict in a restarted server.
        """
        return {"version": self.version, "clocks": self._clocks, "lost": self.lost, "stop_at": self.stop_at}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the logical workers' progress from a snapshot, in a server process started again after a crash.

        Logical workers are shares of the global batch that step by themselves. A snapshot lacks the updates made
        between it and the crash. They are counted in the attribute ``lost``: the first request of each worker tells how
        many updates its parameters contain, which may be more than the snapshot has. Every worker's lease begins anew:
        the time without a request after which the worker counts as gone.

        Args:
            state: the dict that the method ``state`` returned.
        """
        self.version, self.lost, self.stop_at = state["version"], state["lost"], state["stop_at"]
        self._clocks = list(state["clocks"])
        self._heard = [self._now()] * len(self._clocks)
        self._restored, self._lost_before = self.version, self.lost
        self._unheard = set(range(len(self._clocks)))
