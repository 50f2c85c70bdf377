"""Snapshot the state for a save: a copy in host memory, or the live tensors where memory has no room for a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from tutti.checkpoint.write import WritableSlice
from tutti.host_memory import free_memory
from tutti.types.shard_spec import ShardSpec, TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "Mapping[str, Mapping[str, Tensor | TensorSlice]]"

# A guess: training takes memory of its own until the next save.
_SHARE_OF_FREE = 0.5


def has_room(state: State, processes: int) -> bool:
    """Return whether a copy of this rank's ``state`` takes at most half of this rank's share of free host memory.

    Args:
        state: this rank's tensors and slices, by group and name.
        processes: ranks on this node, among which its free memory is divided.
    """
    tensors = [_tensor(value) for named in state.values() for value in named.values()]
    return sum(tensor.nbytes for tensor in tensors) <= _SHARE_OF_FREE * free_memory(processes)


def slices(state: State, copy: bool) -> dict[str, list[WritableSlice]]:
    """Return the tensor slices that this rank writes into a checkpoint, as lists by group of state.

    Args:
        state: this rank's tensors and slices, by group and name.
        copy: copy them to host memory, and return when the copies are complete; otherwise the slices alias ``state``,
            which must not change before the write.

    Returns:
        For each group, such as ``model``, a list of ``WritableSlice``: each has the tensor's name, the slice's values
        (on any device if not copied), the shape of the whole tensor and the slice's offset in it.
    """
    return {
        group: [part for name, value in named.items() for part in _slices(name, value, copy)]
        for group, named in state.items()
    }


def _slices(name: str, value: Tensor | TensorSlice, copy: bool) -> list[WritableSlice]:
    tensor = _tensor(value).detach()
    if copy:
        tensor = tensor.to("cpu", copy=True)
    if not isinstance(value, TensorSlice):
        return [WritableSlice.whole(name, tensor)]
    regions = ShardSpec(value.shape, value.offset, (), value.dim, value.ranges).regions(tensor.shape)
    parts = tensor.split([shape[value.dim] for _, shape in regions], value.dim) if len(regions) > 1 else (tensor,)
    return [WritableSlice(name, part, value.shape, offset) for part, (offset, _) in zip(parts, regions, strict=True)]


def _tensor(value: Tensor | TensorSlice) -> Tensor:
    return value.tensor if isinstance(value, TensorSlice) else value
