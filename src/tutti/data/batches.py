"""Operations on batches: tensors, or tuples, lists and dicts of tensors, with samples as the first dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.device import pins_memory
from tutti.errors import DataError, UsageError
from tutti.types import Batch


def length(batch: Batch) -> int:
    """Return the number of samples: the first dimension of the batch's first tensor. Raises DataError without one."""
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor) and batch[0].dim():
        return batch[0].shape[0]
    for tensor in _leaves(batch):
        if tensor.dim() == 0:
            break
        return tensor.shape[0]
    raise DataError("a batch has no tensor whose first dimension is the sample", remedy="return tensors, or collate")


def slice_batch(batch: Batch, low: int, high: int) -> Batch:
    """Return samples ``low`` to ``high``, exclusive, of a batch as views."""
    return map_tensors(batch, lambda tensor: tensor[low:high])


def map_tensors(batch: Batch, function: Callable[[Any], Any], leaf: type = Tensor) -> Batch:
    """Apply ``function`` to every leaf of a batch, and return a batch of the same structure.

    Args:
        batch: a leaf, or tuples, lists and dicts of leaves.
        function: of a leaf.
        leaf: the leaves' type.

    Raises:
        UsageError: the batch holds an object of another type.
    """
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
    """Return a function that moves a batch to a device; to an accelerator asynchronously, from pinned memory.

    Args:
        device: the device.
        dtype: of the batch's floating-point tensors; other tensors keep theirs.
        channels_last: convert 4-d tensors to the channels-last memory format.
    """

    def place(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if pins_memory(device) and tensor.device.type == "cpu":
            # Cast before pinning: a cast during the copy would copy once more, from memory that is not pinned.
            tensor = tensor.to(wanted).pin_memory()
        moved = tensor.to(device, wanted, non_blocking=True)
        return _channels_last(moved) if channels_last and moved.dim() == 4 else moved

    return lambda batch: map_tensors(batch, place)


def _channels_last(images: Tensor) -> Tensor:
    """Convert images to channels-last, with its strides also for one channel; the order of random draws follows them.

    With one channel either memory format fits, and ``contiguous`` would leave the strides as they are.
    """
    placed = images.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = images.shape
    return placed if channels > 1 else placed.as_strided(images.shape, (height * width, 1, width, 1))


def _leaves(batch: Batch) -> Sequence[Tensor]:
    if isinstance(batch, Tensor):
        return (batch,)
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [leaf for value in values for leaf in _leaves(value)]
