"""Batches on their way to a GPU: one ahead of the step, on a stream of their own, from pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tutti.data.batches import map_tensors
from tutti.data.reader import Part
from tutti.data.stream import Stream

T = TypeVar("T")


class _Moving(NamedTuple):
    part: Part
    done: torch.cuda.Event


class Transfer:
    """Copies each batch while the step before it computes.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def parts(self, parts: Iterator[Part], placed: Callable[[Part], Part]) -> Iterator[Part]:
        """The same parts on the GPU, for its current stream; each is asked for before the one in front is given.

        Args:
            parts: as they are read.
            placed: copies a part to the GPU; from pinned memory it does not wait until that is done.
        """
        return map(self._arrived, one_ahead(self._moving(part, placed) for part in parts))

    def _moving(self, part: Part, placed: Callable[[Part], Part]) -> _Moving:
        with torch.cuda.stream(self._stream):
            return _Moving(placed(part), self._stream.record_event())

    def _arrived(self, moving: _Moving) -> Part:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(moving.done)

        def keep(tensor: Tensor) -> None:
            # Its memory is the copying stream's, which may not use it again before this one has.
            tensor.record_stream(current)

        for batch in (moving.part.batch, moving.part.stand_in):
            if batch is not None:
                map_tensors(batch, keep)
        return moving.part


def make_transfer(device: torch.device, data: object) -> Transfer | None:
    """What moves batches of ``data`` ahead; None on the CPU, and for streams: what they have read is their position."""
    return Transfer(device) if device.type == "cuda" and not isinstance(data, Stream) else None


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each asked for before the one in front of it is given; an error comes in its turn.

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
