"""Read this rank's part of each global batch of an epoch, in order, from a source or a stream."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tutti.comm.communicator import Communicator
from tutti.config.variables import is_off
from tutti.data.adapt import TensorSource
from tutti.data.batches import CollatedBatch, slice_batch
from tutti.data.contract import BatchContract
from tutti.data.digest import SampleSketch, sketch
from tutti.data.epochs import Epochs
from tutti.data.item_source import CollatedSource, ItemSource
from tutti.data.loader import IN_PROCESS, Loader, Prefetch, Task
from tutti.data.order import SampleOrder, ShuffledOrder
from tutti.data.source import AugmentKey, Source
from tutti.errors import CheckpointError
from tutti.types.micro_batch import Batch


class Position(NamedTuple):
    """Position of a run in its training data.

    Attributes:
        epoch: number of whole epochs consumed, which is the index of the current epoch.
        batch: number of global batches consumed of the current epoch.
    """

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class RankBatch:
    """One rank's samples of one global batch.

    A logical worker is one of N fixed shares of the global batch, of which a data-parallel rank computes one or more.

    Attributes:
        batch: this rank's samples, sorted by logical worker.
        samples: number of samples in the global batch, over all ranks.
        after: the data position (epoch and global batch) once this batch is consumed.
        dummy: if this rank has no sample, other samples of the data set for a dummy micro-batch, with which the rank
            takes part in the collectives of a forward and backward; else None.
    """

    batch: Batch
    samples: int
    after: Position
    dummy: Batch | None = None


class BatchReader(Protocol):
    """Reads one data-parallel rank's samples of each global batch from a data set (protocol).

    Attributes:
        source: the data set.
    """

    source: Any

    def read(self, epoch: int, start: int) -> Iterator[RankBatch]:
        """Yield this rank's part of each global batch of an epoch, on the CPU, from batch ``start`` to the end.

        Called by ``Feed.read``, once for each epoch. Collective over all ranks if the data set is an iterable: the
        ranks all-gather digests of their samples, which they compare, or their sample counts. Also collective if a
        PyTorch sampler gives the order of a map-style data set: all-gathers digests of this order. Loader processes, if
        there are any, read ahead.

        Args:
            epoch: from 0.
            start: first global batch to yield, counted in the epoch from 0; earlier samples count as consumed.

        Yields:
            For each global batch a ``RankBatch``: this rank's samples (``batch``), the number of samples in the global
            batch over all ranks (``samples``), the data position (epoch, global batch) after it (``after``), and, if
            this rank has no samples, samples for a dummy micro-batch (``dummy``), whose gradient is ignored.

        Raises:
            MismatchError: on every rank, if ranks have read different samples or drawn different orders.
            DataError: a sample cannot be read or collated, or a sampler yields invalid indices.
            LoaderError: a loader process ended, or gave no batch within the timeout.
        """

    def follow(self, epochs: Epochs) -> None:
        """Replace the batch size of each epoch and its division over ranks, after a resume with other ones.

        Called on every rank when a run resumes. Positions in the data, of ``load`` and ``read``, stay valid: the epoch,
        and global batches consumed in it. Not to be called while a ``read`` is under way.

        Args:
            epochs: batch size of every epoch, and its division over logical workers (fixed shares of the global batch)
                and ranks; epochs before the resume are included.
        """

    def state(self) -> Any:
        """Return the state that a checkpoint needs, beside epoch and batch number, to continue reading from here.

        Called on every rank when the run saves a checkpoint; no communication.

        Returns:
            The reader's state after the last batch that ``read`` yielded, as a JSON value; None if epoch and batch
            number suffice.
        """

    def load(self, at: Position, state: Any) -> None:
        """Restore the reader's state from a checkpoint, for a ``read`` that continues the saved run's data at ``at``.

        Called on every rank when a run resumes, before the first ``read``; no communication.

        Args:
            at: the checkpoint's data position: epoch, and global batches consumed in it.
            state: the result of ``state`` that was saved.

        Raises:
            CheckpointError: the data are read in another way than in the saved run, so that the order would differ.
        """

    def describe(self) -> Mapping[str, str]:
        """Return lines for the run's header about order, resuming and loader processes of the training data.

        Called at the start of a run, by ``Feed.describe``.

        Returns:
            The text of each line by its label, such as ``data workers``; may be empty.
        """


class _ComparedSource:
    """Makes batches of a map-style data set, and sketches of samples that ranks compare.

    Args:
        source: the data set.
    """

    def __init__(self, source: Source) -> None:
        self._source, self.items = source, getattr(source, "items", source)

    def fetch(self, indices: NDArray[np.int64], key: AugmentKey, repeated: int | None = None) -> Any:
        """Return a batch of samples or, if an index of a sample to read twice is given, their ``SampleSketch``."""
        if repeated is None:
            return self._source.fetch(indices, key)
        if not isinstance(self._source, ItemSource):
            return sketch(self._source.fetch(indices, key))
        other = next((int(index) for index in indices if index != repeated), repeated)
        self._source.check_repeats(repeated, key, other)
        return self._source.sketch_items(indices, key)


class MapReader:
    """Reads one data rank's samples of a map-style data set, in an order that is a function of (seed, epoch).

    Resuming needs no state besides data position and seed; a sampler's order is compared with that of the saved run.

    Args:
        source: the data set.
        epochs: batch size of each epoch, and its division over logical workers (fixed shares of the global batch) and
            ranks.
        rank: index of this data-parallel rank, from 0.
        seed: seed of sample order and augmentation.
        prefetch: fetches batches, in this process or in loader processes.
        order: the order of samples; None for all samples, shuffled.
        world: communicator of all ranks, over which digests of a sampler's order are compared at the start of each
            epoch; None for no comparison.
    """

    def __init__(
        self,
        source: Source,
        epochs: Epochs,
        rank: int,
        seed: int,
        prefetch: Prefetch = IN_PROCESS,
        order: SampleOrder | None = None,
        world: Communicator | None = None,
    ) -> None:
        self.source, self._epochs, self._rank, self._seed = source, epochs, rank, seed
        self._prefetch, self._world = prefetch, world
        self._order = order or ShuffledOrder(seed, len(source), len(source))
        self._compared = _ComparedSource(source)
        self._loader: Loader | None = None
        self._epoch, self._checked = -1, False

    def read(self, epoch: int, start: int) -> Iterator[RankBatch]:
        """Yield this rank's part of each global batch of an epoch of a map-style data set, on the CPU.

        Collective over all ranks, when the iteration starts, if a PyTorch sampler gives the order: the ranks all-gather
        and compare digests of this order. The first call on several ranks also checks the data set, unless it is a
        ``Source`` that the script has made, or ``TUTTI_DIAGNOSTICS=off`` is set: rank 0 broadcasts a sketch of two
        samples, with which all ranks compare theirs; and an item is read twice, to check that it does not depend on
        earlier reads. Otherwise no collective is performed.

        Args:
            epoch: from 0.
            start: first global batch to yield, counted in the epoch from 0.

        Yields:
            For each global batch a ``RankBatch``: this rank's samples (``batch``), the number of samples in the global
            batch over all ranks (``samples``), the data position (epoch, global batch) after it (``after``), and, if
            this rank has no samples, samples for a dummy micro-batch (``dummy``), whose gradient is ignored.

        Raises:
            MismatchError: on every rank, if the order of a sampler or the samples of the data set differ between ranks.
            DataError: a sample cannot be read or collated, or the sampler yields invalid indices.
            UsageError: the item that is read twice differs, though its random draws are the same.
            LoaderError: a loader process ended, or gave no batch within the timeout.
        """
        contract = self._epochs.contract_of(epoch)
        steps = self._order.batches(epoch, contract.batch)
        self._compare(epoch)
        self._epoch = epoch
        numbers = range(start, len(steps))
        # Whole parts, or one task for each micro-batch, which the script's own function collates.
        shares = [contract.part(len(steps[step]), self._rank) for step in numbers]
        cuts = [self._cuts(contract, len(steps[step]), part) for step, part in zip(numbers, shares, strict=True)]
        tasks = [
            self._task(epoch, step, steps[step], piece)
            for step, cut in zip(numbers, cuts, strict=True)
            for piece in cut
        ]
        common = [int(steps[start][0]), int(steps[-1][-1])] if tasks and self._is_compared() else []
        looks = [(np.array(common), AugmentKey(self._seed, epoch), int(tasks[0][0][0]))] if common else []
        batches = self._fetch([*looks, *tasks])
        if common:
            self._compare_samples(common, next(batches))
        for step, mine, cut in zip(numbers, shares, cuts, strict=True):
            parts, samples = [next(batches) for _ in cut], len(steps[step])
            after = Position(epoch + 1, 0) if step == len(steps) - 1 else Position(epoch, step + 1)
            if isinstance(self.source, CollatedSource):
                whole = CollatedBatch(tuple(parts), tuple(map(len, cut))) if mine else CollatedBatch()
            else:
                whole = parts[0] if mine else slice_batch(parts[0], 0, 0)
            yield RankBatch(whole, samples, after, None if mine else parts[0])

    def _is_compared(self) -> bool:
        """Return whether samples are to be compared over ranks: in the first call on several ranks."""
        checked, self._checked = self._checked, True
        is_plain = isinstance(self.source, ItemSource | TensorSource)
        several = self._world is not None and self._world.size > 1
        return several and is_plain and not checked and not is_off("DIAGNOSTICS", os.environ)

    def _compare_samples(self, indices: list[int], own: SampleSketch) -> None:
        """Raise MismatchError if samples differ from those of rank 0 by more than rounding. Collective over all ranks.

        Args:
            indices: of the samples.
            own: their sketch on this rank.
        """
        if self._world is None:
            return
        here = torch.tensor([int(own.digest, 16) - (1 << 63)])
        if all(
            torch.equal(each, here) for each in self._world.all_gather(here, "comparing the samples of the data set")
        ):
            return
        first = SampleSketch.of_json(self._world.broadcast_json(own.as_json(), 0, "the samples of the data set"))
        found = first if own.is_close(first) else own
        self._world.agree(
            [f"samples {', '.join(map(str, indices))} with the digest {found.digest}"],
            "the samples of the data set",
            "give every rank the same data set: seed the generators that shuffle, split or make it alike on all ranks"
            " (random.seed, np.random.seed, torch.manual_seed), or read it in a sorted order; where hosts only round"
            " integers differently when they decode a sample, TUTTI_DIAGNOSTICS=off leaves this check out",
        )

    def follow(self, epochs: Epochs) -> None:
        """Replace the batch size of each epoch and its division over ranks, after a resume with other ones.

        Args:
            epochs: batch size of each epoch, and its division over logical workers (fixed shares of the global batch)
                and ranks; epochs before the resume are included.
        """
        self._epochs = epochs

    def _cuts(self, contract: BatchContract, samples: int, part: range) -> list[range]:
        """Return the pieces in which this rank's part of a global batch is fetched, as ranges of the global batch."""
        if not part:
            # Few sources can make an empty batch, so a rank without samples fetches the global batch's first
            # micro-batch and slices it to length 0. The model can compute on it, as another rank does.
            return [contract.first_micro_batch(samples)]
        if not isinstance(self.source, CollatedSource):
            return [part]
        spans = contract.spans(samples, self._rank, len(part))
        return [range(part.start + piece.start, part.start + piece.stop) for _, pieces in spans for piece in pieces]

    def _task(self, epoch: int, step: int, numbers: NDArray[np.int64], piece: range) -> Task:
        """Return the numbers of samples to fetch from one global batch, with the key of their augmentation."""
        repeats = self._order.repeats(epoch, step)
        key = AugmentKey(self._seed, epoch, None if repeats is None else repeats[piece.start : piece.stop])
        return numbers[piece.start : piece.stop], key

    def _compare(self, epoch: int) -> None:
        if self._world is not None and (digest := self._order.digest(epoch)):
            self._world.agree(
                [f"epoch {epoch} with order {digest}"],
                "the order of the sampler",
                "let the sampler draw from a torch.Generator with a fixed seed, and not depend on the rank",
            )

    def _fetch(self, tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        if not (self._prefetch.persistent and self._prefetch.workers):
            # Processes that start in an epoch see changes of the data set before it.
            return self._prefetch.batches(self._compared, tasks)
        if self._loader is None:
            self._loader = self._prefetch.loader(self._compared)
        return self._loader.batches(tasks)

    def state(self) -> Any:
        """Return the digest of the order that a sampler drew in the last epoch read, for a checkpoint.

        Returns:
            ``{"epoch": …, "order": digest}``; None without a sampler, where data position and seed suffice for a
            resume, or before the first epoch.
        """
        digest = self._order.digest(self._epoch) if self._epoch >= 0 else ""
        return {"epoch": self._epoch, "order": digest} if digest else None

    def load(self, at: Position, state: Any) -> None:
        """Check that the sampler draws the same order as in the run that saved a checkpoint; no communication.

        Args:
            at: the checkpoint's data position; has no effect here.
            state: the result of ``state`` that was saved; with None, of a run without a sampler or before its first
                epoch, nothing is checked.

        Raises:
            CheckpointError: the order differs, or ``state`` is that of an iterable data set.
        """
        if state is not None and not (isinstance(state, Mapping) and "order" in state):
            raise CheckpointError(
                "the saved run read its data in another way",
                why="this run reads samples by their index",
                remedy="give the data set that the saved run had",
            )
        if state is not None and state.get("order") != self._order.digest(int(state.get("epoch", 0))):
            raise CheckpointError(
                f"the sampler draws another order in epoch {state.get('epoch')} than when the run was saved",
                remedy="make the sampler, its weights and its generator's seed as they were",
            )

    def describe(self) -> Mapping[str, str]:
        """Return a line for the run's header on the loader processes of the map-style data set.

        Returns:
            ``{"data workers": text}`` with the number of loader processes of a device; empty if there are none.
        """
        workers = self._prefetch.workers
        return {"data workers": f"{workers} a device, which fetch ahead"} if workers else {}
