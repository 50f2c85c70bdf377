"""Uneven machines on purpose: ranks or workers that take longer than they need. Loads no torch.

The delay is made inside the process, after each backward pass and before anything is waited for, so that it is the same
in every strategy. ``tutti chaos slow`` acts from outside, as another program on the machine would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tutti.errors import UsageError
from tutti.spec import build, read_options

if TYPE_CHECKING:
    from tutti.types import Cell, Replica
    from tutti.world.context import World


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Who takes longer, and how much.

    Attributes:
        rank, worker: which ones, ``1`` or ``1+2``; one of the two.
        factor: times as long as a step's forward and backward take, counted in CPU time.
        ms: milliseconds more a worker and step.
    """

    rank: tuple[int, ...] = ()
    worker: tuple[int, ...] = ()
    factor: float = 1.0
    ms: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.rank) == bool(self.worker) or min(self.rank + self.worker) < 0:
            raise ValueError("give rank=1 or worker=1, or several as in rank=1+2")
        if self.factor < 1 or self.ms < 0 or (self.factor == 1 and not self.ms):
            raise ValueError(f"factor is {self.factor:g} and ms is {self.ms:g}: give factor=3, or ms=20")

    @classmethod
    def parse(cls, text: str, option: str = "--slow") -> tuple[Slow, ...]:
        """Read ``rank=1,factor=3`` or ``worker=1+2,ms=20``, or several with ``;`` in between. Raises UsageError."""
        return tuple(build(cls, read_options(part, option, "rank=1,factor=3"), option) for part in text.split(";"))

    def check(self, ranks: int, workers: int, cuda: bool = False) -> None:
        """Raise UsageError where there is no such rank or worker, or a factor for GPUs."""
        if cuda and self.factor > 1:
            raise UsageError("slow factors count the CPU's time, and devices are GPUs", remedy="give ms=20")
        for kind, given, count in (("rank", self.rank, ranks), ("worker", self.worker, workers)):
            if given and max(given) >= count:
                raise UsageError(
                    f"there is no {kind} {max(given)} to slow down", where="--slow", remedy=f"they are 0 to {count - 1}"
                )

    def seconds(self, rank: int, cell: Cell, needed: float) -> float:
        """How much longer this micro-batch takes, which needed so many seconds."""
        if not (rank in self.rank or cell.worker in self.worker):
            return 0.0
        return (self.factor - 1) * needed + self.ms / 1000 * cell.last

    def __str__(self) -> str:
        kind, given = ("rank", self.rank) if self.rank else ("worker", self.worker)
        parts = [f"{self.factor:g} × as slow"] * (self.factor > 1) + [f"{self.ms:g} ms a step"] * (self.ms > 0)
        return f"{kind} {', '.join(map(str, given))}: {' and '.join(parts)}"


def slowed(replica: Replica, slow: Sequence[Slow] | str, world: World, workers: int) -> Replica:
    """``replica``, which takes longer from now on where this rank or a worker of it is meant. Raises UsageError."""
    if isinstance(slow, str):
        slow = Slow.parse(slow, "slow") if slow else ()
    for each in slow:
        each.check(world.identity.size, workers, cuda=world.device.type == "cuda")
        rank = world.identity.rank
        if each.worker or rank in each.rank:
            # Not a class around it: whether a replica has an own loop is seen by its methods.
            delay = _delay_cells if hasattr(replica, "begin") else _delay_workers
            delay(replica, each, rank)
    return replica


def _delay_cells(replica: Any, slow: Slow, rank: int) -> None:
    """Each backward pass, in ``run`` and in an own loop."""
    begin, backward, begun = replica.begin, replica.backward, 0.0

    def note(cell: Cell) -> None:
        nonlocal begun
        begun = time.thread_time()
        begin(cell)

    def late(result: Any, cell: Cell, *rest: Any) -> Any:
        totals = backward(result, cell, *rest)
        time.sleep(slow.seconds(rank, cell, time.thread_time() - begun))
        return totals

    replica.begin, replica.backward = note, late


def _delay_workers(replica: Any, slow: Slow, rank: int) -> None:
    """Each worker's micro-batches together."""
    run = replica.run

    def late(cells: Any, loss: Any, sink: Any) -> Any:
        begun = time.thread_time()
        totals = run(cells, loss, sink)
        if sink is not None:
            time.sleep(slow.seconds(rank, cells[-1], time.thread_time() - begun))
        return totals

    replica.run = late
