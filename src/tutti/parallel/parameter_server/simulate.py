"""Deterministic simulation of asynchronous workers of different speed: the same step times give the same bits.

It runs the servers' own ``StalenessTracker`` in simulated time. The order of reads and pushes follows from the step
time of each logical worker alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tutti.parallel.parameter_server.staleness import StalenessTracker


class Event(NamedTuple):
    """A read of parameters, or a push of a gradient, by a worker in a simulation of asynchronous training.

    Attributes:
        time: simulated seconds since the start.
        worker: index of the logical worker (share of the global batch that steps by itself), from 0.
        clock: the worker's step, from 0.
        pushes: True if the worker pushes the gradient of the step, False if it reads the parameters to begin the step.
        staleness: for a push, the number of updates since the worker's read; 0 for a read.
    """

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
    """Simulate asynchronous workers of different speed: when each reads parameters and pushes its gradient.

    A worker is a logical worker, a share of the global batch that steps by itself: it reads the parameters, computes
    for the time of a step, pushes the gradient and begins the next step. Of workers ready at the same time, the lowest
    number goes first.

    Args:
        seconds: for each worker the time that each of its steps takes, in simulated seconds.
        steps: number of steps that each worker makes.
        bound: steps that a worker may be ahead of the slowest; None for no bound.
        read: called as ``read(worker, clock)`` when the worker reads the parameters for its step ``clock``, from 0.
        update: called as ``update(worker, clock, staleness)`` to apply the gradient at the parameters last read;
            ``staleness`` is the number of updates made since that read.

    Returns:
        Two ``Event`` for each step of a worker, its read and its push, of all workers in order of time: ``time`` in
        simulated seconds, ``worker``, ``clock`` (the worker's step), ``pushes`` (True for a push, False for a read) and
        ``staleness`` (0 for a read).

    >>> [(event.worker, event.staleness) for event in simulate([1, 1, 2], 2) if event.pushes]
    [(0, 0), (1, 1), (0, 1), (1, 1), (2, 4), (2, 0)]
    >>> simulate([1, 1, 2], 0)
    []
    """
    core, now = StalenessTracker(len(seconds), bound, now=lambda: 0.0), 0.0
    done, seen = [0] * len(seconds), [0] * len(seconds)
    ready, computing = set(range(len(seconds) if steps > 0 else 0)), list[tuple[float, int]]()
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
