"""What optimizers need of tensors that are split over ranks: norms of whole ones, or whole matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.types import Norms, ShardSpec, Wholes


def complete(
    optimizer: Any,
    split: Mapping[Tensor, Split],
    comm: Communicator,
    norms: Norms | None = None,
    wholes: Wholes | None = None,
) -> None:
    """Give an optimizer what it asks for of split tensors: their norms (``norms``), or whole ones (``wholes``).

    Given are those that it has been given to make slices of rows. Collective among the ranks that hold slices.
    """
    if comm.size == 1 or not _somewhere(bool(split), comm):
        return
    if getattr(optimizer, "norms", 0) is norms:
        optimizer.norms = SplitNorms(optimizer, split.keys(), comm, norms)
    if getattr(optimizer, "wholes", 0) is wholes:
        optimizer.wholes = SplitMatrices(split, comm, wholes)


class Split(NamedTuple):
    """A tensor of which this rank has a slice: its whole shape, and where in it the slice's parts are, row by row."""

    shape: tuple[int, ...]
    regions: Sequence[tuple[slice, ...]]

    @classmethod
    def of(cls, spec: ShardSpec, local: Sequence[int]) -> Split | None:
        """The slice of shape ``local`` that ``spec`` describes; None where that is all."""
        if tuple(local) == spec.shape:
            return None
        boxes = [zip(offset, shape, strict=True) for offset, shape in spec.regions(local)]
        return cls(spec.shape, [tuple(slice(begin, begin + length) for begin, length in box) for box in boxes])


def _somewhere(here: bool, comm: Communicator) -> bool:
    return any(int(flag) for flag in comm.all_gather(torch.tensor([int(here)]), "whether layers are split"))


class SplitNorms:
    """``types.Norms`` over the ranks that hold slices of one tensor; what they hold alike counts once."""

    def __init__(
        self, optimizer: Optimizer, split: Collection[Tensor], comm: Communicator, slices: Norms | None
    ) -> None:
        self._optimizer, self._split, self._comm, self._slices = optimizer, set(split), comm, slices

    def __call__(self, squares: Tensor) -> Tensor:
        if self._slices is not None:
            squares = self._slices(squares)
        used = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        table = squares.view(len(used), -1)
        if self._comm.rank:
            table[[i for i, p in enumerate(used) if p not in self._split]] = 0
        there = squares.to(self._comm.device)
        self._comm.start_all_reduce(there, "norms of split layers").wait()
        return there.to(squares.device)


class SplitMatrices:
    """``types.Wholes`` over the ranks that hold slices of one matrix."""

    def __init__(self, split: Mapping[Tensor, Split], comm: Communicator, slices: Wholes | None) -> None:
        self._split, self._comm, self._slices = split, comm, slices

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums of tensors that are zero but for this rank's slice: one all-reduce of whole tensors."""
        if self._slices is not None:
            tensors = self._slices.gather(parameter, tensors)
        split = self._split.get(parameter)
        if split is None:
            return list(tensors)
        whole = tensors[0].new_zeros(len(tensors), *split.shape)
        for target, tensor in zip(whole, tensors, strict=True):
            for block, region in zip(tensor.chunk(len(split.regions)), split.regions, strict=True):
                target[region] = block
        self._comm.start_all_reduce(whole, "whole matrices").wait()
        return list(whole.unbind())

    def mine(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's slice of a whole tensor."""
        split = self._split.get(parameter)
        if split is not None:
            whole = torch.cat([whole[region] for region in split.regions])
        return whole if self._slices is None else self._slices.mine(parameter, whole)
