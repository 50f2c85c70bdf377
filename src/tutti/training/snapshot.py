"""What a save writes: a copy that training does not touch, or, where none has room, the state itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from tutti.measure.memory import free
from tutti.state.write import Slice
from tutti.types import Piece, ShardSpec

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "Mapping[str, Mapping[str, Tensor | Piece]]"

# A guess: training takes memory of its own until the next save.
_SHARE_OF_FREE = 0.5


def has_room(state: State, processes: int) -> bool:
    """Whether a copy takes at most half of the memory that each of so many processes may still take here."""
    tensors = [_tensor(value) for named in state.values() for value in named.values()]
    return sum(tensor.nbytes for tensor in tensors) <= _SHARE_OF_FREE * free(processes)


def slices(state: State, copy: bool) -> dict[str, list[Slice]]:
    """What to write, by group; without ``copy`` it must not change until it is written."""
    return {
        group: [part for name, value in named.items() for part in _slices(name, value, copy)]
        for group, named in state.items()
    }


def _slices(name: str, value: Tensor | Piece, copy: bool) -> list[Slice]:
    tensor = _tensor(value).detach()
    if copy:
        tensor = tensor.to("cpu", copy=True)
    if not isinstance(value, Piece):
        return [Slice.whole(name, tensor)]
    regions = ShardSpec(value.shape, value.offset, (), value.blocks, value.rows).regions(tensor.shape)
    blocks = tensor.split([shape[0] for _, shape in regions]) if len(regions) > 1 else (tensor,)
    return [Slice(name, block, value.shape, offset) for block, (offset, _) in zip(blocks, regions, strict=True)]


def _tensor(value: Tensor | Piece) -> Tensor:
    return value.tensor if isinstance(value, Piece) else value
