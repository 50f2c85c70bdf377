"""Iterable data sets (streams), which fix the order of their samples: read one epoch in order, and collate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from tutti.data.batches import CollatedBatch, slice_batch
from tutti.data.collation import collate, unreadable_sample
from tutti.data.global_generators import own_generators, seed_generators
from tutti.data.keyed_random import hash64
from tutti.errors import DataError, counted
from tutti.types.micro_batch import Batch

_SKIPPED_TOGETHER = 64
_COLLATE = int.from_bytes(b"collate", "big")
_NO_TURN = nullcontext()


class Stream:
    """Iterable data set as a run reads it: opened anew for each epoch, in the order of its own samples.

    Args:
        data: an iterable, or a function without arguments that returns one.
        sharded: whether the data set shards itself, so that each data rank reads other samples; False: all ranks read
            the same samples in the same order.
        collate: the script's function from a list of samples to a batch; None for PyTorch's default collation.
        drop_last: whether an epoch ends before a batch that would be smaller than the others.
        processes: loader processes of each rank; from two on the data set divides its samples over them.

    Attributes:
        name: name of the class of ``data``, for messages.
        samples: samples in an epoch; None if the number of samples or batches is unknown until the stream ends.
        stated: ``len(data)``; None if ``data`` has no length, or shards itself.
    """

    def __init__(
        self,
        data: Any,
        sharded: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        processes: int = 0,
    ) -> None:
        self.data, self.sharded, self.name = data, sharded, type(data).__name__
        self.collate, self.drop_last, self.processes = collate, drop_last, processes
        self.stated = None if sharded else _length(data)
        # Each process ends with a smaller batch of its own, so that the number of batches is unknown.
        self.samples = None if processes > 1 else self.stated
        self._tried: Cursor | None = None

    def key(self, seed: int, rank: int) -> int:
        """Return the integer that seeds the random draws of an iterable data set on one data rank.

        Args:
            seed: seed of the run.
            rank: the data rank.

        Returns:
            ``seed`` if all ranks read the same samples; a 64-bit hash of seed and rank if the data set shards itself.
        """
        return int(hash64(seed, rank)) if self.sharded else seed

    def cursor(self, epoch: int, key: int) -> Cursor:
        """Return a reader of one epoch of the iterable data set, from its first sample on.

        The reader's ``take(count)`` returns the next samples. Samples of the epoch that ``first_batch`` has read before
        are not read twice: this reader returns them, too. Otherwise the iterable is opened anew for the epoch
        (``open``).

        Args:
            epoch: from 0.
            key: integer that seeds random draws of the data set, as the method ``key`` returns it.
        """
        tried, self._tried = self._tried, None
        return tried if tried is not None and tried.begins(epoch, key) else Cursor(self, epoch, key)

    def first_batch(self, count: int, key: int) -> Batch:
        """Return the first samples of the iterable data set as a batch, before training, without consuming them.

        The samples are kept: the reader of the next ``cursor(0, key)`` with the same ``key`` yields them again, and a
        further call with this ``key`` reads them no second time. A call with another ``key`` opens the data set anew.

        Args:
            count: number of samples; a shorter data set gives fewer.
            key: integer that seeds random draws of the data set, as the method ``key`` returns it.

        Returns:
            The collated samples, on the CPU.

        Raises:
            DataError: the data set is empty, or a sample cannot be read or collated.
        """
        if self._tried is None or not self._tried.begins(0, key):
            self._tried = Cursor(self, 0, key)
        items = self._tried.peek(count)
        if not items:
            refuse_empty(self, 0, 0)
        return self.collated(items, 0, key)

    def collated(self, items: list[Any], first: int, key: int) -> Batch:
        """Collate samples into one batch, with the script's ``collate`` or PyTorch's ``default_collate``.

        Args:
            items: the samples, at least one.
            first: number of the first of these samples in the epoch, from 0.
            key: integer that, with ``first``, seeds the random draws of the script's ``collate``.

        Returns:
            What the script's ``collate`` returns; without it the structure of a sample as ``default_collate`` makes it,
            tensors with the samples as first dimension.

        Raises:
            DataError: PyTorch's collation finds samples that cannot be in one batch; errors of the script's ``collate``
                propagate.
        """
        with own_generators():
            if self.collate is None:
                return collate(items, lambda place: f"sample {first + place} of the epoch", self.name)
            seed_generators(int(hash64(_COLLATE, key, first)))
            return self.collate(items)

    def collated_parts(self, items: list[Any], pieces: list[range], first: int, key: int) -> Batch:
        """Collate a rank's samples into one batch, or with the script's ``collate`` into one for each micro-batch.

        Args:
            items: the rank's samples, at least one.
            pieces: the micro-batches, as ranges of indices in ``items``.
            first: number of the first of ``items`` in the epoch, from 0.
            key: integer that seeds the random draws of the script's ``collate``, with the number of the first sample of
                each micro-batch.

        Returns:
            One batch of all samples; with the script's ``collate`` a ``CollatedBatch``, which holds one batch for each
            micro-batch.

        Raises:
            DataError: PyTorch's collation finds samples that cannot be in one batch; errors of the script's ``collate``
                propagate.
        """
        if self.collate is None:
            return self.collated(items, first, key)
        made = tuple(self.collated(items[p.start : p.stop], first + p.start, key) for p in pieces)
        return CollatedBatch(made, tuple(map(len, pieces)))

    def without_samples(self, some: list[Any]) -> Batch:
        """Return a batch of 0 samples, for a rank that has no sample of a global batch.

        Args:
            some: samples of the data set, at least one; the first gives the structure of the batch.

        Returns:
            The structure that ``collated`` makes of a sample, in which every tensor has a first dimension of 0. If the
            script has a ``collate`` function: a ``CollatedBatch`` (a batch that consists of micro-batches collated one
            by one) of no micro-batches.

        Raises:
            DataError: PyTorch's collation refuses the sample.
        """
        return CollatedBatch() if self.collate is not None else slice_batch(self.collated(some[:1], 0, 0), 0, 0)

    @property
    def is_function(self) -> bool:
        """Whether the script gave a function, which returns a new iterable for each epoch, in place of a data set."""
        return isinstance(self.data, type) or not hasattr(self.data, "__iter__")

    def open(self, epoch: int, turn: AbstractContextManager[Any] = _NO_TURN) -> Any:
        """Return the iterable for an epoch, after calling its ``set_epoch(epoch)`` if it has that method.

        The iterable is the data set itself, or a new result of the function that the script gave instead of a data set.

        Args:
            epoch: from 0.
            turn: context in which ``set_epoch`` is called, such as a lock of several loader processes.
        """
        items: Any = self.data() if self.is_function else self.data
        if hasattr(items, "set_epoch"):
            with turn:
                items.set_epoch(epoch)
        return items


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


class Cursor:
    """Reads one epoch of an iterable data set sequentially.

    Random draws of the data set with Python's, NumPy's or PyTorch's global generators are keyed by (key, epoch, number
    of the sample): ranks with equal keys draw the same, also after a resume. Every method that reads a sample raises
    DataError if the data set raises IndexError, KeyError, OSError or ValueError; its other exceptions propagate.

    The constructor opens the data set for the epoch (``Stream.open``), unless it is given open, and reads nothing.

    Args:
        stream: the iterable data set.
        epoch: from 0.
        key: integer that seeds the random draws.
        items: the iterable that ``Stream.open`` has returned for the epoch; None to open the data set here.

    Attributes:
        number: number of samples taken or skipped so far; samples that were only looked at by ``peek`` do not count.
    """

    def __init__(self, stream: Stream, epoch: int, key: int, items: Any = None) -> None:
        self._stream, self._epoch, self._key = stream, epoch, key
        self._items = stream.open(epoch) if items is None else items
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self.number = 0

    def take(self, count: int) -> list[Any]:
        """Read the next samples of the epoch of an iterable data set, and count them as consumed.

        Args:
            count: number of samples; fewer are read at the end of the epoch, and none after it.

        Returns:
            List of the samples, not collated.

        Raises:
            DataError: reading a sample raised IndexError, KeyError, OSError or ValueError; the error names its number.
        """
        taken = self._ahead[:count]
        del self._ahead[:count]
        with own_generators():
            while len(taken) < count and (item := self._next(self.number + len(taken))):
                taken += item
        self.number += len(taken)
        return taken

    def begins(self, epoch: int, key: int) -> bool:
        """Return whether this reader is of the given epoch and seed, and is still at the epoch's first sample.

        Samples that ``peek`` or ``more`` has read ahead do not count: ``take`` has yet to return them.

        Args:
            epoch: from 0.
            key: seed of the data set's random draws.
        """
        return (self._epoch, self._key, self.number) == (epoch, key, 0)

    def peek(self, count: int) -> list[Any]:
        """Return a list of the next samples of an iterable data set's epoch without consuming them.

        The next ``take`` returns them again.

        Args:
            count: number of samples; fewer are returned at the end of the epoch.

        Raises:
            DataError: reading a sample raised IndexError, KeyError, OSError or ValueError.
        """
        self.more(count)
        return self._ahead[:count]

    def skip(self, count: int) -> list[Any]:
        """Read samples of an iterable data set and discard them, up to a position in the epoch or the epoch's end.

        Args:
            count: number of the first sample, from 0 in the epoch, that is not discarded. Nothing is read if this
                reader is there already, or past it.

        Returns:
            A list of one element, the last sample discarded; empty if none was.

        Raises:
            DataError: reading a sample raised IndexError, KeyError, OSError or ValueError.
        """
        last: list[Any] = []
        while self.number < count and (taken := self.take(min(count - self.number, _SKIPPED_TOGETHER))):
            last = taken[-1:]
        return last

    def more(self, count: int = 1) -> bool:
        """Return whether the epoch of an iterable data set has at least ``count`` more samples.

        These samples are read ahead and kept for the next ``take``.

        Args:
            count: number of samples.

        Raises:
            DataError: reading a sample raised IndexError, KeyError, OSError or ValueError.
        """
        with own_generators():
            while len(self._ahead) < count and (item := self._next(self.number + len(self._ahead))):
                self._ahead += item
        return len(self._ahead) >= count

    def state(self) -> str | None:
        """Return the iterable data set's own ``state_dict()`` after the samples taken so far, as a JSON string.

        Returns:
            The string; None if the data set has no such method, its state does not survive a round trip through JSON,
            or ``peek`` or ``more`` has read a sample that ``take`` has not yet returned.
        """
        if self._ahead or not hasattr(self._items, "state_dict"):
            return None
        state = self._items.state_dict()
        return json.dumps(state) if _is_json(state) else None

    def restore(self, state: Any, number: int) -> bool:
        """Restore the iterable data set's own saved state, so that consumed samples need not be read again.

        Afterwards this reader counts ``number`` samples as taken. To be called before the first sample is read.

        Args:
            state: the data set's ``state_dict()`` of the saved run; None for none.
            number: samples of the epoch that had been consumed when the state was saved.

        Returns:
            Whether the state was loaded; False if ``state`` is None, or the data set has no ``load_state_dict``.
        """
        if state is None or not hasattr(self._items, "load_state_dict"):
            return False
        self._items.load_state_dict(state)
        self.number = number
        return True

    def _next(self, number: int) -> list[Any]:
        """Return sample ``number`` in a list, which is empty at the end of the stream."""
        seed_generators(int(hash64(self._key, self._epoch, number)))
        try:
            if self._iterator is None:
                self._iterator = iter(self._items)
            return [next(self._iterator)]
        except StopIteration:
            return []
        except (IndexError, KeyError, OSError, ValueError) as error:
            what = f"cannot read sample {number} of epoch {self._epoch}"
            raise unreadable_sample(what, self._stream.name, error) from error


def _is_json(value: Any) -> bool:
    """Return whether ``value`` survives a round trip through JSON unchanged."""
    if isinstance(value, dict):
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and value - value == 0)


def refuse_empty(source: Stream, epoch: int, found: int, wanted: int = 0, ranks: str = "") -> NoReturn:
    """Raise DataError for an epoch of an iterable data set that is empty, or ends before the position of a resumed run.

    The message says that the epoch is empty if ``found`` and ``wanted`` are 0, else that the epoch ended too early.

    Args:
        source: the iterable data set, named in the error.
        epoch: from 0.
        found: number of samples that the epoch has.
        wanted: number of samples after which the resumed run goes on; 0 if the run is not resumed.
        ranks: the data ranks whose own streams are empty, as text; empty if all ranks read the same samples.

    Raises:
        DataError: always.
    """
    if wanted or found:
        raise DataError(
            f"epoch {epoch} ended after {counted(found, 'sample')}, and the run was at sample {max(wanted, found)}",
            where=source.name,
            why="the stream is not the one that the run began with",
            remedy="resume with the same data",
        )
    raise DataError(
        f"the stream is empty in epoch {epoch}",
        where=f"{source.name}{f', data rank {ranks}' if ranks else ''}",
        remedy="check its path and filters, and that it can be read more than once",
    )
