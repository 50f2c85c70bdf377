"""Copy batches to an accelerator one step ahead, on a separate stream, from pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tutti.data.batches import map_tensors
from tutti.data.item_source import CollatedSource
from tutti.data.reader import RankBatch
from tutti.data.stream import Stream
from tutti.device import current_stream, pins_memory

T = TypeVar("T")


class _Moving(NamedTuple):
    part: RankBatch
    done: torch.Event


class Transfer:
    """Copies each batch to an accelerator on a separate stream, while the step before computes.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def parts(self, parts: Iterator[RankBatch], placed: Callable[[RankBatch], RankBatch]) -> Iterator[RankBatch]:
        """Copy a rank's batches to the accelerator, each while the step before it computes, and yield the copies.

        The copy runs on a stream of its own and starts before the preceding batch is yielded; the device's current
        stream waits for it, not the host. A batch with tensors that are on the device already is placed on the current
        stream. An exception of ``parts`` is raised once all batches before it have been yielded.

        Args:
            parts: the rank's batches, as they are read.
            placed: function that copies a rank's batch to the device, asynchronously from pinned memory, and returns
                the copy.

        Yields:
            The copies, in the order of ``parts``.
        """
        return map(self._arrived, one_ahead(self._moving(part, placed) for part in parts))

    def _moving(self, part: RankBatch, placed: Callable[[RankBatch], RankBatch]) -> _Moving:
        if self._is_there(part):
            # Kernels of the current stream make this batch, and a cast on another stream would not wait for them.
            return _Moving(placed(part), current_stream(self._device).record_event())
        with self._stream:
            return _Moving(placed(part), self._stream.record_event())

    def _is_there(self, part: RankBatch) -> bool:
        """Return whether a batch has tensors of the accelerator before it is copied, as data on the device has."""
        kinds: set[str] = set()
        for batch in (part.batch, part.dummy):
            if batch is not None:
                map_tensors(batch, lambda tensor: kinds.add(tensor.device.type))
        return self._device.type in kinds

    def _arrived(self, moving: _Moving) -> RankBatch:
        current = current_stream(self._device)
        current.wait_event(moving.done)

        def keep(tensor: Tensor) -> None:
            # The copying stream allocated the tensor, and may not reuse its memory before this stream has used it.
            tensor.record_stream(current)

        for batch in (moving.part.batch, moving.part.dummy):
            if batch is not None:
                map_tensors(batch, keep)
        return moving.part


def make_transfer(device: torch.device, data: object) -> Transfer | None:
    """Make the object that copies each batch to the accelerator while the step before it computes, or return None.

    Args:
        device: the device of this rank.
        data: the source (map-style) or stream (iterable) of the batches.

    Returns:
        A ``Transfer``, whose ``parts`` yields the copies. None on the CPU and on an Apple GPU (``mps``); for iterable
        data sets, whose data position must not run ahead of the step; and for data with a ``collate_fn`` of the script,
        whose batches may hold objects without ``record_stream``. The caller then copies each batch right before its
        step.
    """
    return Transfer(device) if pins_memory(device) and not isinstance(data, Stream | CollatedSource) else None


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterator unchanged, always fetching the next item before yielding the present one.

    An error of the iterator is raised only after all items before it have been yielded.

    Args:
        items: the iterator.

    >>> list(one_ahead(iter([1, 2, 3])))
    [1, 2, 3]
    """
    waiting: list[T] = []
    while True:
        try:
            item = next(items)
        except StopIteration:
            yield from waiting
            return
        except Exception:
            yield from waiting
            raise
        yield from waiting
        waiting = [item]
