"""What a batch is: a tensor, or a tuple, list or dict of them, first dimension the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.errors import DataError, UsageError
from tutti.types import Batch


def length(batch: Batch) -> int:
    """Samples in a batch: the first dimension of its first tensor. Raises DataError where there is none."""
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor) and batch[0].dim():
        return batch[0].shape[0]
    for tensor in _leaves(batch):
        if tensor.dim() == 0:
            break
        return tensor.shape[0]
    raise DataError("a batch has no tensor whose first dimension is the sample", remedy="return tensors, or collate")


def cut(batch: Batch, low: int, high: int) -> Batch:
    """Samples ``low`` … ``high`` of a batch, as views."""
    return map_tensors(batch, lambda tensor: tensor[low:high])


def map_tensors(batch: Batch, function: Callable[[Any], Any], leaf: type = Tensor) -> Batch:
    """A batch of the same structure (tensor, tuple, list or dict) with ``function`` of every tensor, or ``leaf``."""
    if isinstance(batch, leaf):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function, leaf) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, leaf) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, function, leaf) for value in batch)
    raise UsageError(f"a batch holds a {type(batch).__name__}", remedy="tensors, tuples, lists and dicts of them work")


def placer(device: torch.device, dtype: torch.dtype, channels_last: bool) -> Callable[[Batch], Batch]:
    """A function that moves a batch to ``device``, its floating tensors to ``dtype``, its images to channels-last.

    To a GPU it copies from pinned memory, and does not wait until that is done.
    """

    def place(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if device.type == "cuda" and tensor.device.type == "cpu":
            # Converted here: what is converted on the way is copied once more, and not from pinned memory.
            tensor = tensor.to(wanted).pin_memory()
        moved = tensor.to(device, wanted, non_blocking=True)
        return _channels_last(moved) if channels_last and moved.dim() == 4 else moved

    return lambda batch: map_tensors(batch, place)


def _channels_last(images: Tensor) -> Tensor:
    """Channels-last also by its strides where there is one channel, which either layout would be; draws follow it."""
    placed = images.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = images.shape
    return placed if channels > 1 else placed.as_strided(images.shape, (height * width, 1, width, 1))


def _leaves(batch: Batch) -> Sequence[Tensor]:
    if isinstance(batch, Tensor):
        return (batch,)
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [leaf for value in values for leaf in _leaves(value)]
