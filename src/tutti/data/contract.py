"""The batch contract: partition each global batch over logical workers, data ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tutti.comm.partition import chunks, even_share, sharers, workers_of
from tutti.errors import DataError, UsageError, counted


@dataclass(frozen=True)
class BatchContract:
    """The partition of samples over steps, logical workers, data ranks and micro-batches. Pure arithmetic.

    A global batch is divided evenly over a fixed number of logical workers (shares of the batch). Each data rank
    computes for some of them, so that results need not depend on the number of ranks. A worker's share is cut into
    micro-batches.

    Attributes:
        dataset: number of samples in an epoch; None if unknown until an iterable data set ends.
        batch: number B of samples in a global batch, over all workers.
        workers: number N of logical workers.
        ranks: number R of data ranks. Each runs one or more workers; with R > N ranks share a worker's micro-batches.
        micro: largest number of samples in a micro-batch; None for a worker's whole share.
        identical: whether every worker draws worker 0's share, as with a loader that is not sharded and has one seed on
            all ranks. The batch then holds only 1/N of B different samples.

    Raises:
        DataError: ``dataset`` is 0.
        UsageError: fewer samples in a global batch than workers, or fewer micro-batches of a worker than data ranks
            that share it.
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
        if self.shared:
            self._check_shared_workers()

    def _check_shared_workers(self) -> None:
        """Raise UsageError unless every data rank has a micro-batch of the worker that it shares."""
        for worker in range(self.workers):
            ranks, share = len(even_share(self.ranks, self.workers, worker)), len(self.worker(self.batch, worker))
            if len(self.micro_batches(share)) >= ranks:
                continue
            pieces = counted(len(self.micro_batches(share)), "micro-batch")
            raise UsageError(
                f"{counted(self.workers, 'worker')} cannot be distributed over {counted(self.ranks, 'data rank')}",
                why=f"{ranks} devices would share worker {worker}, which has {counted(share, 'sample')} in {pieces}",
                remedy=(f"take --micro-batch {share // ranks} or less, " if share >= ranks else "take ")
                + f"--workers {self.ranks} or more, or fewer devices",
            )

    @property
    def shared(self) -> bool:
        """Whether there are more data ranks than logical workers, so that ranks share the micro-batches of a worker.

        A logical worker is one of N fixed shares of the global batch. If True, a data rank runs only some of its one
        worker's micro-batches; if False, the rank runs all micro-batches of one or more workers.
        """
        return self.ranks > self.workers

    @property
    def known(self) -> int:
        """Number of samples in an epoch, over all data ranks.

        Raises UsageError for an iterable data set of unknown length.
        """
        if self.dataset is None:
            raise UsageError(
                "the data set is a stream whose length is not known",
                remedy="give it __len__, or count in steps or samples instead of epochs",
            )
        return self.dataset

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches in an epoch; the last may be smaller, and no sample is dropped.

        Raises UsageError if the length of an epoch is not known.
        """
        return math.ceil(self.known / self.batch)

    def samples(self, step: int) -> int:
        """Return the number of samples in one global batch of an epoch; the last batch may have fewer than others.

        Args:
            step: number of the global batch in the epoch, from 0 and below ``steps_per_epoch``.

        Raises:
            UsageError: the length of an epoch is not known.
        """
        return min(self.batch, self.known - step * self.batch)

    def mine(self, rank: int) -> range:
        """Return the logical workers that a data rank runs, as a contiguous range of their indices.

        A logical worker is one of N fixed shares of the global batch. With at least as many workers as data ranks the
        ranks divide the workers as evenly as possible, and the first ranks have one more. With more data ranks than
        workers the workers divide the ranks in the same way: the range holds one worker, of whose micro-batches this
        rank and its neighbours each run a part.

        Args:
            rank: the data rank, from 0.

        Returns:
            Indices from 0 of at least one worker.
        """
        return workers_of(self.workers, self.ranks, rank)

    def worker(self, samples: int, worker: int) -> range:
        """Return the samples of a logical worker, as a range of positions within the global batch.

        A logical worker is one of N fixed shares of the global batch: contiguous, in the order of the workers, and as
        even as possible, where the first shares have one sample more. A share may be empty in a global batch of fewer
        than N samples.

        Args:
            samples: number of samples in the global batch, which may be a smaller one at the end of an epoch.
            worker: index of the worker, from 0. If all workers draw the same samples (the option ``identical``), the
                range is that of worker 0.
        """
        return even_share(samples, self.workers, 0 if self.identical else worker)

    def part(self, samples: int, rank: int) -> range:
        """Return the samples that a data rank reads, as a range of positions within the global batch.

        Args:
            samples: samples in the global batch, which may be a smaller one at the end of an epoch.
            rank: the data rank, from 0.

        Returns:
            Contiguous positions, where 0 is the first sample of the global batch; an empty range where a small global
            batch leaves nothing for the rank. If all logical workers draw the same samples (the option ``identical``),
            the positions lie in the share of worker 0 on every rank.
        """
        workers = self.mine(rank)
        first, last = self.worker(samples, workers[0]), self.worker(samples, workers[-1])
        if not self.shared:
            return range(first.start, last.stop)
        pieces = self._pieces(samples, rank)
        if not pieces:
            return range(first.stop, first.stop)
        return range(first.start + pieces[0].start, first.start + pieces[-1].stop)

    def first_micro(self, samples: int, rank: int) -> int:
        """Return the index, among its logical worker's micro-batches of one step, of a data rank's first micro-batch.

        A logical worker is one of N fixed shares of the global batch. The index is 0 unless there are more data ranks
        than workers, so that several ranks share one worker's micro-batches.

        Args:
            samples: number of samples in the global batch.
            rank: the data rank, from 0.
        """
        if not self.shared:
            return 0
        return self._places(samples, rank).start

    def _shared_micro_batches(self, rank: int) -> int:
        """Return the number of micro-batches of a shared worker that a data rank runs in a full global batch."""
        return len(self._places(self.batch, rank))

    def _places(self, samples: int, rank: int) -> range:
        """Return the indices of the micro-batches of its shared worker that a data rank runs; the first have most."""
        ranks = sharers(self.workers, self.ranks, rank)
        pieces = self.micro_batches(len(self.worker(samples, self.mine(rank)[0])))
        return even_share(len(pieces), len(ranks), rank - ranks.start)

    def _pieces(self, samples: int, rank: int) -> list[range]:
        """Return the micro-batches of its shared worker that a data rank runs, as ranges within the worker's share."""
        places = self._places(samples, rank)
        return self.micro_batches(len(self.worker(samples, self.mine(rank)[0])))[places.start : places.stop]

    def micro_batches(self, count: int) -> list[range]:
        """Cut a logical worker's share of a global batch into the fewest micro-batches of at most ``micro`` samples.

        A logical worker is one of N fixed shares of the global batch. ``micro`` is the largest micro-batch of this
        configuration; with None the whole share is one micro-batch. Sizes differ by at most one sample, larger ones
        first.

        Args:
            count: number of samples in the share; 0 gives an empty list.

        Returns:
            Each micro-batch as a range of positions within the share, in order.
        """
        return chunks(count, self.micro)

    def most_micro_batches(self, samples: int) -> int:
        """Return the number of micro-batches, in one step, of the data rank that has the most of them.

        A data rank computes one or more logical workers (fixed shares of the global batch), each cut into
        micro-batches, which are counted together; with more data ranks than workers a rank computes part of one worker.

        Args:
            samples: number of samples in the step's global batch.

        Returns:
            The largest number of micro-batches over data ranks; 0 for 0 samples.
        """
        if not self.shared:
            return sum(len(self.micro_batches(len(self.worker(samples, worker)))) for worker in self.mine(0))
        first_ranks = (even_share(self.ranks, self.workers, worker).start for worker in range(self.workers))
        return max(len(self._places(samples, rank)) for rank in first_ranks)

    def spans(self, samples: int, rank: int, have: int) -> list[tuple[int, list[range]]]:
        """Divide a data rank's batch into the micro-batches of its logical workers (shares of the global batch).

        Args:
            samples: number of samples in the global batch.
            rank: the data rank, from 0.
            have: number of samples in the rank's batch. If this is not the rank's share of the global batch (a batch
                that the script made itself, or a data set that differs between ranks), the samples are divided over
                the rank's workers as evenly as possible; the first workers get one more.

        Returns:
            Pairs (index of the worker, list of its micro-batches), one for each worker of the rank, in order. A
            micro-batch is a range of positions within the rank's batch; a worker without samples has an empty list.
        """
        workers, part = self.mine(rank), self.part(samples, rank)
        if self.shared:
            pieces = self.micro_batches(have) if have != len(part) else self._pieces(samples, rank)
            first = pieces[0].start if pieces else 0
            return [(workers[0], [range(piece.start - first, piece.stop - first) for piece in pieces])]
        first, shares = part.start, [self.worker(samples, worker) for worker in workers]
        if have != len(part):
            first, shares = 0, [even_share(have, len(workers), place) for place in range(len(workers))]
        return [
            (worker, [range(low := share.start - first + piece.start, low + len(piece)) for piece in pieces])
            for worker, share in zip(workers, shares, strict=True)
            for pieces in [self.micro_batches(len(share))]
        ]

    def check_whole(self) -> None:
        """Check that all samples of a data rank can form one micro-batch, as synchronised batch norm needs.

        Raises:
            UsageError: ``micro``, the largest size of a micro-batch, is smaller than the largest number of samples of a
                rank in a global batch; or all logical workers (shares of the global batch) draw the same samples
                (``identical``).
        """
        if self.identical:
            raise UsageError(
                "--batch-norm sync cannot be combined with identical batches",
                why="statistics of the global batch would count each sample once for every worker",
                remedy="leave out one of the two",
            )
        most = len(self.part(self.batch, 0))
        if self.micro is not None and self.micro < most:
            raise UsageError(
                f"--batch-norm sync cannot be combined with micro-batches of {counted(self.micro, 'sample')}",
                why=f"it needs all of a device's samples at once, which are {most}",
                remedy=f"take --micro-batch {most} or leave it out, and a pipeline's micro_batches too; or take more "
                "devices, or --batch-norm ghost:size=32",
            )

    def consumed(self, steps: int) -> int:
        """Return the number of samples consumed by the first ``steps`` steps of a run, over all epochs and ranks.

        Args:
            steps: number of global batches, of which the last of each epoch may be smaller.

        Raises:
            UsageError: the length of an epoch is not known.
        """
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.known + min(rest * self.batch, self.known)

    def first_micro_batch(self, samples: int) -> range:
        """Return the first micro-batch of logical worker 0, as a range of positions within the global batch.

        A data rank for which a small global batch leaves no samples reads these, as samples of a dummy micro-batch. A
        logical worker is one of N fixed shares of the global batch. The range starts at 0 and is never empty.

        Args:
            samples: number of samples in the global batch, at least 1.
        """
        return self.micro_batches(len(self.worker(samples, 0)))[0]

    def describe(self) -> Mapping[str, str]:
        """Return lines for the run's header that say how a global batch is divided.

        Returns:
            The text of each line by its label. The labels "global batch", "workers" (shares of the batch),
            "micro-batch", "data ranks" and "epoch" are always there; "identical batches", "imbalance" (share of time
            that ranks are busy, where ranks run unequally many micro-batches) and "last batch" only where they apply.
        """
        big, small = (
            len(even_share(self.batch, self.workers, 0)),
            len(even_share(self.batch, self.workers, self.workers - 1)),
        )
        count = self._shared_micro_batches if self.shared else lambda rank: len(self.mine(rank))
        most, least = count(0), count(self.ranks - 1)
        unit = "micro-batch" if self.shared else "worker"
        micro = len(self.micro_batches(big)[0])
        lines = {
            "global batch": counted(self.batch, "sample"),
            "workers": f"{self.workers}, each {_between(small, big, 'sample')} a step",
            "micro-batch": f"{counted(micro, 'sample')} × {len(self.micro_batches(big))} accumulated",
            "data ranks": f"{self.ranks}, each plays {_between(least, most, unit)}",
            "epoch": "until the stream ends",
        }
        if self.dataset is not None:
            lines["epoch"] = f"{counted(self.dataset, 'sample')} = {counted(self.steps_per_epoch, 'step')}"
        if self.identical:
            lines["identical batches"] = (
                f"all workers draw the same {counted(big, 'sample')}: N times the work, one batch's worth"
            )
        if most != least:
            busy = sum(map(count, range(self.ranks))) / (self.ranks * most)
            lines["imbalance"] = f"ranks with {least} wait for those with {most}: {busy:.0%} busy"
        if self.dataset is None:
            lines["last batch"] = "what is left, weighted exactly"
        elif (last := self.samples(self.steps_per_epoch - 1)) != self.batch:
            lines["last batch"] = f"{counted(last, 'sample')}, weighted exactly"
        return lines


def _between(low: int, high: int, noun: str) -> str:
    return counted(high, noun) if low == high else f"{low:,} or {counted(high, noun)}"
