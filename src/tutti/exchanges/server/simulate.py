"""Workers that are not equally fast, played by nobody but a clock: the same script gives the same bits.

The core that a server's process is built around runs here by itself. Who reads and pushes when follows from how long
each worker's steps take, and from nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tutti.exchanges.server.core import Core


class Event(NamedTuple):
    """At ``time`` a worker reads to begin its step ``clock``, or pushes what came of it."""

    time: float
    worker: int
    clock: int
    pushes: bool
    staleness: int = 0


def simulate(
    seconds: Sequence[float],
    steps: int,
    *,
    bound: int | None = None,
    read: Callable[[int, int], None] = lambda worker, clock: None,
    update: Callable[[int, int, int], None] = lambda worker, clock, staleness: None,
) -> list[Event]:
    """Play all workers for ``steps`` steps each; of those that are ready at the same time the first goes first.

    Args:
        seconds: what a step takes each worker.
        steps: how many each has.
        bound: steps that one may be ahead of the slowest.
        read: ``read(worker, clock)``: it reads the parameters.
        update: ``update(worker, clock, staleness)``: its gradient, of what it read last, is applied.

    >>> [(event.worker, event.staleness) for event in simulate([1, 1, 2], 2) if event.pushes]
    [(0, 0), (1, 1), (0, 1), (1, 1), (2, 4), (2, 0)]
    """
    core, now = Core(len(seconds), bound, now=lambda: 0.0), 0.0
    done, seen = [0] * len(seconds), [0] * len(seconds)
    ready, computing = set(range(len(seconds))), list[tuple[float, int]]()
    events: list[Event] = []
    core.hear(0, 0)
    while ready or computing:
        for worker in sorted(ready):
            if core.may_proceed(worker):
                ready.discard(worker)
                seen[worker] = core.version
                read(worker, done[worker])
                events.append(Event(now, worker, done[worker], pushes=False))
                heapq.heappush(computing, (now + seconds[worker], worker))
        now, worker = heapq.heappop(computing)
        clock = done[worker]

        def apply(staleness: int, worker: int = worker, clock: int = clock) -> None:
            update(worker, clock, staleness)

        pushed = core.push(worker, clock, seen[worker], apply)
        events.append(Event(now, worker, clock, pushes=True, staleness=pushed.staleness))
        done[worker] += 1
        if done[worker] < steps:
            ready.add(worker)
    return events
