"""Fetch samples from map-style data sets, collated as by PyTorch's DataLoader or by the script's own function."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tutti.data.collation import collate, unreadable_sample
from tutti.data.digest import SampleSketch, digest, sketch
from tutti.data.global_generators import own_generators, seed_generators
from tutti.data.kept_generators import KeptGenerators
from tutti.data.keyed_random import hash64
from tutti.data.source import AugmentKey
from tutti.errors import DataError, UsageError
from tutti.torch_compat import tree_leaves
from tutti.types.micro_batch import Batch

# Random draws of a collate_fn, such as masks, must not repeat those of its first sample.
_COLLATE = int.from_bytes(b"collate", "big")

_T = TypeVar("_T")


class ItemSource:
    """Wrapper of any map-style data set as a ``tutti.data.Source``, which fetches samples as batches.

    Random draws of an item (augmentation with Python's, NumPy's or PyTorch's global generators, or with generators that
    the data set keeps) are keyed by (seed, epoch, sample): they do not depend on the rank, the loader process or the
    items read before. A data set with ``__getitems__`` is read by one call of this method; if the call fails or uses a
    generator, its result is discarded and the items are read one by one.

    Args:
        items: the data set, with ``__len__`` and ``__getitem__``.
        functions: the script's collate functions, if any. They are not called here; random generators that they keep
            are seeded and restored as those of the data set.
    """

    def __init__(self, items: Any, *functions: Callable[..., Any]) -> None:
        self.items = items
        self._kept = KeptGenerators(items, *functions)
        self._name = type(items).__name__
        self._together = callable(getattr(items, "__getitems__", None))

    def __len__(self) -> int:
        return len(self.items)

    def fetch(self, indices: NDArray[np.int64], augment: AugmentKey | None) -> Batch:
        """Read the items ``indices`` of the map-style data set, in that order, and collate them into a batch.

        The batch is what PyTorch's ``default_collate`` or the script's own function makes of the list of items.

        Args:
            indices: int64 (samples,), indices for the data set's ``__getitem__``.
            augment: seed and epoch that, with the index of an item, seed the global random generators while the item is
                read; None in evaluation, which has fixed seeds.

        Raises:
            DataError: reading an item raised IndexError, KeyError, OSError or ValueError, or two items cannot be in one
                batch; the error names the items.
            Exception: any other exception of the data set, or an exception of the script's own function.
        """
        key = augment or AugmentKey(0, -1)
        return self._seeded(lambda: self._fetch(indices, key))

    def _seeded(self, read: Callable[[], _T]) -> _T:
        """Call ``read``, and again if it has made a generator, which had another seed."""
        self._kept.look()
        found = read()
        return read() if self._kept.look() else found

    def _fetch(self, indices: NDArray[np.int64], key: AugmentKey) -> Batch:
        with own_generators(), self._kept.restored():
            samples = self._read_together(indices) or self._read_each(indices, key)
            return self._collate(samples, indices, key)

    def check_repeats(self, index: int, augment: AugmentKey, other: int) -> None:
        """Read an item twice with equally seeded random draws, and check that both reads are equal. Not collective.

        If only the first of both reads has drawn random numbers, item ``other`` is read twice, too: a data set may draw
        once for all items, as in a lazy initialisation, but not once for each item.

        Args:
            index: index of the item.
            augment: seed and epoch of the random draws.
            other: index of another item.

        Raises:
            UsageError: the two reads of the item differ; or the first read of each of the two items draws random
                numbers which the data set keeps for later reads.
        """
        first = self._seeded(lambda: self._digest(index, augment))
        again = self._digest(index, augment)
        # Reads that draw alike leave the same states of the global generators.
        if first[1] != again[1] and other != index and self._digest(other, augment) != self._digest(other, augment):
            raise UsageError(
                f"sample {other} of the {self._name} keeps the random numbers of its first read",
                why="a random draw belongs to the epoch, and each device reads some samples first in a later one",
                remedy="draw for all samples before tutti.prepare, seeded alike on all ranks, or anew at each read",
            )
        if first[0] != again[0]:
            raise UsageError(
                f"sample {index} of the {self._name} is another one when it is read again",
                why="it depends on the samples read before, as by a counter, or draws random numbers that tutti does"
                " not seed; each device reads other samples",
                remedy="let a sample depend on its index alone, and draw from random, numpy.random or torch, or from a"
                " generator of theirs that is an attribute of the data set",
            )

    def _digest(self, index: int, key: AugmentKey) -> tuple[str, Any]:
        """Return a digest of an item, and the states that the global generators have after its read."""
        with own_generators(), self._kept.restored(), suppress(DataError):
            return digest(self._read_each(np.array([index]), key)), _states()
        # It is raised where the sample is read for training.
        return "", ()

    def sketch_items(self, indices: NDArray[np.int64], augment: AugmentKey) -> SampleSketch:
        """Return the sketch of a list of items, by which ranks compare their data sets. Not collective.

        Texts in the items are left out, because a path may differ between ranks, unless the items hold only texts.

        Args:
            indices: int64 (samples,), indices for the data set's ``__getitem__``.
            augment: seed and epoch of the random draws.

        Returns:
            The sketch; if an item cannot be read, the sketch of an empty list.
        """
        with own_generators(), self._kept.restored(), suppress(DataError):
            leaves = tree_leaves(self._seeded(lambda: self._read_each(indices, augment)))
            return sketch([each for each in leaves if not isinstance(each, str | bytes)] or leaves)
        # The error is raised where the sample is read for training.
        return sketch([])

    def _collate(self, samples: list[Any], indices: NDArray[np.int64], key: AugmentKey) -> Batch:
        return collate(samples, lambda place: f"sample {int(indices[place])}", self._name)

    def _read_together(self, indices: NDArray[np.int64]) -> list[Any] | None:
        """Return the items of one call of ``__getitems__``; None where they must be read one by one."""
        if not self._together or not len(indices):
            return None
        before = _states(), self._kept.states()
        try:
            samples = list(self.items.__getitems__(indices.tolist()))
        except Exception:
            # Read one by one, the sample at fault is named.
            return None
        # Random draws of items that are read together would depend on the samples beside them.
        drawn = (_states(), self._kept.states()) != before
        return samples if len(samples) == len(indices) and not drawn else None

    def _read_each(self, indices: NDArray[np.int64], key: AugmentKey) -> list[Any]:
        keys = hash64(key.seed, key.epoch, indices)
        if key.repeats is not None:
            # A sample that a sampler draws twice in an epoch is augmented twice.
            keys = np.where(key.repeats > 0, hash64(key.seed, key.epoch, indices, key.repeats), keys)
        return [self._item(int(i), int(k)) for i, k in zip(indices, keys, strict=True)]

    def _item(self, index: int, key: int) -> Any:
        seed_generators(key)
        self._kept.seed(key)
        try:
            return self.items[index]
        except (IndexError, KeyError, OSError, ValueError) as error:
            raise unreadable_sample(f"cannot read sample {index}", self._name, error) from error


class CollatedSource(ItemSource):
    """Wrapper of a map-style data set as a ``tutti.data.Source``, whose batches the script's collate function makes.

    The function is called with the samples of one micro-batch. Its random draws are keyed by (seed, epoch, first
    sample), so that the batch does not depend on the rank or the loader process.

    Args:
        items: the data set, with ``__len__`` and ``__getitem__``.
        function: makes a batch of a list of samples; a batch may be anything.
    """

    def __init__(self, items: Any, function: Callable[[list[Any]], Any]) -> None:
        super().__init__(items, function)
        self._function = function

    def _collate(self, samples: list[Any], indices: NDArray[np.int64], key: AugmentKey) -> Batch:
        own = int(hash64(_COLLATE, key.seed, key.epoch, int(indices[0])))
        seed_generators(own)
        self._kept.seed(own)
        return self._function(samples)


def _states() -> tuple[Any, ...]:
    """Return the states of Python's, NumPy's and PyTorch's global generators, as values that can be compared."""
    numbers = torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), pickle.dumps(np.random.get_state()), numbers
