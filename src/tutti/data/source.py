"""Where samples come from: by number, or as a stream in an order of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tutti.types import Batch


@dataclass(frozen=True)
class AugmentKey:
    """What random augmentation is drawn from, together with the sample's index: never the rank or the position."""

    seed: int
    epoch: int


@runtime_checkable
class Source(Protocol):
    """Samples by number, fetched many at a time."""

    def __len__(self) -> int:
        """Samples in one epoch."""

    def fetch(self, indices: NDArray[np.int64], augment: AugmentKey | None) -> Batch:
        """The samples of ``indices``, in that order, as one collated batch on the CPU.

        ``augment`` is None in evaluation. Draws must depend on nothing but (augment.seed, augment.epoch, index).
        """


@dataclass(frozen=True)
class Sharded:
    """Says that an iterable data set shards itself: every data rank reads a stream of its own.

    Each sample still counts once, with its weight. What a global batch holds then depends on the number of devices,
    and so does the result.

    Args:
        dataset: an iterable whose samples differ between the ranks.
    """

    dataset: Any
