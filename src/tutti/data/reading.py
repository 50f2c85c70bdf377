"""Which reader fits which data."""

from __future__ import annotations

from tutti.data.epochs import Epochs
from tutti.data.loader import Prefetch
from tutti.data.reader import ByNumber, Reader
from tutti.data.source import Source
from tutti.data.stream import InStep, Lines, OwnStreams, Stream
from tutti.errors import UsageError


def make_reader(
    data: Source | Stream, epochs: Epochs, rank: int, seed: int, comms: Lines, prefetch: Prefetch
) -> Reader:
    """The reader of data rank ``rank``.

    Raises UsageError where loader processes are asked for and the samples cannot be fetched by number.
    """
    if not isinstance(data, Stream):
        return ByNumber(data, epochs, rank, seed, prefetch)
    if prefetch.workers:
        raise UsageError(
            f"{prefetch.workers} data workers cannot share one stream",
            why="its samples come one after the other",
            remedy="leave --data-workers out, or give the data set __len__ and __getitem__",
        )
    if data.sharded:
        # Nobody knows how long a stream of its own is, so that its batch cannot grow.
        return OwnStreams(data, epochs.first, rank, seed, comms)
    return InStep(data, epochs, rank, seed, comms)
