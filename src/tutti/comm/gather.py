"""Named tensors of several ranks as one set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.laws.shares import block
from tutti.types import ShardSpec


class Gathered(Mapping[str, Tensor], ABC):
    """The tensors of a model that is spread over ranks, each whole when it is asked for, tied ones under all names.

    Collective: all ranks ask in one order.

    Args:
        tied: the other names of each tensor, by its first.
    """

    def __init__(self, tied: Mapping[str, Sequence[str]]) -> None:
        self._tied = tied
        self._owners = {other: name for name, others in tied.items() for other in (name, *others)}

    @abstractmethod
    def _whole(self, name: str) -> Tensor:
        """The tensor of this first name."""

    def all(self) -> dict[str, Tensor]:
        """All of them, each gathered once."""
        found: dict[str, Tensor] = {}
        for name, others in self._tied.items():
            found |= dict.fromkeys((name, *others), self._whole(name))
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self._whole(self._owners[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


class _Part(NamedTuple):
    """What one rank has of a tensor."""

    source: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    spec: ShardSpec


class GatheredParts(Gathered):
    """Tensors of which each of the ranks that hold one model holds some, or parts.

    A broadcast of a tensor from each rank that has a part of it, but for those in ``borrowed``.

    Args:
        local: what is here, by name.
        specs: where it sits.
        borrowed: names of what another rank accounts for.
        comm: the ranks that hold one model together.
    """

    def __init__(
        self, local: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], borrowed: Collection[str], comm: Communicator
    ) -> None:
        self._local, self._comm = local, comm
        self._parts: dict[str, list[_Part]] = {}
        own = [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape), *_place(specs[name])]
            for name, t in local.items()
            if name not in borrowed
        ]
        for source in range(comm.size):
            for name, dtype, part, shape, offset, tied, blocks, rows in comm.broadcast_json(
                own, source, "names of the state"
            ):
                spec = ShardSpec(tuple(shape), tuple(offset), tuple(tied), blocks, rows and tuple(rows))
                self._parts.setdefault(name, []).append(_Part(source, getattr(torch, dtype), tuple(part), spec))
        super().__init__({name: parts[0].spec.tied for name, parts in self._parts.items()})

    def _whole(self, name: str) -> Tensor:
        comm = self._comm
        if comm.size == 1:
            return self._local[name]
        whole: Tensor | None = None
        for source, dtype, shape, spec in self._parts[name]:
            if 0 in shape and 0 not in spec.shape:
                continue  # fewer rows than ranks
            tensor = torch.empty(shape, dtype=dtype, device=comm.device)
            if comm.rank == source:
                tensor.copy_(self._local[name])
            comm.broadcast(tensor, source, f"state '{name}'")
            whole = tensor if shape == spec.shape else _put(whole, tensor, spec)
        if whole is None:
            raise KeyError(name)
        return whole


def _place(spec: ShardSpec) -> tuple[object, ...]:
    return list(spec.shape), list(spec.offset), list(spec.tied), spec.blocks, spec.rows


def _put(whole: Tensor | None, part: Tensor, spec: ShardSpec) -> Tensor:
    """The whole tensor with this part of it filled in."""
    if whole is None:
        whole = part.new_empty(spec.shape)
    regions = spec.regions(part.shape)
    for piece, (offset, shape) in zip(part.split([shape[0] for _, shape in regions]), regions, strict=True):
        region = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
        whole[region] = piece
    return whole


def gather_rows(
    rows: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], comm: Communicator
) -> dict[str, Tensor]:
    """Whole tensors from each rank's block of rows (``tutti.laws.shares.block``). One all-gather a tensor."""
    whole = {}
    for name, mine in rows.items():
        count, rest = shapes[name][0], tuple(shapes[name][1:])
        padded = mine.new_zeros(len(block(count, comm.size, 0)), *rest)
        padded[: len(mine)] = mine
        whole[name] = torch.cat(comm.all_gather(padded, f"rows of '{name}'"))[:count]
    return whole


class GatheredRows(Gathered):
    """Tensors of which some are rows here. An all-gather of each of those.

    Args:
        local: whole tensors and rows.
        cut: names of the rows.
        specs: shapes and tied names of all.
        comm: the ranks that share one copy.
    """

    def __init__(
        self, local: Mapping[str, Tensor], cut: Collection[str], specs: Mapping[str, ShardSpec], comm: Communicator
    ) -> None:
        super().__init__({name: specs[name].tied for name in local})
        self._local, self._cut, self._specs, self._comm = local, cut, specs, comm

    def _whole(self, name: str) -> Tensor:
        tensor = self._local[name]
        if name not in self._cut:
            return tensor
        return gather_rows({name: tensor}, {name: self._specs[name].shape}, self._comm)[name]
