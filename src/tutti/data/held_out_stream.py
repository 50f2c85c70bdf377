"""Held-out samples of a stream, in blocks that are divided over the data ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from tutti.comm.communicator import Communicator
from tutti.data.batches import script_batch
from tutti.data.loader import Prefetch
from tutti.data.stream import Stream, refuse_empty
from tutti.data.stream_batches import StreamBatch, StreamReading
from tutti.data.stream_reader import DIFFERENT, compare_samples
from tutti.errors import DataError
from tutti.types.micro_batch import Batch, MicroBatch


class HeldOutStream:
    """Held-out samples of an iterable data set, divided into blocks that are evaluated as one batch each.

    Blocks do not depend on the number of ranks. Every rank reads all samples, and computes every r-th block of r ranks.

    Args:
        stream: the iterable data set.
        batch: samples in a block.
        seed: seed of the random draws of the data set.
        prefetch: loader processes of the script's ``DataLoader``; none: this process reads.

    Attributes:
        sizes: number of samples of each block, by its index from 0; complete once all blocks have been read.
    """

    def __init__(self, stream: Stream, batch: int, seed: int, prefetch: Prefetch) -> None:
        self.stream, self.batch, self.seed, self.prefetch = stream, batch, seed, prefetch
        self.sizes: dict[int, int] = {}

    @property
    def samples(self) -> int:
        """Number of held-out samples in all blocks that the latest iteration of ``micro_batches`` has read so far.

        All ranks' blocks count, each of which is evaluated as one batch; 0 before the first iteration.
        """
        return sum(self.sizes.values())

    @property
    def rows(self) -> int:
        """Number of rows of an evaluation's table of loss sums, which has a row for each block of held-out samples.

        This is the largest index of a block that the latest iteration of ``micro_batches`` has read so far, plus 1.
        Raises ValueError before its first block.
        """
        return max(self.sizes) + 1

    def shares(self, ranks: int) -> list[list[int]]:
        """Return the indices of the blocks that each data-parallel rank evaluates, among the blocks read so far.

        A block is a batch of held-out samples; block b is for rank b mod ``ranks``. The result has the blocks that the
        latest iteration of ``micro_batches`` has read.

        Args:
            ranks: number of data-parallel ranks.

        Returns:
            For each data rank, in order, a list of the indices of its blocks.
        """
        return [[number for number in self.sizes if number % ranks == rank] for rank in range(ranks)]

    def micro_batches(
        self, ranks: int, rank: int, place: Callable[[Batch], Batch], even: bool, world: Communicator
    ) -> Iterator[tuple[int, MicroBatch]]:
        """Read an iterable of held-out samples, and yield the blocks that this data rank evaluates, each as one batch.

        Every rank reads the whole iterable and cuts it into blocks; block b is for data rank b mod ``ranks``.
        Collective over ``world``, whose ranks must all exhaust the iterator: to make sure that all read the same
        samples, the ranks all-gather and compare digests of the samples of blocks 0, 1, 2, 4, 8, …, and the number of
        all samples at the end.

        Args:
            ranks: number of data-parallel ranks.
            rank: index of this data-parallel rank, from 0.
            place: moves a batch to the device, and returns it.
            even: give every rank equally many micro-batches, by dummy ones, so that collectives in their forwards meet.
            world: communicator of all ranks.

        Yields:
            (index of the block, its micro-batch on the device). A dummy micro-batch has index 0, samples read before,
            and ``samples`` and ``weight`` 0, so that the caller leaves its loss out; all others have ``weight`` 1.

        Raises:
            MismatchError: on every rank, if ranks have read different samples.
            DataError: there are no samples, or ``drop_last`` leaves none; the first loader process has none; or a
                sample cannot be read or collated.
            LoaderError: a loader process ended, or gave no batch within the timeout.
        """
        self.sizes.clear()

        def keep(items: list[Any], first: int, number: int, key: int) -> Batch | None:
            if number % ranks == rank:
                return self.stream.collated_parts(items, [range(len(items))], first, key)
            # A rank that has had no block yet computes on a dummy micro-batch.
            return self.stream.collated_parts(items[:1], [range(1)], first, key) if even and first == 0 else None

        reading = StreamReading(stream=self.stream, epoch=0, key=self.seed, batch=self.batch, start=0, keep=keep)
        if self.prefetch.workers:
            found = reading.in_processes(self.prefetch)
        else:
            found = reading.here(self.stream.cursor(0, self.seed), False)
        spare: Batch | None = None
        while turn := list(islice(found, ranks)):
            for each in turn:
                compare_samples(world, len(self.sizes), each)
                if not each.samples:
                    refuse_empty(self.stream, 0, each.read)
                self.sizes[each.number] = each.samples
            if 0 not in self.sizes:
                raise DataError(
                    "the first loader process has no held-out samples",
                    where=self.stream.name,
                    remedy="take fewer loader processes, or none",
                )
            spare = next((each.kept for each in turn if each.kept is not None), spare)
            mine = [each for each in turn if each.number % ranks == rank]
            for each in mine:
                yield each.number, MicroBatch(0, 0, place(script_batch(each.kept)), each.samples, 1.0, 0, True)
            for _ in range(_most(turn, ranks) - len(mine) if even else 0):
                yield 0, MicroBatch(0, 0, place(script_batch(spare)), 0, 0.0, 0, True)
        world.agree([f"{self.samples} samples"], "the length of the stream", DIFFERENT)


def _most(turn: list[StreamBatch], ranks: int) -> int:
    """Return the largest number of blocks of a rank."""
    owners = [each.number % ranks for each in turn]
    return max(owners.count(rank) for rank in range(ranks))
