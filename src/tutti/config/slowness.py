"""Parse ``--slow``, which makes stragglers of ranks or logical workers on purpose. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tutti.config.spec import build_options, read_options
from tutti.errors import UsageError

if TYPE_CHECKING:
    from tutti.types.micro_batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Simulated delay of some ranks, or of some logical workers (shares of the global batch).

    Attributes:
        rank, worker: numbers of the delayed ranks, or of the delayed logical workers; exactly one of the two is given.
        factor: factor on the seconds of forward and backward, which are measured in CPU time.
        ms: milliseconds by which each logical worker that is named, or that a named rank computes, is delayed in each
            step.

    Raises:
        ValueError: both or neither of ``rank`` and ``worker`` are given, a number is below 0, ``factor`` is below 1, or
            there is no delay.
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
    def parse(cls, text: str, option: str = "--slow") -> tuple[Slowness, ...]:
        """Parse ``--slow``, simulated delays of ranks or logical workers: ``rank=1,factor=3`` or ``worker=1+2,ms=20``.

        A logical worker is one of N fixed shares of the global batch.

        Args:
            text: the delays, separated by ``;``. Keys of each: ``rank`` or ``worker``, numbers joined by ``+``;
                ``factor``, on the seconds of forward and backward; ``ms``, milliseconds for each worker and step.
            option: name of the option, which a UsageError states.

        Returns:
            A ``Slowness`` for each delay, in order: ``rank`` or ``worker`` (tuples of numbers), ``factor`` and ``ms``.

        Raises:
            UsageError: the text is malformed, a key is unknown (naming the nearest) or repeated, both or neither of
                ``rank`` and ``worker`` are given, or neither ``factor`` nor ``ms`` gives a delay.
        """
        return tuple(
            build_options(cls, read_options(part, option, "rank=1,factor=3"), option) for part in text.split(";")
        )

    def check(self, ranks: int, workers: int, accelerated: bool = False) -> None:
        """Raise UsageError if a delayed rank or logical worker does not exist, or ``factor`` is to slow an accelerator.

        A logical worker is a fixed share of the global batch. The option ``factor`` multiplies the measured CPU time of
        forward and backward, which is not the time on an accelerator; the option ``ms`` works on any device.

        Args:
            ranks: number of ranks of the run.
            workers: number of logical workers, among which the global batch is divided.
            accelerated: whether devices are accelerators.
        """
        if accelerated and self.factor > 1:
            raise UsageError(
                "factor cannot slow an accelerator down",
                where="--slow",
                why="it multiplies the CPU time of forward and backward, which an accelerator computes meanwhile",
                remedy="give ms=20",
            )
        for kind, given, count in (("rank", self.rank, ranks), ("worker", self.worker, workers)):
            if given and max(given) >= count:
                raise UsageError(
                    f"there is no {kind} {max(given)} to slow down", where="--slow", remedy=f"they are 0 to {count - 1}"
                )

    def seconds(self, rank: int, micro_batch: MicroBatch, needed: float) -> float:
        """Return the simulated delay to add after a micro-batch, in seconds.

        The delay is (``factor`` - 1) · ``needed``, and after a worker's last micro-batch of a step also ``ms``
        milliseconds; ``factor`` and ``ms`` are options of ``--slow``.

        Args:
            rank: this rank.
            micro_batch: the micro-batch that has been computed, with the index of its logical worker (share of the
                global batch).
            needed: seconds of CPU time that its forward and backward took.

        Returns:
            Seconds; 0 if neither the rank nor the micro-batch's logical worker is to be delayed.
        """
        if not (rank in self.rank or micro_batch.worker in self.worker):
            return 0.0
        return (self.factor - 1) * needed + self.ms / 1000 * micro_batch.last

    def __str__(self) -> str:
        kind, given = ("rank", self.rank) if self.rank else ("worker", self.worker)
        parts = [f"{self.factor:g} × as slow"] * (self.factor > 1) + [f"{self.ms:g} ms a step"] * (self.ms > 0)
        return f"{kind} {', '.join(map(str, given))}: {' and '.join(parts)}"
