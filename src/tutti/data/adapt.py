"""Adapt tensors, PyTorch data sets and iterables to sources and streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tutti.data.item_source import CollatedSource, ItemSource
from tutti.data.source import AugmentKey, Sharded, Source
from tutti.data.stream import Stream
from tutti.device import pins_memory
from tutti.errors import DataError, UsageError, kind_of
from tutti.types.micro_batch import Batch

Collate: TypeAlias = Callable[[list[Any]], Any]


def adapt_training(
    data: Any, collate: Collate | None = None, drop_last: bool = False, processes: int = 0
) -> Source | Stream:
    """Wrap training data as a ``Source`` (map-style, read by index), or an iterable as a ``Stream`` (read in order).

    Args:
        data: a ``Source``, a tensor, several tensors, a ``TensorDataset``, or a map-style data set; an iterable, or
            ``Sharded(iterable)`` where the iterable differs between data ranks; or a function without arguments that
            returns an iterable.
        collate: the script's function from a list of samples to a batch; None for PyTorch's default collation.
        drop_last: whether an epoch ends before a batch that would be smaller than the others; for a stream only.
        processes: number of loader processes of each rank, over which a stream divides its samples; for a stream only,
            and without effect for a ``Sharded``.

    Returns:
        A ``Source`` for data with a length and an index; its ``fetch`` returns the samples of given indices as one
        batch. A ``Stream`` for an iterable, which is read in its own order.

    Raises:
        UsageError: ``data`` is none of these, is a text or a path, can be read only once (an iterator), makes batches
            itself (a DataLoader), or is a ``Source`` and there is a ``collate``.
        DataError: the length of ``data`` is 0, or its tensors have different numbers of samples.
    """
    if isinstance(data, str | bytes | PathLike):
        raise UsageError(
            f"the data set is the text or path {str(data)!r}",
            why="tutti opens no files, and would train on its characters",
            remedy="give a data set that reads it, with __len__ and __getitem__, or tensors",
        )
    if isinstance(data, Sharded):
        return _stream(data.dataset, sharded=True, collate=collate, drop_last=drop_last)
    if isinstance(data, Source | Tensor) or _has_numbers(data):
        return adapt(data, collate)
    return _stream(data, collate=collate, drop_last=drop_last, processes=processes)


def _has_numbers(data: Any) -> bool:
    """Return whether ``data`` is a map-style data set. ``IterableDataset`` has a ``__getitem__`` that only raises."""
    there = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return there and not isinstance(data, IterableDataset | type)


def _stream(data: Any, **options: Any) -> Stream:
    """Wrap ``data`` in a stream with its options. Raises as ``adapt_training``."""
    if isinstance(data, DataLoader):
        raise UsageError("a DataLoader makes its own batches", remedy="give its data set")
    if hasattr(data, "__next__"):
        raise UsageError(
            f"{kind_of(data)} can be read only once", remedy="give an iterable, or a function that returns one"
        )
    if not hasattr(data, "__iter__") and not callable(data):
        raise _unreadable(data, "an iterable, or ")
    stream = Stream(data, **options)
    if stream.stated == 0:
        raise _empty(data)
    return stream


def adapt(data: Any, collate: Collate | None = None) -> Source:
    """Wrap map-style data as a ``Source``, which fetches batches of samples by their indices.

    Args:
        data: a source, which is returned as it is, a tensor, several tensors, a ``TensorDataset`` or a map-style data
            set.
        collate: the script's function from a list of samples to a batch; None for PyTorch's default collation.

    Returns:
        The source: its length is the number of samples, and ``fetch`` returns the samples of given indices as a batch.

    Raises:
        UsageError: ``data`` has no ``__len__`` or no ``__getitem__``, or is a source and there is a ``collate``.
        DataError: ``data`` is empty, or its tensors have different numbers of samples.
    """
    several = isinstance(data, tuple | list) and bool(data) and all(isinstance(t, Tensor) for t in data)
    if isinstance(data, Source) and collate is not None:
        raise UsageError(
            f"collate is given beside a {type(data).__name__}",
            why="a tutti.data.Source makes its batches itself",
            remedy="leave collate out, or give a data set with __len__ and __getitem__",
        )
    if isinstance(data, Source):
        source: Source = data
    elif collate is not None and (several or isinstance(data, Tensor) or _has_numbers(data)):
        source = CollatedSource(TensorDataset(*_columns(data)) if several else data, collate)
    elif isinstance(data, TensorDataset) and type(data).__getitem__ is TensorDataset.__getitem__:
        source = TensorSource(list(data.tensors))
    elif isinstance(data, Tensor):
        source = TensorSource(data)
    elif several:
        source = TensorSource(tuple(data))
    elif _has_numbers(data):
        source = ItemSource(data)
    else:
        raise _unreadable(data)
    if len(source) == 0:
        raise _empty(data)
    return source


def _columns(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors that have an entry for every sample. Raises DataError for other numbers of entries."""
    lengths = sorted({len(t) for t in tensors})
    if len(lengths) != 1:
        raise DataError(
            f"the tensors have different lengths: {lengths}",
            remedy="give each one entry for every sample; a list of samples as DataLoader(samples, …)",
        )
    return tensors


def _unreadable(data: Any, more: str = "") -> UsageError:
    return UsageError(
        f"cannot read samples from {kind_of(data)}",
        remedy=f"give {more}tensors, a TensorDataset or any dataset with __len__ and __getitem__",
    )


def _empty(data: Any) -> DataError:
    return DataError(f"the data set ({type(data).__name__}) is empty", remedy="check its path and filters")


class TensorSource:
    """Map-style data set of tensors in memory, whose first dimension is the sample; a ``tutti.data.Source``.

    Args:
        tensors: a tensor, or a tuple or list of tensors with equally many samples; kept, not copied. A batch has the
            same structure.

    Raises:
        DataError: the tensors have different numbers of samples.
    """

    def __init__(self, tensors: Tensor | tuple[Tensor, ...] | list[Tensor]) -> None:
        self._tensors = tensors
        self._length = len(_columns((tensors,) if isinstance(tensors, Tensor) else tensors)[0])

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], augment: AugmentKey | None) -> Batch:
        """Return the samples ``indices`` of the wrapped tensors, in that order, as new tensors on the tensors' device.

        Args:
            indices: int64 (samples,), indices along the tensors' first dimension.
            augment: has no effect.

        Returns:
            One tensor, or a tuple or list of tensors, as they were wrapped, with the samples as first dimension.
        """
        if isinstance(self._tensors, Tensor):
            return _select(self._tensors, indices)
        return type(self._tensors)(_select(t, indices) for t in self._tensors)


def _select(tensor: Tensor, indices: NDArray[np.int64]) -> Tensor:
    """Return the rows ``indices`` of a tensor on any device; the host does not wait for the device."""
    rows = torch.from_numpy(indices)
    if pins_memory(tensor.device):
        rows = rows.pin_memory()
    return tensor.index_select(0, rows.to(tensor.device, non_blocking=True))
