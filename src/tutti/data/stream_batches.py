"""Cut an epoch of a stream into global batches, in this process or in loader processes."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import IO, Any, NamedTuple

from torch.utils.data import get_worker_info

from tutti.data.digest import digest
from tutti.data.keyed_random import hash64
from tutti.data.loader import Prefetch
from tutti.data.stream import Cursor, Stream, refuse_empty
from tutti.errors import DataError, counted


class StreamBatch(NamedTuple):
    """A global batch of an iterable data set, as one rank has read it; the rank keeps only its own samples.

    Attributes:
        number: index of the batch in the epoch. Loader process i of k makes batches i, i + k, i + 2k, …, so that the
            indices of a process whose samples have ended are left out.
        samples: samples in the global batch; 0 if the epoch has none.
        read: samples of the epoch up to the end of this batch.
        kept: the rank's own samples, as ``StreamReading.keep`` returned them.
        lines: number and digest of each sample, in batches that ranks compare; else empty.
        last: whether the epoch ends with this batch.
        state: the data set's own state after the batch as a JSON string, or None.
    """

    number: int
    samples: int
    read: int
    kept: Any = None
    lines: tuple[str, ...] = ()
    last: bool = False
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class StreamReading:
    """One reading of an epoch of an iterable data set, as global batches of which this rank keeps its own samples.

    As in a PyTorch ``DataLoader`` with k processes, process n mod k makes batch n, from the samples that the data set
    yields in that process; processes whose samples have ended are passed over. The processes are forked for each
    reading, so that an epoch does not depend on earlier ones.

    Attributes:
        stream: the iterable data set.
        epoch: from 0.
        key: integer that seeds the random draws.
        batch: samples in a global batch.
        start: number of global batches of the epoch before the first one to yield. ``in_processes`` reads those batches
            and leaves them out; ``here`` gets a cursor that is past them.
        keep: function ``keep(samples, first, number, key)``, which returns the rank's own samples of global batch
            ``number``; ``first`` is the number of its first sample in the epoch (or in the loader process), and ``key``
            seeds the random draws of collation.
    """

    stream: Stream
    epoch: int
    key: int
    batch: int
    start: int
    keep: Callable[[list[Any], int, int, int], Any]

    def here(self, cursor: Cursor, with_state: bool) -> Iterator[StreamBatch]:
        """Read an epoch of an iterable data set in this process, and yield its global batches.

        The first batch yielded is number ``start`` of the epoch, an attribute of this object. One sample more than the
        batch is read ahead, or with ``drop_last`` a whole batch. No collective is performed.

        Args:
            cursor: reads the epoch; its next sample is the first of global batch ``start``.
            with_state: whether the data set is asked for its ``state_dict()`` after each batch.

        Yields:
            For each global batch a ``StreamBatch``: index in the epoch (``number``), size (``samples``), the result of
            the function ``keep``, an attribute of this object, for this rank's samples (``kept``), digests of the
            samples for a comparison over ranks (``lines``, a tuple of texts, empty where nothing is compared), the data
            set's own state as JSON text or None (``state``), and whether the epoch ends with the batch (``last``). If
            no sample is left, a single batch of 0 samples.

        Raises:
            DataError: a sample cannot be read or collated, or the data set has the option ``drop_last`` and too few
                samples for one batch.
        """
        number, last = self.start, False
        while not last:
            first = cursor.number
            items = cursor.take(self.batch)
            if self.stream.drop_last and 0 < len(items) < self.batch:
                raise self._left_none(len(items))
            kept = self.keep(items, first, number, self._collation(self.key)) if items else None
            lines = self._lines(items, first, number, "")
            state = cursor.state() if with_state else None
            read = cursor.number
            last = not cursor.more(self.batch if self.stream.drop_last else 1)
            yield StreamBatch(number, len(items), read, kept, lines, last, state)
            number += 1

    def in_processes(self, prefetch: Prefetch) -> Iterator[StreamBatch]:
        """Read an epoch of an iterable data set in loader processes, and yield its global batches.

        The first batch yielded is number ``start`` of the epoch, an attribute of this object. Process i of k makes
        batches i, i + k, i + 2k, …; the processes start with the iteration and end with it. ``set_epoch`` of a data set
        is called in this process, before they start; a function that the script gave is called in each of them. No
        collective is performed.

        Args:
            prefetch: number of loader processes, at least one, and how they start.

        Yields:
            For each global batch a ``StreamBatch``: index in the epoch (``number``; indices of a process that has ended
            are left out), size (``samples``), the result of the function ``keep``, an attribute of this object, for
            this rank's samples (``kept``), digests of the samples for a comparison over ranks (``lines``, a tuple of
            texts, empty where nothing is compared), and whether the epoch ends with the batch (``last``). If the epoch
            has no sample, a single batch of 0 samples.

        Raises:
            DataError: two processes yield the same samples, the epoch ends before ``start``, or a sample cannot be read
                or collated.
            LoaderError: a loader process was killed, ended, or gave no batch in time.
        """
        processes, ended = prefetch.workers, set[int]()
        made = read = passed = 0
        ahead: StreamBatch | None = None
        # Loader processes inherit the epoch. If they set it themselves, those that share it in memory race.
        ready = None if self.stream.is_function else self.stream.open(self.epoch)
        with (
            tempfile.TemporaryFile() as turns,
            closing(prefetch.batches(_ProcessReader(self, ready, turns), zip(count()))) as answers,  # type: ignore[type-var]
        ):
            for number, found in enumerate(answers):
                if found is None:
                    ended.add(number % processes)
                    if len(ended) == processes:
                        break
                    continue
                read += found.samples
                passed += 1
                if passed <= self.start:
                    continue
                if made == 1 and ahead is not None and number == ahead.number + 1:
                    self._refuse_repeated(ahead, found)
                made += 1
                if ahead is not None:
                    yield ahead
                ahead = found._replace(read=read)
        if ahead is None and self.start:
            refuse_empty(self.stream, self.epoch, read, max(read + 1, self.start))
        yield StreamBatch(0, 0, 0, last=True) if ahead is None else ahead._replace(last=True)

    def _collation(self, key: int) -> int:
        return int(hash64(key, self.epoch))

    def _lines(self, items: list[Any], first: int, number: int, where: str) -> tuple[str, ...]:
        # At powers of two: streams that diverge are found, early or late, at next to no cost.
        if (number - self.start) & (number - self.start - 1):
            return ()
        epoch = f"of epoch {self.epoch}{where}"
        return tuple(f"sample {first + i} {epoch}, digest {digest(item)}" for i, item in enumerate(items))

    def _refuse_repeated(self, one: StreamBatch, other: StreamBatch) -> None:
        """Raise DataError if the first batches of two processes are equal, and not of equal samples alone."""
        seen, again = ([line.rpartition(" ")[2] for line in batch.lines] for batch in (one, other))
        if seen and seen == again and (len(set(seen)) > 1 or len(seen) == 1):
            raise DataError(
                "two loader processes read the same samples",
                where=self.stream.name,
                why="each process iterates over the whole data set, which then trains on every sample more than once",
                remedy="let __iter__ divide the samples by torch.utils.data.get_worker_info(), or take one process",
            )

    def _left_none(self, samples: int) -> DataError:
        return DataError(
            f"drop_last leaves none of {counted(samples, 'sample')}, fewer than a batch of {self.batch}",
            where=self.stream.name,
            remedy="leave drop_last out, or take a smaller batch",
        )


class _ProcessReader:
    """Reads the batches of one loader process.

    Args:
        reading: the reading, which every process has a copy of.
        ready: the data set, opened for the epoch; None if each process calls the script's function.
        turns: file that a process locks while it sets the epoch, as functions may return the same object.
    """

    def __init__(self, reading: StreamReading, ready: Any, turns: IO[bytes]) -> None:
        self._reading, self.items = reading, reading.stream.data
        self._ready, self._turns = ready, turns
        self._cursor: Cursor | None = None
        self._key, self._where = reading.key, ""

    def fetch(self, number: int) -> StreamBatch | None:
        """Return batch ``number``, or None if this process has no more samples."""
        reading = self._reading
        if self._cursor is None:
            process = get_worker_info()
            if process is not None and process.num_workers > 1:
                self._key = int(hash64(reading.key, process.id))
                self._where = f" in loader process {process.id}"
            items = self._ready
            if items is None:
                items = reading.stream.open(reading.epoch, _turn(self._turns))
            self._cursor = Cursor(reading.stream, reading.epoch, self._key, items)
        first = self._cursor.number
        items = self._cursor.take(reading.batch)
        if not items or (reading.stream.drop_last and len(items) < reading.batch):
            return None
        if number < reading.start:
            return StreamBatch(number, len(items), 0)
        kept = reading.keep(items, first, number, reading._collation(self._key))
        return StreamBatch(number, len(items), 0, kept, reading._lines(items, first, number, self._where))


@contextmanager
def _turn(file: IO[bytes]) -> Iterator[None]:
    """Hold a lock of a file that this process has inherited; a process that ends frees it."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)
