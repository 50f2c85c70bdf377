"""One way through an epoch, whatever the samples come from: this rank's part of each global batch, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tutti.data.batches import cut
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.loader import IN_PROCESS, Loader, Prefetch, Task
from tutti.data.order import permutation
from tutti.data.source import AugmentKey, Source
from tutti.types import Batch


class Position(NamedTuple):
    """Where in its data a run is: whole epochs behind it, and global batches of the epoch under way."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Part:
    """This rank's part of one global batch.

    Attributes:
        batch: this rank's samples, in worker order.
        samples: samples in the global batch.
        after: the position once this batch is consumed.
        stand_in: where this rank has no sample, some of others for the body of its own loop, which count for nothing.
    """

    batch: Batch
    samples: int
    after: Position
    stand_in: Batch | None = None


class Reader(Protocol):
    """Samples as one data rank reads them."""

    source: Any

    def read(self, epoch: int, start: int) -> Iterator[Part]:
        """Every global batch of ``epoch`` from number ``start`` on, to the end of the epoch."""

    def state(self) -> Any:
        """What must be kept, besides the position, to go on after the last part that was read; a JSON value."""

    def load(self, at: Position, state: Any) -> None:
        """The next ``read`` goes on from ``at``, with what ``state`` gave there."""

    def describe(self) -> Mapping[str, str]:
        """What people must know of how it reads."""

    def close(self) -> None:
        """Let go of processes and files."""


class Ranks(Protocol):
    """What reading a stream needs of a communicator."""

    @property
    def rank(self) -> int:
        """This rank's place in it."""

    def agree(self, lines: Sequence[str], name: str, remedy: str) -> None:
        """Raise MismatchError on every rank where the lines differ."""

    def all_gather(self, tensor: Tensor, name: str) -> list[Tensor]:
        """Every rank's tensor, in rank order."""


class ByNumber:
    """Reads a map-style source in the global order, which is a function of (seed, epoch).

    Nothing has to be kept for resuming: position and seed say everything.
    """

    def __init__(self, source: Source, epochs: Epochs, rank: int, seed: int, prefetch: Prefetch = IN_PROCESS) -> None:
        self.source, self._epochs, self._rank, self._seed = source, epochs, rank, seed
        self._prefetch = prefetch
        self._loader: Loader | None = None
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def read(self, epoch: int, start: int) -> Iterator[Part]:
        """As ``Reader.read``."""
        contract = self._epochs.at(epoch)
        steps = range(start, contract.steps_per_epoch)
        batches = self._fetch([self._task(contract, epoch, step) for step in steps])
        for step, batch in zip(steps, batches, strict=True):
            samples = contract.samples(step)
            last = step == contract.steps_per_epoch - 1
            after = Position(epoch + 1, 0) if last else Position(epoch, step + 1)
            if contract.part(samples, self._rank):
                yield Part(batch, samples, after)
            else:
                yield Part(cut(batch, 0, 0), samples, after, batch)

    def _task(self, contract: BatchContract, epoch: int, step: int) -> Task:
        """The numbers of this rank's samples in one global batch."""
        order, start = self._permutation(epoch), step * contract.batch
        samples = contract.samples(step)
        # Few sources can make a batch of nothing; an empty part of a batch of some has its structure. The first
        # micro-batch is also computed where it counts, so that the model can take it.
        part = contract.part(samples, self._rank) or contract.first_cell(samples)
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
        """Nothing."""
        return None

    def load(self, at: Position, state: Any) -> None:
        """Nothing: every position can be read at once."""

    def describe(self) -> Mapping[str, str]:
        """The loader processes, where there are any."""
        workers = self._prefetch.workers
        return {"data workers": f"{workers} a device, which fetch ahead"} if workers else {}

    def close(self) -> None:
        """End the loader processes."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
