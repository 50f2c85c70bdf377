"""What optimizers need of tensors that are split over ranks: norms of whole ones, or whole matrices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.nn.swap import parameters
from tutti.types import Replica, ShardSpec


def complete(optimizer: Optimizer, replica: Replica, comm: Communicator) -> None:
    """Give an optimizer what it asks for of split tensors: their norms (``norms``), or whole ones (``wholes``)."""
    specs = {p: replica.specs[name] for name, p in parameters(replica.parts)}
    split: dict[Tensor, ShardSpec] = {p: spec for p, spec in specs.items() if p.shape != spec.shape}
    if not _somewhere(bool(split), comm):
        return
    if getattr(optimizer, "norms", 0) is None:
        optimizer.norms = SplitNorms(optimizer, split.keys(), comm)  # type: ignore[attr-defined]
    if getattr(optimizer, "wholes", 0) is None:
        optimizer.wholes = SplitMatrices(split, comm)  # type: ignore[attr-defined]


def _somewhere(here: bool, comm: Communicator) -> bool:
    return any(int(flag) for flag in comm.all_gather(torch.tensor([int(here)]), "whether layers are split"))


class SplitNorms:
    """``types.Norms`` over the ranks that hold slices of one tensor; what they hold alike counts once."""

    def __init__(self, optimizer: Optimizer, split: Collection[Tensor], comm: Communicator) -> None:
        self._optimizer, self._split, self._comm = optimizer, set(split), comm

    def __call__(self, squares: Tensor) -> Tensor:
        used = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        table = squares.view(len(used), -1)
        if self._comm.rank:
            table[[i for i, p in enumerate(used) if p not in self._split]] = 0
        there = squares.to(self._comm.device)
        self._comm.start_all_reduce(there, "norms of split layers").wait()
        return there.to(squares.device)


class SplitMatrices:
    """``types.Wholes`` over the ranks that hold slices of one matrix."""

    def __init__(self, split: dict[Tensor, ShardSpec], comm: Communicator) -> None:
        self._split, self._comm = split, comm

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums of tensors that are zero but for this rank's slice: one all-reduce of whole tensors."""
        spec = self._split.get(parameter)
        if spec is None:
            return list(tensors)
        whole = tensors[0].new_zeros(len(tensors), *spec.shape)
        for target, tensor in zip(whole, tensors, strict=True):
            for block, region in zip(tensor.chunk(spec.blocks), _regions(spec, parameter), strict=True):
                target[region] = block
        self._comm.start_all_reduce(whole, "whole matrices").wait()
        return list(whole.unbind())

    def mine(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's slice of a whole tensor."""
        spec = self._split.get(parameter)
        return whole if spec is None else torch.cat([whole[region] for region in _regions(spec, parameter)])


def _regions(spec: ShardSpec, parameter: Tensor) -> list[tuple[slice, ...]]:
    return [
        tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
        for offset, shape in spec.regions(parameter.shape)
    ]
