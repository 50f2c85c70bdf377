"""Read streams in lockstep on all ranks, and keep each data rank's part of every global batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tutti.comm.communicator import Communicator
from tutti.comm.mesh_communicators import Communicators
from tutti.data.contract import BatchContract
from tutti.data.digest import digest
from tutti.data.epochs import Epochs
from tutti.data.keyed_random import hash64
from tutti.data.loader import IN_PROCESS, Prefetch
from tutti.data.reader import Position, RankBatch
from tutti.data.stream import Cursor, Stream, refuse_empty
from tutti.data.stream_batches import StreamBatch, StreamReading
from tutti.errors import CheckpointError, DataError, counted
from tutti.types.micro_batch import Batch

DIFFERENT = (
    "give every rank the same stream (the same seed, no sharding by rank), or wrap a data set that shards itself in "
    "tutti.data.Sharded"
)
_PROCESSES, _OWN = "loader processes", "own state"
_OTHER_WAY = "the saved run read its data in another way"
_SAME_DATA = "give the data set that the saved run had"


class ReplicatedStream:
    """Reads an iterable data set that is the same on all ranks: every rank reads all samples and keeps its own.

    Global batches are therefore the same for any number of ranks. Digests of the samples are compared over all ranks at
    the batches 0, 1, 2, 4, 8, … after the start of each ``read``; the number of samples is compared at the end.

    Args:
        source: the iterable data set.
        epochs: batch size of each epoch, and its division over logical workers (fixed shares of the global batch) and
            ranks.
        rank: index of this data-parallel rank, from 0.
        seed: seed of all random draws.
        comms: the communicators, of which ``world`` (all ranks) compares digests.
        prefetch: settings of the loader processes, whose number must be the same after a resume; with 0 loader
            processes this process reads.
    """

    def __init__(
        self,
        source: Stream,
        epochs: Epochs,
        rank: int,
        seed: int,
        comms: Communicators,
        prefetch: Prefetch = IN_PROCESS,
    ) -> None:
        self.source, self._epochs, self._rank, self._seed = source, epochs, rank, seed
        self._contract, self._prefetch = epochs.first, prefetch
        self._ranks = comms.world
        self._kept: str | None = None
        self._loaded: tuple[Position, Any] = (Position(), None)

    def follow(self, epochs: Epochs) -> None:
        """Replace the batch size of each epoch and its division over ranks, after a resume with other ones.

        Args:
            epochs: batch size of each epoch, and its division over logical workers (fixed shares of the global batch)
                and ranks; epochs before the resume are included.
        """
        self._epochs = epochs

    def read(self, epoch: int, start: int) -> Iterator[RankBatch]:
        """Read an epoch of an iterable data set, and yield this rank's part of each global batch, on the CPU.

        Every rank reads all samples and keeps its own. Collective over all ranks: the ranks all-gather and compare
        digests of the samples of global batches ``start`` + 0, 1, 2, 4, 8, …, and the number of samples at the end.

        Args:
            epoch: from 0.
            start: first global batch to yield, counted in the epoch from 0; earlier ones are read and discarded, unless
                the data set restores a saved state of its own.

        Yields:
            For each global batch a ``RankBatch``: this rank's samples (``batch``), the number of samples in the global
            batch over all ranks (``samples``), the data position (epoch, global batch) after it (``after``), and, if
            this rank has no samples, samples for a dummy micro-batch (``dummy``), whose gradient is ignored.

        Raises:
            MismatchError: on every rank, if ranks have read different samples.
            DataError: the data set is empty, ends before ``start``, or does not have the length that its ``__len__``
                states; ``drop_last`` leaves no samples; a sample cannot be read or collated; or loader processes read
                the same samples.
            LoaderError: a loader process ended, or gave no batch within the timeout.
        """
        batch = self._epochs.contract_of(epoch).batch
        reading = StreamReading(
            stream=self.source, epoch=epoch, key=self._seed, batch=batch, start=start, keep=self._part
        )
        if self._prefetch.workers:
            batches = reading.in_processes(self._prefetch)
        else:
            batches = reading.here(self._open(epoch, start, start * batch), self._ranks.rank == 0)
        for step, each in enumerate(batches, start):
            compare_samples(self._ranks, step - start, each)
            if not each.samples:
                refuse_empty(self.source, epoch, each.read)
            self._kept = each.state
            if not self.source.drop_last:
                self._check_length(each.read, each.last)
            if each.last:
                self._ranks.agree([f"epoch {epoch} with {each.read} samples"], "the length of the stream", DIFFERENT)
            part, dummy = each.kept
            yield RankBatch(
                part, each.samples, Position(epoch + 1, 0) if each.last else Position(epoch, step + 1), dummy
            )

    def _open(self, epoch: int, start: int, number: int) -> Cursor:
        """Return a cursor at batch ``start``, whose first sample has ``number``: from saved state, or by skipping."""
        at, state = self._loaded
        cursor = Cursor(self.source, epoch, self._seed) if start else self.source.cursor(epoch, self._seed)
        if not (start and at == (epoch, start) and cursor.restore(state, number)):
            cursor.skip(number)
        if cursor.number < number:
            refuse_empty(self.source, epoch, cursor.number, number)
        return cursor

    def _check_length(self, number: int, last: bool) -> None:
        length = self.source.stated
        if length is None or (number == length if last else number < length):
            return
        found = f"has {number}" if last else f"goes on after {number}"
        divide = ", or divide the samples over the loader processes by torch.utils.data.get_worker_info()"
        raise DataError(
            f"the data set says that it has {counted(length, 'sample')}, and {found}",
            where=self.source.name,
            remedy="correct its __len__, or leave it out and give --steps" + divide * (self._prefetch.workers > 1),
        )

    def _part(self, items: list[Any], first: int, number: int, key: int) -> tuple[Batch, Batch | None]:
        """Return this rank's part of a global batch, and the dummy micro-batch of a rank without samples, or None."""
        mine = self._contract.part(len(items), self._rank)
        if not mine:
            few = items[: len(self._contract.first_micro_batch(len(items)))]
            return self.source.without_samples(items), self.source.collated(few, first, key)
        spans = self._contract.spans(len(items), self._rank, len(mine))
        pieces = [piece for _, each in spans for piece in each]
        own = items[mine.start : mine.stop]
        return self.source.collated_parts(own, pieces, first + mine.start, key), None

    def state(self) -> Any:
        """Return the iterable data set's own state after the last batch read, for a checkpoint.

        With it a resume need not read the consumed samples again.

        Returns:
            On rank 0, without loader processes, ``{"own state": the data set's state_dict()}`` after the last batch
            yielded, as a JSON value; None if the data set has no such method or its state is not JSON, on other ranks,
            and with one loader process. With several loader processes ``{"loader processes": their number}`` on every
            rank.
        """
        if self._prefetch.workers > 1:
            return {_PROCESSES: self._prefetch.workers}
        return None if self._kept is None else {_OWN: json.loads(self._kept)}

    def load(self, at: Position, state: Any) -> None:
        """Keep an iterable data set's saved state for the next ``read``, which uses it only when starting at ``at``.

        Args:
            at: the checkpoint's data position: epoch, and global batches consumed in it.
            state: the result of ``state`` on rank 0 of the saved run; None means that the data set had no state of its
                own, and that at most one loader process has read it.

        Raises:
            CheckpointError: the number of loader processes differs from the saved run's, or ``state`` is that of a data
                set which shards itself, or of a sampler.
        """
        told = {} if state is None else state
        if not isinstance(told, Mapping) or told.keys() - {_PROCESSES, _OWN}:
            raise CheckpointError(
                _OTHER_WAY,
                why="every rank of this run reads the whole data set, and keeps its own samples",
                remedy=_SAME_DATA,
            )
        saved = told.get(_PROCESSES, 1)
        if saved != max(self._prefetch.workers, 1):
            raise CheckpointError(
                f"the run had {counted(saved, 'loader process')} a device and now has {self._prefetch.workers}",
                why="the data set divides its samples over them, so that the order depends on their number",
                remedy="resume with as many",
            )
        self._loaded = at, told.get(_OWN)

    def describe(self) -> Mapping[str, str]:
        """Return lines for the run's header on the order and the loader processes of the iterable data set.

        Returns:
            The text of each line by its label: ``order``, which says that samples come in the data set's own order; and
            with several loader processes ``data workers``, their number, over which the data set divides its samples.
        """
        workers = self._prefetch.workers
        lines = {"order": "that of the stream, which every device reads whole; nothing is shuffled"}
        return lines | ({"data workers": f"{workers} a device, over which the data set divides"} if workers > 1 else {})


class ShardedStream:
    """Reads an iterable data set that shards itself: each data rank has other samples.

    A rank whose samples have ended goes on without samples until those of all ranks have ended, so that every sample
    counts once. Every step all-gathers the data ranks' sample counts.

    Args:
        source: the iterable data set on this rank.
        contract: batch size of every epoch, and its division over logical workers (fixed shares of the global batch)
            and ranks.
        rank: index of this data-parallel rank, from 0.
        seed: seed of all random draws; each data rank has its own RNG stream.
        comms: the communicators: ``replica`` gathers the counts of the data ranks, and ``model`` compares digests over
            the ranks of one model replica, which must read the same samples.
    """

    def __init__(self, source: Stream, contract: BatchContract, rank: int, seed: int, comms: Communicators) -> None:
        self.source, self._contract, self._rank, self._seed = source, contract, rank, seed
        self._replicas, self._stages = comms.replica, comms.model

    def follow(self, epochs: Epochs) -> None:
        """Do nothing: after a resume, data that shard themselves are read with the batch size of the present run.

        Args:
            epochs: batch size of each epoch; has no effect.
        """

    def read(self, epoch: int, start: int) -> Iterator[RankBatch]:
        """Read an epoch of this data-parallel rank's iterable, which differs between ranks, and yield the batches.

        Collective over all ranks. In every step the data ranks all-gather their sample counts, and the ranks of one
        replica, which read the same samples, all-gather and compare digests of their counts; in steps 0, 1, 2, 4, 8, …
        of the call also digests of the samples. A rank whose iterable has ended yields batches without samples until
        all have ended.

        Args:
            epoch: from 0.
            start: first global batch to yield, counted in the epoch from 0; the rank's samples before it are read and
                discarded.

        Yields:
            For each global batch a ``RankBatch``: this rank's samples (``batch``), the number of samples in the global
            batch over all ranks (``samples``), the data position (epoch, global batch) after it (``after``), and, if
            this rank has no samples, samples for a dummy micro-batch (``dummy``), whose gradient is ignored.

        Raises:
            MismatchError: the ranks of one replica read different samples.
            DataError: on every rank, if a rank's iterable is empty; on one rank, if a sample cannot be read or
                collated.
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
                refuse_empty(self.source, epoch, 0, ranks=", ".join(void))
            held = [count for count, _, _ in counts]
            after = Position(epoch + 1, 0) if last else Position(epoch, step)
            draws = int(hash64(key, epoch))
            if items:
                spans = self._contract.spans(sum(held), self._rank, len(items))
                pieces = [piece for _, each in spans for piece in each]
                yield RankBatch(self.source.collated_parts(items, pieces, first, draws), sum(held), after)
            else:
                dummy = self.source.collated(some, first, draws)
                yield RankBatch(self.source.without_samples(some), sum(held), after, dummy)

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
        """Return ``{"streams": N}`` for a checkpoint, with the number N of data-parallel ranks.

        A resumed run must have the same number of ranks, because each rank reads an iterable of its own.
        """
        return {"streams": self._contract.ranks}

    def load(self, at: Position, state: Any) -> None:
        """Check that the run has the saved run's number of data-parallel ranks, each of which reads its own iterable.

        Args:
            at: the checkpoint's data position; has no effect here.
            state: the result of ``state`` that was saved.

        Raises:
            CheckpointError: the number of data ranks has changed, or ``state`` does not state it.
        """
        saved = state.get("streams") if isinstance(state, Mapping) else None
        if not isinstance(saved, int):
            raise CheckpointError(
                _OTHER_WAY,
                why="this run's data set shards itself, so that each rank continues a stream of its own",
                remedy=_SAME_DATA,
            )
        if saved != self._contract.ranks:
            raise CheckpointError(
                f"the run had {saved} data ranks and now has {self._contract.ranks}",
                why="its data set shards itself, so that each rank continues its own stream",
                remedy="resume on as many devices",
            )

    def describe(self) -> Mapping[str, str]:
        """Return lines for the run's header on the order and the resume of a data set that shards itself.

        Returns:
            The text of each line by its label: ``order``, which says that results depend on the number of devices, and
            ``resume``, which says on how many data ranks the run can be resumed.
        """
        return {
            "order": "each device reads a stream of its own: batches, and with them the result, depend on the devices",
            "resume": f"on {counted(self._contract.ranks, 'data rank')} only",
        }


def compare_samples(ranks: Communicator, batches: int, batch: StreamBatch) -> None:
    """Compare digests of the samples of a global batch over ranks, if ``batches`` is 0 or a power of two.

    Collective over ``ranks``, with an all-gather of digests: all must call this function for the same batch. For other
    values of ``batches`` nothing is sent. If the batch comes without digests, the ranks compare its number of samples.

    Args:
        ranks: communicator of the ranks to compare, each of which has read the batch.
        batches: number of batches that were read before this one, since reading of the epoch began or was resumed.
        batch: the global batch, with index and digest of each of its samples.

    Raises:
        MismatchError: on every rank, if the samples, or their number, differ between ranks.
    """
    if batches & (batches - 1) == 0:
        ranks.agree(batch.lines or [f"{batch.samples} samples"], "the samples of the stream", DIFFERENT)
