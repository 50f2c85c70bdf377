"""Read this rank's part of each global batch of an epoch, in order, from a source or a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tutti.data.batches import slice_batch
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.loader import IN_PROCESS, Loader, Prefetch, Task
from tutti.data.order import permutation
from tutti.data.source import AugmentKey, Source
from tutti.types import Batch


class Position(NamedTuple):
    """The data position of a run: whole epochs consumed, and global batches consumed of the current epoch."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of one global batch.

    Attributes:
        batch: this rank's samples, in worker order.
        samples: samples in the global batch.
        after: the data position once this batch is consumed.
        dummy: if this rank has no sample, samples for a dummy micro-batch of a custom training loop; else None.
    """

    batch: Batch
    samples: int
    after: Position
    dummy: Batch | None = None


class BatchReader(Protocol):
    """Reads one data rank's samples (protocol)."""

    source: Any

    def read(self, epoch: int, start: int) -> Iterator[RankBatch]:
        """Yield this rank's part of each global batch of ``epoch`` from batch ``start`` to the end of the epoch."""

    def state(self) -> Any:
        """Return, as a JSON value, the state that a resume needs besides the data position after the last batch."""

    def load(self, at: Position, state: Any) -> None:
        """Load the value that ``state`` returned at data position ``at``, where the next ``read`` starts."""

    def describe(self) -> Mapping[str, str]:
        """Return lines for the run's header about order, resuming and loader processes."""

    def close(self) -> None:
        """Release processes and files."""


class StreamRanks(Protocol):
    """The part of a communicator that reading a stream uses (protocol)."""

    @property
    def rank(self) -> int:
        """This process's rank within the communicator."""

    def agree(self, lines: Sequence[str], name: str, remedy: str) -> None:
        """Compare ``lines`` over the ranks; raise MismatchError on every rank where they differ. Collective."""

    def all_gather(self, tensor: Tensor, name: str) -> list[Tensor]:
        """All-gather a tensor; return every rank's, in rank order."""


class MapReader:
    """Read a map-style source in the global order, which is a function of (seed, epoch).

    Resuming needs no state besides data position and seed.

    Args:
        source: the samples.
        epochs: the batch contract of every epoch.
        rank: this data rank.
        seed: of sample order and augmentation.
        prefetch: fetches batches, in this process or in loader processes.
    """

    def __init__(self, source: Source, epochs: Epochs, rank: int, seed: int, prefetch: Prefetch = IN_PROCESS) -> None:
        self.source, self._epochs, self._rank, self._seed = source, epochs, rank, seed
        self._prefetch = prefetch
        self._loader: Loader | None = None
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def read(self, epoch: int, start: int) -> Iterator[RankBatch]:
        """See ``BatchReader.read``."""
        contract = self._epochs.at(epoch)
        steps = range(start, contract.steps_per_epoch)
        batches = self._fetch([self._task(contract, epoch, step) for step in steps])
        for step, batch in zip(steps, batches, strict=True):
            samples = contract.samples(step)
            last = step == contract.steps_per_epoch - 1
            after = Position(epoch + 1, 0) if last else Position(epoch, step + 1)
            if contract.part(samples, self._rank):
                yield RankBatch(batch, samples, after)
            else:
                yield RankBatch(slice_batch(batch, 0, 0), samples, after, batch)

    def _task(self, contract: BatchContract, epoch: int, step: int) -> Task:
        """Return the numbers of this rank's samples in one global batch, with the key of their augmentation."""
        order, start = self._permutation(epoch), step * contract.batch
        samples = contract.samples(step)
        # Few sources can make an empty batch, so a rank without samples fetches the global batch's first micro-batch
        # and slices it to length 0. The model can compute on it, as another rank does.
        part = contract.part(samples, self._rank) or contract.first_micro_batch(samples)
        return order[start + part.start : start + part.stop], AugmentKey(self._seed, epoch)

    def _fetch(self, tasks: Iterable[Task]) -> Iterator[Batch]:
        if not self._prefetch.workers:
            return (self.source.fetch(*task) for task in tasks)
        if self._loader is None:
            self._loader = self._prefetch.loader(self.source)
        return self._loader.batches(tasks)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            self._order = (epoch, permutation(self._seed, epoch, len(self.source)))
        return self._order[1]

    def state(self) -> Any:
        """Return None: position and seed suffice."""
        return None

    def load(self, at: Position, state: Any) -> None:
        """Do nothing: ``read`` can start at any position."""

    def describe(self) -> Mapping[str, str]:
        """Return a line about the loader processes, if there are any."""
        workers = self._prefetch.workers
        return {"data workers": f"{workers} a device, which fetch ahead"} if workers else {}

    def close(self) -> None:
        """End the loader processes."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
