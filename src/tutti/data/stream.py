"""Read iterable data sets (streams), which fix the order of their samples, in lockstep on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch

from tutti.data.batches import CollatedBatch, slice_batch
from tutti.data.collation import collate
from tutti.data.contract import BatchContract
from tutti.data.digest import digest
from tutti.data.epochs import Epochs
from tutti.data.global_generators import own_generators, seed_generators
from tutti.data.keyed_random import hash64
from tutti.data.reader import Position, RankBatch, StreamRanks
from tutti.errors import CheckpointError, DataError
from tutti.types import Batch

_SKIPPED_TOGETHER = 64
_COLLATE = int.from_bytes(b"collate", "big")


class Stream:
    """An iterable data set, opened anew for each epoch.

    Args:
        data: an iterable, or a function without arguments that returns one.
        sharded: the data set shards itself: each data rank reads another stream.
        collate: the script's function from a list of samples to a batch; None for that of PyTorch.
        drop_last: whether an epoch ends before a batch that would be smaller than the others.

    Attributes:
        samples: samples in an epoch; None if unknown until the stream ends.
    """

    def __init__(
        self,
        data: Any,
        sharded: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        self.data, self.sharded, self.name = data, sharded, type(data).__name__
        self.collate, self.drop_last = collate, drop_last
        self.samples = None if sharded else _length(data)
        self._tried: Cursor | None = None

    def key(self, seed: int, rank: int) -> int:
        """Return the key of random draws on data rank ``rank``."""
        return int(hash64(seed, rank)) if self.sharded else seed

    def cursor(self, epoch: int, key: int) -> Cursor:
        """Return a cursor before the first sample of ``epoch``: that of ``first_batch`` if it is still unused."""
        tried, self._tried = self._tried, None
        return tried if tried is not None and tried.begins(epoch, key) else Cursor(self, epoch, key)

    def first_batch(self, count: int, key: int) -> Batch:
        """Return the first ``count`` samples of epoch 0 as a batch, which ``cursor`` reads again.

        Raises:
            DataError: the stream is empty, or a sample cannot be read or collated.
        """
        if self._tried is None:
            self._tried = Cursor(self, 0, key)
        items = self._tried.peek(count)
        if not items:
            _empty(self, 0, 0)
        if self.collate is not None:
            return _collated(self.collate, items, key, Position(), 0)
        return _collate(items, items, 0, self.name)

    def open(self, epoch: int) -> Any:
        """Return the iterable for ``epoch``, after ``set_epoch`` if it has that method."""
        ready = hasattr(self.data, "__iter__") and not isinstance(self.data, type)
        items: Any = self.data if ready else self.data()
        if hasattr(items, "set_epoch"):
            items.set_epoch(epoch)
        return items


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


class Cursor:
    """Read one epoch of a stream sequentially.

    Random draws of the stream with Python's, NumPy's or PyTorch's global generators are keyed by (key, epoch, number of
    the sample): ranks with equal keys draw the same, also after a resume.

    Args:
        stream: the stream.
        epoch: from 0.
        key: of the random draws.

    Attributes:
        number: samples taken so far.
    """

    def __init__(self, stream: Stream, epoch: int, key: int) -> None:
        self._stream, self._epoch, self._key = stream, epoch, key
        self._items = stream.open(epoch)
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self.number = 0

    def take(self, count: int) -> list[Any]:
        """Return the next ``count`` samples, fewer at the end. Raises DataError naming a sample that cannot be read."""
        taken = self._ahead[:count]
        del self._ahead[:count]
        with own_generators():
            while len(taken) < count and (item := self._next(self.number + len(taken))):
                taken += item
        self.number += len(taken)
        return taken

    def begins(self, epoch: int, key: int) -> bool:
        """Return whether this is a cursor of ``epoch`` with ``key`` from which no sample has been taken."""
        return (self._epoch, self._key, self.number) == (epoch, key, 0)

    def peek(self, count: int) -> list[Any]:
        """Return the next ``count`` samples, fewer at the end, which ``take`` returns again."""
        self.more(count)
        return self._ahead[:count]

    def skip(self, count: int) -> list[Any]:
        """Read on until ``number`` is ``count``, discarding samples; return the last one in a list."""
        last: list[Any] = []
        while self.number < count and (taken := self.take(min(count - self.number, _SKIPPED_TOGETHER))):
            last = taken[-1:]
        return last

    def more(self, count: int = 1) -> bool:
        """Return whether there are ``count`` more samples; reads them ahead."""
        with own_generators():
            while len(self._ahead) < count and (item := self._next(self.number + len(self._ahead))):
                self._ahead += item
        return len(self._ahead) >= count

    def state(self) -> str | None:
        """Return ``state_dict()`` of the data set as a JSON string.

        None if it has no such method, its state is not JSON, or a sample has been read ahead.
        """
        if self._ahead or not hasattr(self._items, "state_dict"):
            return None
        state = self._items.state_dict()
        return json.dumps(state) if _is_json(state) else None

    def restore(self, state: Any, number: int) -> bool:
        """Load ``state`` into the data set, which then continues at sample ``number``; return False if it cannot."""
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
            raise DataError(
                f"cannot read sample {number} of epoch {self._epoch}",
                where=self._stream.name,
                why=f"{type(error).__name__}: {error}",
            ) from error


def _is_json(value: Any) -> bool:
    """Return whether ``value`` survives a round trip through JSON unchanged."""
    if isinstance(value, dict):
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and value - value == 0)


class Lines(Protocol):
    """The communicators that reading a stream needs."""

    @property
    def world(self) -> StreamRanks:
        """All ranks."""

    @property
    def replica(self) -> StreamRanks:
        """The data ranks."""

    @property
    def model(self) -> StreamRanks:
        """The ranks of one replica."""


class ReplicatedStream:
    """Read one global stream: every rank reads all samples and keeps its own.

    Global batches are therefore the same for any number of ranks. Digests of the samples are compared over all ranks at
    the batches 0, 1, 2, 4, 8, … after the start of each ``read``; the number of samples is compared at the end.

    Args:
        source: the stream.
        epochs: the batch contract of every epoch.
        rank: this data rank.
        seed: of all random draws.
        comms: the communicators; ``world`` compares digests.
    """

    def __init__(self, source: Stream, epochs: Epochs, rank: int, seed: int, comms: Lines) -> None:
        self.source, self._epochs, self._rank, self._seed = source, epochs, rank, seed
        self._contract = epochs.first
        self._ranks = comms.world
        self._kept: str | None = None
        self._loaded: tuple[Position, Any] = (Position(), None)

    def read(self, epoch: int, start: int) -> Iterator[RankBatch]:
        """See ``BatchReader.read``. Collective: digests are compared over all ranks.

        Raises:
            MismatchError: the ranks read different samples.
            DataError: the stream is empty, ends before ``start``, or does not have the length that it states.
        """
        batch = self._epochs.at(epoch).batch
        cursor = self._open(epoch, start, start * batch)
        step, last = start, False
        while not last:
            first = cursor.number
            items = cursor.take(batch)
            if self.source.drop_last and 0 < len(items) < batch:
                raise DataError(
                    f"drop_last leaves none of {len(items)} samples, which are fewer than a batch of {batch}",
                    where=self.source.name,
                    remedy="leave drop_last out, or take a smaller batch",
                )
            self._compare(epoch, step - start, first, items)
            if not items:
                _empty(self.source, epoch, first)
            self._kept = cursor.state() if self._ranks.rank == 0 else None
            step, last = step + 1, not cursor.more(batch if self.source.drop_last else 1)
            if not self.source.drop_last:
                self._check_length(cursor.number, last)
            if last:
                self._ranks.agree(
                    [f"epoch {epoch} with {cursor.number} samples"], "the length of the stream", _DIFFERENT
                )
            yield self._part(items, first, Position(epoch + 1, 0) if last else Position(epoch, step))

    def _open(self, epoch: int, start: int, number: int) -> Cursor:
        """Return a cursor at batch ``start``, whose first sample has ``number``: from saved state, or by skipping."""
        at, state = self._loaded
        cursor = Cursor(self.source, epoch, self._seed) if start else self.source.cursor(epoch, self._seed)
        if not (start and at == (epoch, start) and cursor.restore(state, number)):
            cursor.skip(number)
        if cursor.number < number:
            _empty(self.source, epoch, cursor.number, number)
        return cursor

    def _compare(self, epoch: int, batches: int, first: int, items: list[Any]) -> None:
        # At powers of two: streams that diverge are found, early or late, at next to no cost.
        if batches & (batches - 1) == 0:
            lines = [f"sample {first + i} of epoch {epoch}, digest {digest(item)}" for i, item in enumerate(items)]
            self._ranks.agree(lines, "the samples of the stream", _DIFFERENT)

    def _check_length(self, number: int, last: bool) -> None:
        length = self.source.samples
        if length is None or (number == length if last else number < length):
            return
        found = f"has {number}" if last else f"goes on after {number}"
        raise DataError(
            f"the data set says that it has {length} samples, and {found}",
            where=self.source.name,
            remedy="correct its __len__, or leave it out and give --steps",
        )

    def _part(self, items: list[Any], first: int, after: Position) -> RankBatch:
        mine = self._contract.part(len(items), self._rank)
        own, name = items[mine.start : mine.stop], self.source.name
        few = items[: len(self._contract.first_micro_batch(len(items)))]
        if (function := self.source.collate) is not None:
            keys = self._seed, after
            spans = self._contract.spans(len(items), self._rank, len(own))
            dummy = None if mine else _collated(function, few, *keys, first)
            return RankBatch(_parts(function, own, spans, *keys, first + mine.start), len(items), after, dummy)
        others = None if mine else _collate(few, items, first, name)
        return RankBatch(_collate(own, items, first + mine.start, name), len(items), after, others)

    def state(self) -> Any:
        """Return the data set's own state, or None; with it, a resume need not skip the consumed samples."""
        return None if self._kept is None else json.loads(self._kept)

    def load(self, at: Position, state: Any) -> None:
        """See ``BatchReader.load``."""
        self._loaded = at, state

    def describe(self) -> Mapping[str, str]:
        """See ``BatchReader.describe``."""
        return {"order": "that of the stream, which every device reads whole; nothing is shuffled"}

    def close(self) -> None:
        """Nothing is open between epochs."""


class ShardedStream:
    """Read a data set that shards itself: each data rank reads another stream.

    A rank whose stream has ended goes on without samples until all streams have ended, so that every sample counts
    once. Every step all-gathers the ranks' sample counts.

    Args:
        source: the stream.
        contract: the batch contract of every epoch.
        rank: this data rank.
        seed: of all random draws; each data rank has its own RNG stream.
        comms: the communicators; ``replica`` gathers counts, ``model`` compares digests.
    """

    def __init__(self, source: Stream, contract: BatchContract, rank: int, seed: int, comms: Lines) -> None:
        self.source, self._contract, self._rank, self._seed = source, contract, rank, seed
        self._replicas, self._stages = comms.replica, comms.model

    def read(self, epoch: int, start: int) -> Iterator[RankBatch]:
        """See ``BatchReader.read``. Collective: an all-gather over the data ranks in every step.

        Raises:
            MismatchError: the ranks of one replica read different samples.
            DataError: a rank's stream is empty.
        """
        share = len(self._contract.part(self._contract.batch, self._rank))
        key = self.source.key(self._seed, self._rank)
        cursor = self.source.cursor(epoch, key)
        step, last = start, False
        some = cursor.skip(start * share)
        while not last:
            first = cursor.number
            items = cursor.take(share)
            some = items[:1] or some
            counts = self._counts(len(items), cursor.more(), not some)
            self._compare(epoch, step - start, counts, items)
            step, last = step + 1, not any(more for _, more, _ in counts)
            if void := [str(rank) for rank, (_, _, empty) in enumerate(counts) if empty]:
                _empty(self.source, epoch, 0, ranks=", ".join(void))
            held = [count for count, _, _ in counts]
            after = Position(epoch + 1, 0) if last else Position(epoch, step)
            if (function := self.source.collate) is not None:
                keys = key, after
                spans = self._contract.spans(sum(held), self._rank, len(items))
                dummy = None if items else _collated(function, some, *keys, first)
                yield RankBatch(_parts(function, items, spans, *keys, first), sum(held), after, dummy)
                continue
            others = None if items else _collate(some, some, first, self.source.name)
            yield RankBatch(_collate(items, some, first, self.source.name), sum(held), after, others)

    def _counts(self, *own: int) -> list[list[int]]:
        """All-gather ``own`` over the data ranks; return one list a rank, in rank order."""
        return [row.tolist() for row in self._replicas.all_gather(torch.tensor(own), "samples of the own streams")]

    def _compare(self, epoch: int, batches: int, counts: list[list[int]], items: list[Any]) -> None:
        """Compare counts and digests over the ranks of one replica. Raises MismatchError where they differ."""
        lines = [f"{counts[self._rank][0]} samples"]
        if batches & (batches - 1) == 0:
            lines += [f"digest {digest(item)} in epoch {epoch}" for item in items]
        self._stages.agree(lines, "the samples of one replica", "give the stages of one replica the same stream")

    def state(self) -> Any:
        """Return the number of streams, which a resumed run must have too."""
        return {"streams": self._contract.ranks}

    def load(self, at: Position, state: Any) -> None:
        """Raise CheckpointError if the number of data ranks has changed."""
        saved = state["streams"] if isinstance(state, Mapping) else None
        if saved != self._contract.ranks:
            raise CheckpointError(
                f"the run had {saved} data ranks and now has {self._contract.ranks}",
                why="its data set shards itself, so that each rank continues its own stream",
                remedy="resume on as many devices",
            )

    def describe(self) -> Mapping[str, str]:
        """Describe, for the run's header, how results and resuming depend on the number of devices."""
        return {
            "order": "each device reads a stream of its own: batches, and with them the result, depend on the devices",
            "resume": f"on {self._contract.ranks} data ranks only",
        }

    def close(self) -> None:
        """Nothing is open between epochs."""


_DIFFERENT = (
    "give every rank the same stream (the same seed, no sharding by rank), or wrap a data set that shards itself in "
    "tutti.data.Sharded"
)


def _collate(items: list[Any], some: list[Any], first: int, where: str) -> Batch:
    """Collate ``items`` into a batch, without items into an empty batch with the structure of ``some``.

    Args:
        items: the samples.
        some: samples of the same structure, at least one if ``items`` is empty.
        first: number of the first sample in the epoch, for errors.
        where: the data set's name, for errors.

    Raises:
        DataError: as ``collate``.
    """
    with own_generators():
        made = collate(items or some[:1], lambda place: f"sample {first + place} of the epoch", where)
    return made if items else slice_batch(made, 0, 0)


def _parts(
    function: Callable[[list[Any]], Any],
    items: list[Any],
    spans: list[tuple[int, list[range]]],
    seed: int,
    after: Position,
    first: int,
) -> CollatedBatch:
    """Collate a rank's samples by the script's function, micro-batch by micro-batch.

    Args:
        function: the script's function.
        items: the rank's samples.
        spans: the micro-batches of each worker.
        seed: of random draws.
        after: the data position after the batch.
        first: number of the first sample in the epoch.
    """
    pieces = [piece for _, each in spans for piece in each] if items else []
    made = tuple(
        _collated(function, items[piece.start : piece.stop], seed, after, first + piece.start) for piece in pieces
    )
    return CollatedBatch(made, tuple(map(len, pieces)))


def _collated(function: Callable[[list[Any]], Any], items: list[Any], seed: int, after: Position, first: int) -> Batch:
    with own_generators():
        seed_generators(int(hash64(_COLLATE, seed, after.epoch, after.batch, first)))
        return function(items)


def _empty(source: Stream, epoch: int, found: int, wanted: int = 0, ranks: str = "") -> NoReturn:
    if wanted or found:
        raise DataError(
            f"epoch {epoch} ended after {found} samples, and the run was at sample {max(wanted, found)}",
            where=source.name,
            why="the stream is not the one that the run began with",
            remedy="resume with the same data",
        )
    raise DataError(
        f"the stream is empty in epoch {epoch}",
        where=f"{source.name}{f', data rank {ranks}' if ranks else ''}",
        remedy="check its path and filters, and that it can be read more than once",
    )
