"""Positions of tensors that are split over ranks: of a rank's local tensor, and of a slice in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShardSpec:
    """Position of this rank's local tensor in the global tensor that is split over ranks.

    Attributes:
        shape: global shape.
        offset: offset of this rank's slice in the global tensor; with several ``blocks``, in the first block.
        tied: other names of the same tensor (tied weights).
        blocks: number of equal blocks along the first dimension that are split alike, such as queries, keys and values
            packed into one matrix. The local tensor holds the same slice of each block, one after the other.
        rows: ``(start, total)``: the local tensor holds only rows ``start : start + len(local)`` of the ``total`` rows
            of this slice; None for all rows.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tied: tuple[str, ...] = ()
    blocks: int = 1
    rows: tuple[int, int] | None = None

    def regions(self, local: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the position in the global tensor of each contiguous part of this rank's local tensor.

        This spec states which slice the local tensor holds. A local tensor consists of several parts if the global
        tensor has several equal ``blocks`` along its first dimension that are split alike, such as packed queries, keys
        and values.

        Args:
            local: shape of the local tensor that has this spec.

        Returns:
            A list of pairs (offset in the global tensor, shape), one for each part, in the order of the local rows: a
            part for each of ``blocks`` of which the local tensor holds rows.

        >>> ShardSpec((12, 5), (2, 0), blocks=3).regions((6, 5))
        [((2, 0), (2, 5)), ((6, 0), (2, 5)), ((10, 0), (2, 5))]
        >>> ShardSpec((12, 5), (2, 0), blocks=3, rows=(3, 6)).regions((3, 5))
        [((7, 0), (1, 5)), ((10, 0), (2, 5))]
        """
        if self.blocks == 1:
            return [(self.offset, tuple(local))]
        begin, total = self.rows or (0, local[0])
        step, each = self.shape[0] // self.blocks, total // self.blocks
        first, *rest = self.offset
        found = []
        for block in range(self.blocks):
            low, high = max(begin, block * each), min(begin + local[0], (block + 1) * each)
            if low < high:
                found.append(((first + block * step + low - block * each, *rest), (high - low, *local[1:])))
        return found

    def cut(self, local: Sequence[int], begin: int) -> ShardSpec:
        """Return the position in the global tensor of some consecutive rows of this spec's local tensor.

        Used to shard the local tensor of a tensor-parallel rank further, by rows.

        Args:
            local: shape of the local tensor, whose position in the global tensor this spec states.
            begin: index in the local tensor of the first of these rows.

        Returns:
            The ``ShardSpec`` of the tensor that holds these rows. It does not state their number, which is the length
            of that tensor.
        """
        if self.blocks > 1:
            return replace(self, rows=(begin, local[0]))
        return replace(self, offset=(self.offset[0] + begin, *self.offset[1:]))


class TensorSlice(NamedTuple):
    """This rank's slice of a tensor that is split over ranks, with its position in the full tensor.

    Attributes:
        tensor: the slice.
        shape: shape of the full tensor.
        offset: index of the slice's first element in the full tensor, one number for each dimension; with several
            ``blocks``, that in the first block.
        blocks: number of equal blocks along the first dimension that are split alike, such as queries, keys and values
            packed into one matrix; ``tensor`` holds the same slice of each, one after the other.
        rows: ``(start, total)``: ``tensor`` holds only rows ``start : start + len(tensor)`` of the ``total`` rows of
            the slice; None for all rows.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    blocks: int = 1
    rows: tuple[int, int] | None = None
