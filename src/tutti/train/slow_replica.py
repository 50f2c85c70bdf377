"""Simulate stragglers: delay the backward passes of some ranks or logical workers.

The delay comes after each backward pass and before any collective, so that it is the same in every strategy. ``tutti
chaos slow`` slows a machine from outside, as another program on it would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tutti.config.slowness import Slowness
from tutti.device import is_accelerator
from tutti.launcher.context import World
from tutti.types.micro_batch import MicroBatch
from tutti.types.replica_runner import CustomLoopRunner


def slow_down(replica: CustomLoopRunner, slow: Sequence[Slowness], world: World, workers: int) -> CustomLoopRunner:
    """Add delays to this rank's computation, to simulate stragglers, if ``slow`` names this rank or one of its workers.

    Args:
        replica: this rank's part of the model; its methods are replaced.
        slow: which ranks or logical workers are delayed, and by how much; empty delays nothing.
        world: all ranks.
        workers: number of logical data-parallel workers (fixed shares of the global batch); a rank may compute several
            one after another.

    Returns:
        ``replica`` itself.

    Raises:
        UsageError: a rank or worker does not exist, or ``factor``, which multiplies CPU time, is
            given for accelerators.
    """
    for each in slow:
        each.check(world.identity.size, workers, accelerated=is_accelerator(world.device))
        rank = world.identity.rank
        if each.worker or rank in each.rank:
            _delay_micro_batches(replica, each, rank)
            if not replica.own_backward:
                _delay_workers(replica, each, rank)
    return replica


def _delay_micro_batches(replica: Any, slow: Slowness, rank: int) -> None:
    """Delay each micro-batch's backward pass, in a custom training loop and, where it has one, in ``run``."""
    begin, backward, begun = replica.begin, replica.backward, 0.0

    def note(micro_batch: MicroBatch) -> None:
        nonlocal begun
        begun = time.thread_time()
        begin(micro_batch)

    def late(result: Any, micro_batch: MicroBatch, *rest: Any) -> Any:
        totals = backward(result, micro_batch, *rest)
        time.sleep(slow.seconds(rank, micro_batch, time.thread_time() - begun))
        return totals

    replica.begin, replica.backward = note, late


def _delay_workers(replica: Any, slow: Slowness, rank: int) -> None:
    """Delay once after all micro-batches of a worker."""
    run = replica.run

    def late(micro_batches: Any, loss: Any, grad_hook: Any) -> Any:
        begun = time.thread_time()
        totals = run(micro_batches, loss, grad_hook)
        if grad_hook is not None:
            time.sleep(slow.seconds(rank, micro_batches[-1], time.thread_time() - begun))
        return totals

    replica.run = late
