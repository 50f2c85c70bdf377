"""Make the reader of a map-style or an iterable data set."""

from __future__ import annotations

from tutti.comm.mesh_communicators import Communicators
from tutti.data.epochs import Epochs
from tutti.data.loader import Prefetch
from tutti.data.order import SampleOrder
from tutti.data.reader import BatchReader, MapReader
from tutti.data.source import Source
from tutti.data.stream import Stream
from tutti.data.stream_reader import ReplicatedStream, ShardedStream
from tutti.errors import UsageError


def make_reader(
    data: Source | Stream,
    epochs: Epochs,
    rank: int,
    seed: int,
    comms: Communicators,
    prefetch: Prefetch,
    order: SampleOrder | None = None,
) -> BatchReader:
    """Make the reader of this rank's samples of every global batch, for a map-style or an iterable data set.

    Performs no collective and reads no sample; the reader's ``read`` does both.

    Args:
        data: a ``Source`` (map-style), or a ``Stream`` (iterable).
        epochs: the batch contract of every epoch: sizes of global batches and their division over ranks.
        rank: index of the data-parallel rank, from 0.
        seed: seed of all random draws.
        comms: communicators; the reader compares the samples of iterables and the order of samplers over their ranks.
        prefetch: settings of the loader processes.
        order: the order of a map-style data set's samples; None: all, shuffled.

    Returns:
        The reader, whose ``read(epoch, start)`` yields this rank's samples of each global batch on the CPU. It reads a
        map-style data set by index. From an iterable it reads all samples and keeps the rank's own; if the data set
        shards itself, all samples are the rank's own.

    Raises:
        UsageError: loader processes were requested for a stream that shards itself.
    """
    if not isinstance(data, Stream):
        return MapReader(data, epochs, rank, seed, prefetch, order, comms.world)
    if not data.sharded:
        return ReplicatedStream(data, epochs, rank, seed, comms, prefetch)
    if prefetch.workers:
        raise UsageError(
            f"{prefetch.workers} loader processes cannot be combined with a data set that shards itself",
            why="each device reads a stream of its own, one sample after the other",
            remedy="leave --data-workers out, or let every device read the whole stream",
        )
    # The length of a sharded stream is unknown, so that its batch cannot grow.
    return ShardedStream(data, epochs.first, rank, seed, comms)
