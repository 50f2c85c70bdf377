"""Norms of whole tensors and whole matrices for optimizers whose parameters are split over tensor ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import region_index
from tutti.comm.communicator import Communicator
from tutti.optim.layerwise import LayerWise
from tutti.optim.muon import Muon
from tutti.types.optimizer_protocols import FullTensorGatherer, NormReducer
from tutti.types.shard_spec import ShardSpec


def support_split_tensors(
    optimizer: Optimizer,
    split: Mapping[Tensor, SliceRegions],
    comm: Communicator,
    norms: NormReducer | None = None,
    wholes: FullTensorGatherer | None = None,
) -> None:
    """Let an optimizer that needs whole matrices or their norms compute them from tensor-parallel slices.

    The optimizer's attribute ``norms`` (sums of squared norms) or ``wholes`` (gathered matrices) is set to an object
    that communicates with the other tensor ranks in each step. Collective over ``comm``: an all-gather of one flag a
    rank; none for a single rank. If no rank has a split parameter, nothing is changed.

    Args:
        optimizer: the optimizer; one other than LARS, LARC, LAMB, NovoGrad and ``Muon`` of tutti is left as it is.
        split: for each split parameter on this rank, the position of its slice in the global tensor (``shape`` of that
            tensor, and ``regions``, each a tuple of one ``slice`` a dimension).
        comm: the tensor ranks.
        norms: the norm reducer already installed for row-sharded tensors, which is wrapped; None for none.
        wholes: the gatherer already installed for row-sharded tensors, which is wrapped; None for none.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    if comm.size == 1 or not _somewhere(bool(split), comm):
        return
    if isinstance(optimizer, LayerWise) and optimizer.norms is norms:
        optimizer.norms = SplitNormReducer(optimizer, split.keys(), comm, norms)
    if isinstance(optimizer, Muon) and optimizer.wholes is wholes:
        optimizer.wholes = SplitMatrixGatherer(split, comm, wholes)


class SliceRegions(NamedTuple):
    """Position of this rank's slice of a tensor within the whole tensor, as one or several regions.

    Attributes:
        shape: shape of the whole tensor.
        regions: indices of the regions in it of which the slice consists, concatenated along ``dim``; each has one
            ``slice`` a dimension.
        dim: the dimension along which the slice is put together.
    """

    shape: tuple[int, ...]
    regions: Sequence[tuple[slice, ...]]
    dim: int = 0

    @classmethod
    def of(cls, spec: ShardSpec, local: Sequence[int]) -> SliceRegions | None:
        """Return where this rank's slice of a tensor lies in the global tensor; None where the rank holds all of it.

        Args:
            spec: global shape, and where the slice begins in each dimension; for a tensor that is cut in several
                pieces, such as fused queries, keys and values, in each piece.
            local: shape of the slice.

        Returns:
            A ``SliceRegions``: the global shape (``shape``), and the regions of the global tensor of which the slice
            consists (``regions``), each a tuple of one ``slice`` a dimension. One region for most tensors; the regions
            of several pieces, concatenated in this order along ``dim``, are the slice.
        """
        if tuple(local) == spec.shape:
            return None
        return cls(spec.shape, [region_index(*region) for region in spec.regions(local)], spec.dim)


def _somewhere(here: bool, comm: Communicator) -> bool:
    return any(int(flag) for flag in comm.all_gather(torch.tensor([int(here)]), "whether layers are split"))


class SplitNormReducer:
    """Adds up squared norms of tensor-parallel slices over the tensor ranks, for layer-wise optimizers.

    Implements the protocol ``NormReducer``: called with a 1-d tensor of sums of squares over this rank's slices, the
    object returns a tensor of equal shape and device, in which the numbers of split parameters are summed over the
    tensor ranks, and the numbers of whole parameters are unchanged. A call is collective over the tensor ranks: one
    all-reduce.

    Args:
        optimizer: the optimizer. A call takes equally many numbers for each of its parameters that has a gradient, in
            the order of its groups.
        split: the split parameters.
        comm: the tensor ranks.
        slices: reducer of parameters that are also sharded by rows, called first with the same numbers, to sum over
            the rows of this rank's slices; None for none.
    """

    def __init__(
        self, optimizer: Optimizer, split: Collection[Tensor], comm: Communicator, slices: NormReducer | None
    ) -> None:
        self._optimizer, self._split, self._comm, self._slices = optimizer, set(split), comm, slices

    def __call__(self, squares: Tensor) -> Tensor:
        """Return the sums of squares of whole tensors; those of split tensors are summed over the tensor ranks.

        Collective over the tensor ranks: one all-reduce, after those of the constructor's ``slices``.

        Args:
            squares: sums of squares of this rank's tensors, the same number for each parameter with a gradient,
                flattened; the call may overwrite them.

        Returns:
            The sums for whole tensors, in the same shape and on the same device; possibly ``squares`` itself.
        """
        if self._slices is not None:
            squares = self._slices(squares)
        used = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        table = squares.view(len(used), -1)
        if self._comm.rank:
            table[[i for i, p in enumerate(used) if p not in self._split]] = 0
        there = squares.to(self._comm.device)
        self._comm.start_all_reduce(there, "norms of split layers").wait()
        return there.to(squares.device)


class SplitMatrixGatherer:
    """Assembles whole matrices from tensor-parallel slices, for optimizers such as Muon.

    Implements the protocol ``FullTensorGatherer`` over the tensor ranks.

    Args:
        split: the split parameters with the regions of their slices.
        comm: the tensor ranks.
        slices: gatherer for parameters that are also sharded by rows, called first, to gather this rank's slice from
            its rows; None for none.
    """

    def __init__(
        self, split: Mapping[Tensor, SliceRegions], comm: Communicator, slices: FullTensorGatherer | None
    ) -> None:
        self._split, self._comm, self._slices = split, comm, slices

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Assemble whole tensors from the tensor-parallel ranks' slices, for an optimizer that needs whole matrices.

        Collective over the tensor ranks: one all-reduce of tensors that are zero except for this rank's slice; none
        where the parameter is not split. Tensors that are also sharded by rows are gathered over the shard ranks first.

        Args:
            parameter: the parameter that all ``tensors`` are of.
            tensors: this rank's slices, such as gradient and momentum, each in the parameter's local shape.

        Returns:
            The whole tensors, in the order of ``tensors``, on every rank: new memory; the given (or row-gathered)
            tensors themselves where the parameter is not split over tensor ranks.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        if self._slices is not None:
            tensors = self._slices.gather(parameter, tensors)
        split = self._split.get(parameter)
        if split is None:
            return list(tensors)
        whole = tensors[0].new_zeros(len(tensors), *split.shape)
        for target, tensor in zip(whole, tensors, strict=True):
            lengths = [region[split.dim].stop - region[split.dim].start for region in split.regions]
            for part, region in zip(tensor.split(lengths, split.dim), split.regions, strict=True):
                target[region] = part
        self._comm.start_all_reduce(whole, "whole matrices").wait()
        return list(whole.unbind())

    def mine(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, the inverse of ``gather``. Not collective.

        It is the slice of this tensor-parallel rank; of a parameter that data ranks shard by rows, too, this rank's
        rows of the slice.

        Args:
            parameter: the parameter that the tensor belongs to (its value, gradient or optimizer state).
            whole: the whole tensor, in the parameter's global shape.

        Returns:
            The part, in the parameter's local shape: a copy where the parameter is split over tensor ranks, a view of
            ``whole`` where it is only sharded by rows, and ``whole`` itself where it is neither.
        """
        split = self._split.get(parameter)
        if split is not None:
            whole = torch.cat([whole[region] for region in split.regions], split.dim)
        return whole if self._slices is None else self._slices.mine(parameter, whole)
