"""The batch contract: partition each global batch over logical workers, data ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tutti.comm.partition import chunks, even_share
from tutti.errors import DataError, UsageError


@dataclass(frozen=True)
class BatchContract:
    """The partition of samples over steps, logical workers, data ranks and micro-batches. Pure arithmetic.

    Attributes:
        dataset: samples in an epoch; None if unknown until the stream ends.
        batch: samples in a global batch B, over all workers.
        workers: number N of logical workers.
        ranks: number R of data ranks, each of which runs one or more workers.
        micro: most samples in a micro-batch; None for a worker's whole share.
        identical: every worker draws worker 0's share, as with a loader that is not sharded and has one seed on all
            ranks. The batch then holds only 1/N of B different samples.

    Raises:
        DataError: ``dataset`` is 0.
        UsageError: fewer samples in a global batch than workers, or fewer workers than data ranks.
    """

    dataset: int | None
    batch: int
    workers: int
    ranks: int = 1
    micro: int | None = None
    identical: bool = False

    def __post_init__(self) -> None:
        if self.dataset is not None and self.dataset < 1:
            raise DataError("the training set is empty", remedy="check the path and the filters of the data")
        if self.batch < self.workers:
            raise UsageError(
                f"a global batch of {self.batch} gives {self.workers} workers less than one sample each",
                remedy=f"take --batch-size {self.workers} or more, or fewer workers",
            )
        if self.workers < self.ranks:
            raise UsageError(
                f"{self.workers} workers cannot be distributed over {self.ranks} data ranks",
                remedy=f"take {self.ranks} workers or more, or fewer devices",
            )

    @property
    def known(self) -> int:
        """Samples in an epoch. Raises UsageError if the number is unknown."""
        if self.dataset is None:
            raise UsageError(
                "the data set is a stream whose length is not known",
                remedy="give it __len__, or count in steps or samples instead of epochs",
            )
        return self.dataset

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch; the last may be smaller, and no sample is dropped. Raises as ``known``."""
        return math.ceil(self.known / self.batch)

    def samples(self, step: int) -> int:
        """Return the number of samples in global batch ``step``, from 0, of an epoch. Raises as ``known``."""
        return min(self.batch, self.known - step * self.batch)

    def mine(self, rank: int) -> range:
        """Return the contiguous workers that data rank ``rank`` runs."""
        return even_share(self.workers, self.ranks, rank)

    def worker(self, samples: int, worker: int) -> range:
        """Return a worker's share as a range within a global batch of ``samples``."""
        return even_share(samples, self.workers, 0 if self.identical else worker)

    def part(self, samples: int, rank: int) -> range:
        """Return a data rank's part as a range within a global batch of ``samples``; the last rank has the fewest."""
        workers = self.mine(rank)
        return range(self.worker(samples, workers[0]).start, self.worker(samples, workers[-1]).stop)

    def micro_batches(self, count: int) -> list[range]:
        """Cut a worker's ``count`` samples into micro-batches: ranges within its share."""
        return chunks(count, self.micro)

    def spans(self, samples: int, rank: int, have: int) -> list[tuple[int, list[range]]]:
        """Return the micro-batches of each worker of a data rank, as ranges within the rank's batch.

        Args:
            samples: in the global batch.
            rank: the data rank.
            have: samples in the rank's batch. If these are not as many as ``part`` has, in a batch of the caller's own
                or of a stream that shards itself, they are divided over the rank's workers.
        """
        workers, part = self.mine(rank), self.part(samples, rank)
        first, shares = part.start, [self.worker(samples, worker) for worker in workers]
        if have != len(part):
            first, shares = 0, [even_share(have, len(workers), place) for place in range(len(workers))]
        return [
            (worker, [range(low := share.start - first + piece.start, low + len(piece)) for piece in pieces])
            for worker, share in zip(workers, shares, strict=True)
            for pieces in [self.micro_batches(len(share))]
        ]

    def check_whole(self) -> None:
        """Raise UsageError unless a rank has one micro-batch of different samples, for synchronised batch norm."""
        if self.identical:
            raise UsageError(
                "--batch-norm sync cannot be combined with identical batches", remedy="leave out one of the two"
            )
        most = len(self.part(self.batch, 0))
        if self.micro is not None and self.micro < most:
            raise UsageError(
                f"--batch-norm sync cannot be combined with micro-batches of {self.micro} samples",
                why=f"it needs all of a device's samples at once, which are {most}",
                remedy=f"take --micro-batch {most} or leave it out, and a pipeline's micro_batches too; or take more "
                "devices, or --batch-norm ghost:size=32",
            )

    def consumed(self, steps: int) -> int:
        """Return the number of samples consumed after ``steps`` steps. Raises as ``known``."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.known + min(rest * self.batch, self.known)

    def first_micro_batch(self, samples: int) -> range:
        """Return the first micro-batch of a global batch of ``samples``, as a range; it is never empty."""
        return self.micro_batches(len(self.worker(samples, 0)))[0]

    def describe(self) -> Mapping[str, str]:
        """Return lines for the run's header with all derived numbers."""
        big, small = (
            len(even_share(self.batch, self.workers, 0)),
            len(even_share(self.batch, self.workers, self.workers - 1)),
        )
        most, least = len(self.mine(0)), len(self.mine(self.ranks - 1))
        micro = len(self.micro_batches(big)[0])
        lines = {
            "global batch": f"{self.batch} samples",
            "workers": f"{self.workers}, each {_between(small, big)} samples a step",
            "micro-batch": f"{micro} samples × {len(self.micro_batches(big))} accumulated",
            "data ranks": f"{self.ranks}, each plays {_between(least, most)} worker{'s' * (most > 1)}",
            "epoch": "until the stream ends",
        }
        if self.dataset is not None:
            lines["epoch"] = f"{self.dataset} samples = {self.steps_per_epoch} steps"
        if self.identical:
            lines["identical batches"] = f"all workers draw the same {big} samples: N times the work, one batch's worth"
        if most != least:
            busy = self.workers / (self.ranks * most)
            lines["imbalance"] = f"ranks with {least} wait for those with {most}: {busy:.0%} busy"
        if self.dataset is None:
            lines["last batch"] = "what is left, weighted exactly"
        elif (last := self.samples(self.steps_per_epoch - 1)) != self.batch:
            lines["last batch"] = f"{last} samples, weighted exactly"
        return lines


def _between(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} or {high}"
