"""Make the reader for a source or a stream."""

from __future__ import annotations

from tutti.data.epochs import Epochs
from tutti.data.loader import Prefetch
from tutti.data.order import SampleOrder
from tutti.data.reader import BatchReader, MapReader
from tutti.data.source import Source
from tutti.data.stream import Lines, ReplicatedStream, ShardedStream, Stream
from tutti.errors import UsageError


def make_reader(
    data: Source | Stream,
    epochs: Epochs,
    rank: int,
    seed: int,
    comms: Lines,
    prefetch: Prefetch,
    order: SampleOrder | None = None,
) -> BatchReader:
    """Make the reader of one data rank.

    Args:
        data: a source or a stream.
        epochs: the batch contract of every epoch.
        rank: the data rank.
        seed: of all random draws.
        comms: the communicators that a stream needs.
        prefetch: loader processes for a source.
        order: the order of a source's samples; None: all, shuffled.

    Raises:
        UsageError: loader processes were requested for a stream.
    """
    if not isinstance(data, Stream):
        return MapReader(data, epochs, rank, seed, prefetch, order, comms.world)
    if prefetch.workers:
        raise UsageError(
            f"{prefetch.workers} data workers cannot share one stream",
            why="its samples come one after the other",
            remedy="leave --data-workers out, or give the data set __len__ and __getitem__",
        )
    if data.sharded:
        # The length of a sharded stream is unknown, so that its batch cannot grow.
        return ShardedStream(data, epochs.first, rank, seed, comms)
    return ReplicatedStream(data, epochs, rank, seed, comms)
