"""A layer's slice on this rank, and dropout of a slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tutti.comm.partition import even_share


class SliceRanks(Protocol):
    """Protocol of collectives over the tensor-parallel ranks that autograd differentiates; each names its backward.

    ``tutti.comm.differentiable.TensorRanks`` implements them. All tensor-parallel ranks make the same calls in the same
    order. A call, or its backward, that communicates blocks, and raises ``PeerError`` if a rank is lost or late, and
    ``MismatchError`` if the ranks wait in different calls.

    Attributes:
        rank: index of this rank among the tensor-parallel ranks.
        size: number of tensor-parallel ranks.
    """

    rank: int
    size: int

    def copy(self, whole: Tensor, name: str) -> Tensor:
        """Return ``whole`` with its values unchanged; backward all-reduces (sums) its gradient over the tensor ranks.

        For the input of a column-parallel layer, of which each tensor-parallel rank computes its own outputs, and so a
        part of the input's gradient. Forward sends nothing.

        Args:
            whole: a tensor that is the same on all ranks.
            name: name of the layer, for the message of a PeerError or MismatchError in backward.

        Returns:
            A view of ``whole``, to be used in its place; ``whole`` itself where gradients are disabled.

        Raises:
            UsageError: within ``torch.func`` transforms.
        """

    def reduce(self, part: Tensor, name: str) -> Tensor:
        """All-reduce: return the sum of the tensor-parallel ranks' tensors; backward passes the gradient on unchanged.

        For the partial results of a row-parallel layer.

        Args:
            part: this rank's summand, of the same shape on all ranks; it stays as it is.
            name: name of the layer, for the message of a PeerError or MismatchError.

        Returns:
            The sum, a new tensor, with equal values on all ranks.
        """

    def gather(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All-gather the tensor-parallel ranks' slices along ``dim``, in rank order.

        For uses of the result that are the same on every rank: backward takes this rank's slice of the gradient,
        without communication.

        Args:
            part: this rank's slice.
            dim: the split dimension; if the number of ranks does not divide ``length``, the first ranks have one more.
            length: size of the whole tensor along ``dim``.
            name: name of the layer, for the message of a PeerError or MismatchError.

        Returns:
            The whole tensor, new, with size ``length`` along ``dim``.
        """

    def take(self, whole: Tensor, dim: int, length: int, name: str) -> Tensor:
        """Return this tensor-parallel rank's slice along ``dim`` of a tensor that is the same on all ranks.

        For a whole tensor that is combined with split ones, such as an operand that the script has computed. Forward
        sends nothing; backward all-gathers the ranks' slices of the gradient.

        Args:
            whole: the whole tensor.
            dim: the dimension to split; if the number of ranks does not divide ``length``, the first ranks have one
                more.
            length: size of ``whole`` along ``dim``.
            name: name of the layer, for the message of a PeerError or MismatchError in backward.

        Returns:
            A copy of the slice.
        """

    def scatter(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """Reduce-scatter: return this rank's slice along ``dim`` of the sum over the tensor-parallel ranks.

        For the partial results of a row-parallel layer with sequence parallelism, whose sum stays split by positions.
        Backward all-gathers the ranks' slices of the gradient.

        Args:
            part: this rank's summand, whole along ``dim``; it stays as it is.
            dim: the dimension to split; if the number of ranks does not divide ``length``, the first ranks have one
                more.
            length: size of ``part`` along ``dim``.
            name: name of the layer, for the message of a PeerError or MismatchError.

        Returns:
            The slice of the sum, a new tensor.
        """

    def widen(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All-gather the tensor-parallel ranks' slices along ``dim`` for uses that differ from rank to rank.

        Backward reduce-scatters: it sums the ranks' gradients of the whole tensor and returns this rank's slice of the
        sum. Consecutive calls with the same tensor share one result, and so one all-gather and one reduce-scatter.

        Args:
            part: this rank's slice.
            dim: the split dimension; if the number of ranks does not divide ``length``, the first ranks have one more.
            length: size of the whole tensor along ``dim``.
            name: name of the layer, for the message of a PeerError or MismatchError.

        Returns:
            The whole tensor, with size ``length`` along ``dim``.
        """

    def copies(self, tensors: Sequence[Tensor], name: str) -> Sequence[Tensor]:
        """Return several tensors with their values unchanged; backward all-reduces (sums) their gradients.

        The sum is over the tensor-parallel ranks. For uses in which each rank reads its own slice of the tensors, so
        that each rank computes a part of the gradients. Backward sends one message for the gradients of all tensors;
        forward sends nothing.

        Args:
            tensors: tensors that are the same on all ranks.
            name: name of the layer, for the message of a PeerError or MismatchError in backward.

        Returns:
            One tensor for each of ``tensors``, in order, to be used in its place; ``tensors`` itself where none needs a
            gradient.
        """

    def join(self, tensor: Tensor, name: str) -> Tensor:
        """All-gather the tensor-parallel ranks' tensors, of one shape, and stack them along a new first dimension.

        For the few numbers of each rank from which a loss over split classes is computed. Backward takes this rank's
        row of the gradient, and sends nothing.

        Args:
            tensor: this rank's tensor, of the same shape on all ranks.
            name: name of the layer, for the message of a PeerError or MismatchError.

        Returns:
            (ranks, *shape), in rank order.
        """


class LayerSlice(NamedTuple):
    """Which slice of one tensor-parallel layer or tensor this rank holds, with the ranks that hold the other slices.

    Attributes:
        name: name of the layer in the whole model.
        ranks: collectives over the tensor-parallel ranks that hold the slices.
        length: number of outputs, inputs, heads, rows of a table, features or positions that the ranks divide.
        sequence: sequence parallelism: outputs that would be whole on all ranks are split by positions.
    """

    name: str
    ranks: SliceRanks
    length: int
    sequence: bool = False

    @property
    def mine(self) -> range:
        """Range of the layer's heads, features or other units that this tensor-parallel rank holds.

        The units 0 … ``length`` - 1 are divided over the ranks, contiguously and in rank order. The shares are
        equal; if the number of ranks does not divide ``length``, the first ranks have one unit more.
        """
        return even_share(self.length, self.ranks.size, self.ranks.rank)


def dropped(part: Tensor, p: float, dim: int, slice_: LayerSlice) -> Tensor:
    """Apply dropout to this rank's slice of a tensor, with the random draws that one device makes for the whole tensor.

    For tensor parallelism. Not collective: each rank draws for the whole tensor, from equal RNG states, and uses its
    slice of the mask.

    Args:
        part: this rank's slice of the tensor.
        p: probability of zero.
        dim: the split dimension.
        slice_: position of this rank's slice; its ``length`` may count groups along ``dim``, such as heads.

    Returns:
        ``part`` times the mask and 1 / (1 - p), in a new tensor; ``part`` itself for ``p`` 0.
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
