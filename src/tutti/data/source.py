"""Protocol of a map-style data set that fetches batches by index, and the mark of an iterable that shards itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tutti.types.micro_batch import Batch


@dataclass(frozen=True)
class AugmentKey:
    """Key of the random augmentation of a batch: seed, epoch, and how often samples were drawn before.

    Each random draw for a sample is a function of this key and the sample's index, and not of rank or data position.

    Attributes:
        seed: seed of the run.
        epoch: the epoch, from 0.
        repeats: int64 (samples,), how often a sampler has drawn each of the samples before in this epoch; None if it
            draws none twice.
    """

    seed: int
    epoch: int
    repeats: NDArray[np.int64] | None = None


@runtime_checkable
class Source(Protocol):
    """Map-style data set that fetches many samples at a time, by their indices (protocol).

    It has a length, ``len(source)``, and a method ``fetch``.
    """

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""

    def fetch(self, indices: NDArray[np.int64], augment: AugmentKey | None) -> Batch:
        """Return the samples ``indices`` of the data set, in that order, as one collated batch.

        Called in the rank's process or in loader processes forked from it, for the samples of one or more micro-batches
        at a time. The script that gets the batch may change its tensors, which therefore should be copies, not views of
        the data set's own. They lie on the CPU, or on an accelerator if the data set does and there are no loader
        processes.

        Args:
            indices: int64 (samples,), numbers from 0 to the length of the data set, exclusive.
            augment: key of random augmentation, whose draws must depend on (augment.seed, augment.epoch, index) alone;
                None in evaluation.

        Returns:
            A tensor with the samples as first dimension, or a tuple, list or dict of such tensors; texts as a list with
            one entry for each sample.
        """


@dataclass(frozen=True)
class Sharded:
    """Marks an iterable data set that shards itself: every data-parallel rank reads a different stream.

    Each sample still counts once, with its weight. The samples of a global batch then depend on the number of devices,
    and so does the result.

    Args:
        dataset: an iterable whose samples differ between the ranks.
    """

    dataset: Any
