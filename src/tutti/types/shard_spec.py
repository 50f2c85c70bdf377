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
        offset: index in the global tensor of the first element of this rank's slice, one number for each dimension.
        tied: other names of the same tensor (tied weights).
        dim: the dimension along which the local tensor is put together from ``ranges``.
        ranges: ``(begin, end)`` of each part of the global tensor along ``dim`` that the local tensor holds, one after
            the other, such as heads of queries, keys and values in one matrix; none for a slice of one part. A local
            tensor that was cut by rows may hold only the beginning of them (``dim`` is then 0).
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tied: tuple[str, ...] = ()
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def regions(self, local: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the position in the global tensor of each contiguous part of this rank's local tensor.

        This spec states which slice the local tensor holds. A local tensor consists of several parts if ``ranges`` are
        given, such as packed queries, keys and values, which are split alike.

        Args:
            local: shape of the local tensor that has this spec.

        Returns:
            A list of pairs (offset in the global tensor, shape), one for each part that the local tensor holds, in the
            order in which the parts follow each other along ``dim``.

        >>> ShardSpec((12, 5), (2, 0), ranges=((2, 4), (6, 8), (10, 12))).regions((6, 5))
        [((2, 0), (2, 5)), ((6, 0), (2, 5)), ((10, 0), (2, 5))]
        >>> ShardSpec((5, 12), (0, 2), dim=1, ranges=((2, 4), (8, 10))).regions((5, 4))
        [((0, 2), (5, 2)), ((0, 8), (5, 2))]
        """
        if not self.ranges:
            return [(self.offset, tuple(local))]
        found, left, dim = [], local[self.dim], self.dim
        for begin, end in self.ranges:
            length = min(end - begin, left)
            left -= length
            if length:
                offset = (*self.offset[:dim], begin, *self.offset[dim + 1 :])
                found.append((offset, (*local[:dim], length, *local[dim + 1 :])))
        return found

    def cut(self, begin: int) -> ShardSpec:
        """Return the position in the global tensor of rows of the local tensor whose position this spec states.

        Used to shard the local tensor of a tensor-parallel rank further, by rows.

        Args:
            begin: index in the local tensor of the first of these rows, which are consecutive.

        Returns:
            The ``ShardSpec`` of the tensor that holds these rows. It does not state their number, which is the length
            of that tensor.

        >>> ShardSpec((12, 5), (2, 0), ranges=((2, 4), (6, 8), (10, 12))).cut(3).regions((3, 5))
        [((7, 0), (1, 5)), ((10, 0), (2, 5))]
        """
        if not self.ranges or self.dim:
            return replace(self, offset=(self.offset[0] + begin, *self.offset[1:]))
        left, done = [], 0
        for low, high in self.ranges:
            if begin < done + high - low:
                left.append((low + max(begin - done, 0), high))
            done += high - low
        first = left[0][0] if left else self.ranges[-1][1]
        return replace(self, offset=(first, *self.offset[1:]), ranges=tuple(left))


class TensorSlice(NamedTuple):
    """This rank's slice of a tensor that is split over ranks, with its position in the full tensor.

    Attributes:
        tensor: the slice.
        shape: shape of the full tensor.
        offset: index of the slice's first element in the full tensor, one number for each dimension.
        dim, ranges: dimension along which the slice is put together from several parts of the full tensor, and the
            parts; see ``ShardSpec``.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
