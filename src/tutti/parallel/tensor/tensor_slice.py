"""A layer's slice on this rank, and dropout of a slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tutti.comm.partition import even_share


class SliceRanks(Protocol):
    """Collectives over the tensor ranks, with backward: ``tutti.comm.differentiable.TensorRanks``."""

    rank: int
    size: int

    def copy(self, whole: Tensor, name: str) -> Tensor:
        """Return ``whole``, of which each rank uses its own slice; backward all-reduces its gradient.

        Args:
            whole: a tensor that is the same on all ranks.
            name: name of the layer, for error messages.
        """

    def reduce(self, part: Tensor, name: str) -> Tensor:
        """All-reduce: return the sum of the ranks' tensors; backward passes the gradient on unchanged.

        Args:
            part: this rank's summand.
            name: name of the layer, for error messages.
        """

    def gather(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All-gather the ranks' slices along ``dim``, in rank order; backward takes this rank's slice.

        Args:
            part: this rank's slice.
            dim: the split dimension.
            length: size of the whole tensor along ``dim``.
            name: of the layer, for error messages.
        """

    def take(self, whole: Tensor, dim: int, length: int, name: str) -> Tensor:
        """Return this rank's slice along ``dim`` of a tensor that is the same on all ranks; backward all-gathers.

        Args:
            whole: the whole tensor.
            dim: the dimension to split.
            length: size of ``whole`` along ``dim``.
            name: of the layer, for error messages.
        """

    def scatter(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """Reduce-scatter: return this rank's slice along ``dim`` of the sum over the ranks; backward all-gathers.

        Args:
            part: this rank's summand, whole along ``dim``.
            dim: the dimension to split.
            length: size of ``part`` along ``dim``.
            name: of the layer, for error messages.
        """

    def widen(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All-gather the ranks' slices along ``dim`` for uses that differ from rank to rank; backward reduce-scatters.

        Args:
            part: this rank's slice.
            dim: the split dimension.
            length: size of the whole tensor along ``dim``.
            name: of the layer, for error messages.
        """

    def copies(self, tensors: Sequence[Tensor], name: str) -> Sequence[Tensor]:
        """Return ``tensors``, of which each rank uses its own slice; backward all-reduces their gradients.

        One message for all of them.

        Args:
            tensors: tensors that are the same on all ranks.
            name: name of the layer, for error messages.
        """

    def join(self, tensor: Tensor, name: str) -> Tensor:
        """All-gather tensors of one shape: return (ranks, *shape) in rank order; backward takes this rank's gradient.

        Args:
            tensor: this rank's tensor, of the same shape on all ranks.
            name: name of the layer, for error messages.
        """


class LayerSlice(NamedTuple):
    """This rank's slice of one layer.

    Attributes:
        name: of the layer in the whole model.
        ranks: collectives over the ranks that hold the slices.
        length: number of outputs, inputs, heads, rows of a table, features or positions that the ranks divide.
        sequence: sequence parallelism: outputs that would be whole on all ranks are split by positions.
    """

    name: str
    ranks: SliceRanks
    length: int
    sequence: bool = False

    @property
    def mine(self) -> range:
        """This rank's contiguous range of indices out of ``length``, an even share."""
        return even_share(self.length, self.ranks.size, self.ranks.rank)


def dropped(part: Tensor, p: float, dim: int, slice_: LayerSlice) -> Tensor:
    """Return this rank's slice after dropout, with the same random draws that one device makes for the whole tensor.

    Not collective: each rank draws for the whole tensor, from equal RNG states.

    Args:
        part: the slice.
        p: probability of zero.
        dim: the split dimension.
        slice_: this rank's slice; its ``length`` may count groups along ``dim``, such as heads.
    """
    here = len(slice_.mine)
    if p == 0.0:
        return part
    shape, each = list(part.shape), part.shape[dim] // here
    shape[dim] = each * slice_.length
    # Dropout draws in memory order.
    order = sorted(range(part.dim()), key=lambda d: -part.stride()[d])
    ones = torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device).fill_(1)
    noise = functional.dropout(ones, p)
    return part * noise.narrow(dim, each * slice_.mine.start, part.shape[dim])
