"""What a layer that is split knows of its place among ranks, and dropout of a share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tutti.laws.shares import share


class Ranks(Protocol):
    """The ranks that hold the other slices: ``tutti.comm.differentiable.Ranks``."""

    rank: int
    size: int

    def copy(self, whole: Tensor, name: str) -> Tensor:
        """The same; backward sums over the ranks."""

    def reduce(self, part: Tensor, name: str) -> Tensor:
        """The sum over the ranks; backward passes on."""

    def gather(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All shares of ``length`` along ``dim``; backward takes this rank's."""

    def take(self, whole: Tensor, dim: int, length: int, name: str) -> Tensor:
        """This rank's share along ``dim`` of what all have alike; backward gathers."""

    def scatter(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """This rank's share along ``dim`` of the sum over the ranks; backward gathers."""

    def widen(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All shares along ``dim``, for each rank to use in its own way; backward sums, and takes this rank's."""

    def copies(self, tensors: Sequence[Tensor], name: str) -> Sequence[Tensor]:
        """The same; backward sums over the ranks, in one message."""

    def join(self, tensor: Tensor, name: str) -> Tensor:
        """All ranks' tensors of one shape, along a new first dimension; backward takes this rank's."""


class Slice(NamedTuple):
    """Of one layer here.

    Attributes:
        name: of the layer in the whole model.
        ranks: that hold the others.
        length: of what is divided: outputs, inputs, heads, rows of a table, features or positions.
        sequence: outputs that would be whole on all ranks are split by positions.
    """

    name: str
    ranks: Ranks
    length: int
    sequence: bool = False

    @property
    def mine(self) -> range:
        """This rank's share of ``length``."""
        return share(self.length, self.ranks.size, self.ranks.rank)


def dropped(part: Tensor, p: float, dim: int, slice_: Slice) -> Tensor:
    """Dropout of this rank's share along ``dim``; ``length`` may count groups of it, such as heads."""
    here = len(slice_.mine)
    if p == 0.0:
        return part
    shape, each = list(part.shape), part.shape[dim] // here
    shape[dim] = each * slice_.length
    # In the order in which the numbers lie in memory, for that is the order of the draws.
    order = sorted(range(part.dim()), key=lambda d: -part.stride()[d])
    ones = torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device).fill_(1)
    noise = functional.dropout(ones, p)
    return part * noise.narrow(dim, each * slice_.mine.start, part.shape[dim])
