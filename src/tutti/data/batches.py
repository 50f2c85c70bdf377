"""Operations on batches: tensors, or tuples, lists and dicts of tensors, with samples as the first dimension.

A list or tuple of strings, bytes and None is a column with one entry a sample. Batches of a script's own ``collate_fn``
may hold anything, and are therefore never sliced: a ``CollatedBatch`` has one for each micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tutti.device import pins_memory
from tutti.errors import DataError, UsageError, kind_of
from tutti.types.micro_batch import Batch


@dataclass(frozen=True)
class CollatedBatch:
    """One rank's samples of a global batch, where the script's ``collate_fn`` has made a batch of each micro-batch.

    It is no tensor and no sequence: an index or an iteration raises UsageError.

    Attributes:
        parts: results of ``collate_fn``, of any type, one for each micro-batch, sorted by logical worker (fixed share
            of the global batch).
        sizes: number of samples of each micro-batch.
    """

    parts: tuple[Batch, ...] = ()
    sizes: tuple[int, ...] = ()

    def part(self, low: int, high: int) -> Batch:
        """Return one micro-batch of this rank's global-batch samples, as the script's ``collate_fn`` made it.

        Args:
            low: index of the micro-batch's first sample among the rank's samples.
            high: index after its last sample; equal to ``low`` for a micro-batch without samples.

        Returns:
            What ``collate_fn`` returned for the micro-batch; for one without samples, a ``CollatedBatch`` (the class of
            this object) that holds no micro-batches.

        Raises:
            UsageError: no call of ``collate_fn`` made a batch of exactly these samples.
        """
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            if (start, start + size) == (low, high):
                return part
            start += size
        if low == high:
            return CollatedBatch()
        raise UsageError(
            "a batch made by collate_fn cannot be sliced",
            why="it may hold anything, so that samples cannot be told apart",
            remedy="leave it as it is, or loop over run.microbatches(epoch)",
        )

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"this device's batch is {len(self.parts)} batches of collate_fn, one for each micro-batch",
            remedy="hand it to run.step as it is, or loop over run.microbatches(epoch), which yields each",
        )


def script_batch(batch: Batch) -> Batch:
    """Return a batch in the form that the script's model and loss function get.

    A ``CollatedBatch`` (micro-batches made by the script's ``collate_fn``) of one micro-batch becomes what
    ``collate_fn`` returned for this micro-batch; any other batch is returned itself. Nothing is copied.

    Args:
        batch: tensors, lists of strings, and tuples, lists and dicts of them; or a ``CollatedBatch``.
    """
    return batch.parts[0] if isinstance(batch, CollatedBatch) and len(batch.parts) == 1 else batch


def length(batch: Batch) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor, or length of a list of strings.

    For a ``CollatedBatch`` (micro-batches made by the script's ``collate_fn``) the number is the sum of the sizes of
    the micro-batches.

    Args:
        batch: tensors, lists of strings, bytes or None, and tuples, lists and dicts of them; or a ``CollatedBatch``.

    Raises:
        DataError: the batch holds none of these, or a tensor without dimensions comes first.
    """
    if isinstance(batch, CollatedBatch):
        return sum(batch.sizes)
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor) and batch[0].dim():
        return batch[0].shape[0]
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 0:
            break
        return len(leaf)
    raise DataError(
        f"a batch has no tensor whose first dimension is the sample: it is {kind_of(batch)}",
        remedy="return tensors from the data set, or collate; run.step takes a batch of run.epoch(number)",
    )


def slice_batch(batch: Batch, low: int, high: int) -> Batch:
    """Return samples ``low`` to ``high``, exclusive, of a batch, in the same structure.

    Its tensors are views of the batch's tensors; its lists of strings are copies.

    Args:
        batch: tensors, lists of strings, and tuples, lists and dicts of them; or a ``CollatedBatch`` (micro-batches
            made by the script's ``collate_fn``), of which this function returns one whole micro-batch.
        low: first sample, an index in the batch.
        high: index after the last sample.

    Raises:
        UsageError: the batch holds an object other than tensors and lists of strings, or the samples are not exactly
            one micro-batch of a ``CollatedBatch``.
    """
    if isinstance(batch, CollatedBatch):
        return batch.part(low, high)
    return _mapped(batch, lambda rows: rows[low:high], Tensor, _unsliced, columns=True)


def _unsliced(value: Any) -> NoReturn:
    raise UsageError(
        f"a batch holds a {type(value).__name__}",
        why="it has to be divided into micro-batches, and its samples cannot be told apart",
        remedy="take tensors, lists of strings, and tuples, lists and dicts of them, or give tutti.prepare(collate=…)",
    )


def map_tensors(
    batch: Batch,
    function: Callable[[Any], Any],
    leaf: type = Tensor,
    other: Callable[[Any], Any] = lambda value: value,
) -> Batch:
    """Apply ``function`` to every leaf of a batch, and return a new batch of the same structure.

    Args:
        batch: a leaf, or tuples, lists and dicts of leaves; or a ``CollatedBatch``, which holds a batch for each
            micro-batch.
        function: maps a leaf to its replacement.
        leaf: type of the leaves: tensors, unless another type is given.
        other: maps an object that is neither a leaf nor a container, such as a string or a ``PackedSequence``, to its
            replacement; by default to itself.
    """
    if isinstance(batch, CollatedBatch):
        return CollatedBatch(tuple(map_tensors(part, function, leaf, other) for part in batch.parts), batch.sizes)
    return _mapped(batch, function, leaf, other)


def _mapped(
    batch: Batch, function: Callable[[Any], Any], leaf: type, other: Callable[[Any], Any], columns: bool = False
) -> Batch:
    if isinstance(batch, leaf) or (columns and _is_column(batch)):
        return function(batch)
    if isinstance(batch, PackedSequence):
        return other(batch)
    if isinstance(batch, Mapping):
        return _alike(batch, {key: _mapped(value, function, leaf, other, columns) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function, leaf, other, columns) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_mapped(value, function, leaf, other, columns) for value in batch)
    return other(batch)


def _alike(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return ``values`` in a mapping of the batch's own type, such as transformers' ``BatchEncoding``."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    made = copy.copy(batch)
    made.update(values)
    return made


def _is_column(value: Any) -> bool:
    """Return whether the value is a list or tuple with a string, bytes or None for each sample."""
    plain = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return plain and all(isinstance(entry, str | bytes | None) for entry in value)


def placer(device: torch.device, dtype: torch.dtype, channels_last: bool) -> Callable[[Batch], Batch]:
    """Return a function from a batch to the same batch on a device, in the model's dtype and memory format.

    CPU tensors for an accelerator are cast and copied to pinned memory on the host, which blocks; their copy to the
    device is then queued on the current stream, which the host does not wait for. Tensors that already have the device,
    dtype and memory format are returned themselves, not copied. Objects with a method ``to``, such as packed sequences
    and graphs, are moved by it; other objects stay as they are.

    Args:
        device: the device that the batch is moved to.
        dtype: dtype that floating-point tensors are cast to; other tensors keep theirs.
        channels_last: whether to convert 4-d tensors to the channels-last memory format.

    Returns:
        A function from a batch to a batch of the same structure (tuples, lists and dicts).
    """

    def place(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if pins_memory(device) and tensor.device.type == "cpu":
            # Cast before pinning: a cast during the copy would copy once more, from memory that is not pinned.
            tensor = tensor.to(wanted).pin_memory()
        moved = tensor.to(device, wanted, non_blocking=True)
        return _channels_last(moved) if channels_last and moved.dim() == 4 else moved

    def move(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            moved = value.to(dtype) if value.data.is_floating_point() else value
            return moved.to(device)  # type: ignore[arg-type]
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return lambda batch: map_tensors(batch, place, other=move)


def _channels_last(images: Tensor) -> Tensor:
    """Convert images to channels-last, with its strides also for one channel; the order of random draws follows them.

    With one channel either memory format fits, and ``contiguous`` would leave the strides as they are.
    """
    placed = images.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = images.shape
    return placed if channels > 1 else placed.as_strided(images.shape, (height * width, 1, width, 1))


def _leaves(batch: Batch) -> Sequence[Any]:
    """Return the tensors and columns of a batch."""
    if isinstance(batch, Tensor) or (batch and _is_column(batch)):
        return (batch,)
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [leaf for value in values for leaf in _leaves(value)]
