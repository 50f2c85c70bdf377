"""Adapt tensors, PyTorch data sets and iterables to sources and streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tutti.data.collation import collate
from tutti.data.global_generators import own_generators, seed_generators
from tutti.data.keyed_random import hash64
from tutti.data.source import AugmentKey, Sharded, Source
from tutti.data.stream import Stream
from tutti.errors import DataError, UsageError
from tutti.types import Batch


def adapt_training(data: Any) -> Source | Stream:
    """Return ``data`` as a source for training, as ``adapt``, or an iterable as a stream.

    Raises:
        UsageError: ``data`` is neither, can be read only once (an iterator), or makes batches itself (a DataLoader).
        DataError: ``data`` is empty.
    """
    if isinstance(data, Sharded):
        return _stream(data.dataset, sharded=True)
    return adapt(data) if isinstance(data, Source | Tensor) or _has_numbers(data) else _stream(data)


def _has_numbers(data: Any) -> bool:
    """Return whether ``data`` is a map-style data set. ``IterableDataset`` has a ``__getitem__`` that only raises."""
    there = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return there and not isinstance(data, IterableDataset | type)


def _stream(data: Any, sharded: bool = False) -> Stream:
    """Wrap ``data`` in a stream. Raises as ``adapt_training``."""
    if isinstance(data, DataLoader):
        raise UsageError("a DataLoader makes its own batches", remedy="give its data set, and the batch size")
    if hasattr(data, "__next__"):
        raise UsageError(
            f"a {type(data).__name__} can be read only once", remedy="give an iterable, or a function that returns one"
        )
    if not hasattr(data, "__iter__") and not callable(data):
        raise _unreadable(data, "an iterable, or ")
    stream = Stream(data, sharded)
    if stream.samples == 0:
        raise _empty(data)
    return stream


def adapt(data: Any) -> Source:
    """Return ``data`` as a source: from a source, a tensor, several, a ``TensorDataset`` or a map-style data set.

    Raises:
        UsageError: ``data`` has no ``__len__`` or no ``__getitem__``.
        DataError: ``data`` is empty.
    """
    if isinstance(data, Source):
        source: Source = data
    elif isinstance(data, TensorDataset):
        source = TensorSource(tuple(data.tensors))
    elif isinstance(data, Tensor):
        source = TensorSource(data)
    elif isinstance(data, tuple | list) and data and all(isinstance(t, Tensor) for t in data):
        source = TensorSource(tuple(data))
    elif _has_numbers(data):
        source = ItemSource(data)
    else:
        raise _unreadable(data)
    if len(source) == 0:
        raise _empty(data)
    return source


def _unreadable(data: Any, more: str = "") -> UsageError:
    return UsageError(
        f"cannot read samples from a {type(data).__name__}",
        remedy=f"give {more}tensors, a TensorDataset or any dataset with __len__ and __getitem__",
    )


def _empty(data: Any) -> DataError:
    return DataError(f"the data set ({type(data).__name__}) is empty", remedy="check its path and filters")


class TensorSource:
    """Fetch samples from tensors whose first dimension is the sample."""

    def __init__(self, tensors: Tensor | tuple[Tensor, ...]) -> None:
        self._tensors = tensors
        lengths = {len(t) for t in (tensors if isinstance(tensors, tuple) else (tensors,))}
        if len(lengths) != 1:
            raise DataError(f"tensors of different lengths {sorted(lengths)}", remedy="one entry a sample in each")
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], augment: AugmentKey | None) -> Batch:
        """Return the rows ``indices``. Nothing is random."""
        rows = torch.from_numpy(indices)
        if isinstance(self._tensors, Tensor):
            return self._tensors.index_select(0, rows)
        return tuple(t.index_select(0, rows) for t in self._tensors)


class ItemSource:
    """Fetch samples from any map-style dataset, one item at a time.

    Random draws of an item (augmentation with Python's, NumPy's or PyTorch's global generators) are keyed by
    (seed, epoch, sample): they do not depend on the rank, the loader process or the items read before.
    """

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def fetch(self, indices: NDArray[np.int64], augment: AugmentKey | None) -> Batch:
        """Return the items ``indices``, collated as PyTorch's DataLoader does.

        Raises:
            DataError: an item cannot be read, or two items cannot be in one batch; the error names them.
        """
        key = augment or AugmentKey(0, -1)
        keys = hash64(key.seed, key.epoch, indices)
        with own_generators():
            items = [self._item(int(i), int(k)) for i, k in zip(indices, keys, strict=True)]
            return collate(items, lambda place: f"sample {int(indices[place])}", type(self._items).__name__)

    def _item(self, index: int, key: int) -> Any:
        seed_generators(key)
        try:
            return self._items[index]
        except (IndexError, KeyError, OSError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"cannot read sample {index}", where=type(self._items).__name__, why=why) from error
