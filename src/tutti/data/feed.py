"""From the global order to what each worker computes on: the one way of a batch through the data room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tutti.data.batches import cut, length
from tutti.data.epochs import Epochs
from tutti.data.loader import IN_PROCESS, Prefetch
from tutti.data.reader import Part, Reader
from tutti.data.source import Source
from tutti.data.transfer import Transfer
from tutti.laws.keys import mix
from tutti.laws.shares import chunks, share
from tutti.types import Batch, Cell

Plan = list[tuple[int, list[tuple[range | None, float]]]]
"""For each worker its micro-batches: where they lie in the rank's batch (None: they are all of it), and weights."""


class Feed:
    """This data rank's part of every global batch.

    Args:
        reader: reads it.
        epochs: who gets which.
        rank: this data rank.
        seed: of all draws.
        place: moves a batch to the device, in the right precision and memory layout.
        prefetch: who fetches held-out samples.
        together: this rank's workers compute as one: the first of them has all of their samples in one cell.
        transfer: moves batches ahead of their steps; None where they are moved as they come.
    """

    def __init__(
        self,
        reader: Reader,
        epochs: Epochs,
        rank: int,
        seed: int,
        place: Callable[[Batch], Batch],
        prefetch: Prefetch = IN_PROCESS,
        together: bool = False,
        transfer: Transfer | None = None,
    ) -> None:
        self.reader, self.epochs, self._rank, self.seed, self.place = reader, epochs, rank, seed, place
        self.together = together
        self.prefetch, self._transfer = prefetch, transfer
        self.contract = epochs.first
        self.workers = self.contract.mine(rank)
        self._plans: dict[tuple[int, int, str], Plan] = {}

    @property
    def source(self) -> Any:
        """What the samples are read from."""
        return self.reader.source

    def describe(self) -> dict[str, str]:
        """The batch contract and how its samples are read, for people."""
        lines = {**self.epochs.describe(), **self.reader.describe()}
        if self.together:
            lines["micro-batch"] = "all samples of a device at once, normalised over the global batch"
        return lines

    def read(self, epoch: int, start: int = 0) -> Iterator[Part]:
        """This rank's part of every global batch of ``epoch`` from ``start`` on, in worker order, on the device."""
        parts = self.reader.read(epoch, start)
        return map(self._placed, parts) if self._transfer is None else self._transfer.parts(parts, self._placed)

    def _placed(self, part: Part) -> Part:
        stand_in = None if part.stand_in is None else self.place(part.stand_in)
        return replace(part, batch=self.place(part.batch), stand_in=stand_in)

    def cells(
        self, batch: Batch, clock: int, samples: int, over: str, scale: float = 1.0, noise: float = 0.0
    ) -> list[tuple[int, list[Cell]]]:
        """A rank's batch cut into its workers' micro-batches.

        Args:
            batch: this rank's samples, in worker order.
            clock: steps taken before this one, which draws are keyed by.
            samples: samples of the global batch; where ``batch`` is of the caller's own size, any number that all ranks
                give alike, since the exchange divides by what was really there.
            over: ``step`` if a gradient is the mean over the global batch, ``worker`` if over the worker's share.
            scale: the loss scale.
            noise: standard deviation of the random weights on samples' losses.
        """
        work = []
        for worker, pieces in self._plan(samples, length(batch), over):
            cells = []
            for micro, (span, weight) in enumerate(pieces):
                part = batch if span is None else cut(batch, span.start, span.stop)
                count = length(batch) if span is None else len(span)
                key = mix(self.seed, clock, worker, micro)
                cells.append(Cell(worker, micro, part, count, weight * scale, key, micro == len(pieces) - 1, noise))
            work.append((worker, cells))
        return work

    def stand_in(self, batch: Batch, clock: int, worker: int, last: bool = True) -> Cell:
        """A cell that counts for nothing, for a rank that must not miss a turn of the others."""
        return Cell(worker, 0, batch, 0, 0.0, mix(self.seed, clock, worker, 0), last)

    def most_cells(self, samples: int) -> int:
        """Cells that the rank with most of them has in a global batch of ``samples``."""
        if self.together:
            return 1
        contract = self.contract
        return sum(len(contract.cells(len(contract.worker(samples, w)))) for w in contract.mine(0))

    def _plan(self, samples: int, have: int, over: str) -> Plan:
        """Where each worker's micro-batches lie in this rank's batch; kept, because most steps are alike."""
        plan = self._plans.get((samples, have, over))
        if plan is None:
            plan = self._plans[samples, have, over] = self._make_plan(samples, have, over)
        return plan

    def _make_plan(self, samples: int, have: int, over: str) -> Plan:
        if self.together:
            return [(self.workers[0], [(None, 1.0 / samples)] if have else [])]
        part = self.contract.part(samples, self._rank)
        first, spans = part.start, [self.contract.worker(samples, w) for w in self.workers]
        if have != len(part):
            # A batch of another size: its samples are shared out over this rank's workers.
            first = 0
            spans = [share(have, len(self.workers), i) for i in range(len(self.workers))]
        plan: Plan = []
        for worker, span in zip(self.workers, spans, strict=True):
            weight = 1.0 / (samples if over == "step" else max(len(span), 1))
            pieces: list[tuple[range | None, float]] = []
            for piece in self.contract.cells(len(span)):
                low, high = span.start - first + piece.start, span.start - first + piece.stop
                pieces.append((None if (low, high) == (0, have) else range(low, high), weight))
            plan.append((worker, pieces))
        return plan


def evaluation(
    source: Source,
    ranks: int,
    rank: int,
    largest: int,
    place: Callable[[Batch], Batch],
    prefetch: Prefetch = IN_PROCESS,
    even: bool = False,
) -> Iterator[tuple[int, Cell]]:
    """This data rank's held-out samples as numbered blocks: every sample once, without padding.

    The blocks do not depend on the number of ranks, so that their sums, added in order, do not either. ``even``: every
    rank has as many, some of them stand-ins without samples, for forwards that all must run together.
    """
    blocks = evaluation_blocks(len(source), largest)
    mine = list(share(len(blocks), ranks, rank))
    turns = [*mine, *[0] * ((len(share(len(blocks), ranks, 0)) - len(mine)) if even else 0)]
    tasks = ((np.arange(blocks[number].start, blocks[number].stop), None) for number in turns)
    for turn, batch in enumerate(prefetch.batches(source, tasks)):
        samples = len(blocks[turns[turn]]) if turn < len(mine) else 0
        yield turns[turn], Cell(0, 0, place(batch), samples, 1.0 / len(source), 0, True)


def evaluation_blocks(samples: int, largest: int) -> list[range]:
    """Held-out samples in blocks of at most ``largest``, and enough of them to share out; whatever the ranks.

    >>> len(evaluation_blocks(10_000, 512)), len(evaluation_blocks(20, 512))
    (32, 2)
    """
    return chunks(samples, min(largest, max(16, -(-samples // 32))))
