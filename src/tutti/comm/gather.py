"""Named tensors of several ranks as one set."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.laws.shares import block
from tutti.types import ShardSpec


def gather_named(
    local: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], borrowed: Collection[str], comm: Communicator
) -> dict[str, Tensor]:
    """The whole model's tensors, tied ones under all their names, from what each rank of one replica holds of them.

    One broadcast for each tensor of each rank, but for those in ``borrowed``.
    """
    whole: dict[str, Tensor] = {}
    for source in range(comm.size):
        entries = [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape), *_place(specs[name])]
            for name, t in local.items()
            if name not in borrowed
        ]
        for name, dtype, part, shape, offset, blocks, tied in comm.broadcast_json(
            entries, source, "names of the state"
        ):
            spec = ShardSpec(tuple(shape), tuple(offset), tuple(tied), blocks)
            if comm.size == 1:
                tensor = local[name]
            else:
                tensor = torch.empty(part, dtype=getattr(torch, dtype), device=comm.device)
                if comm.rank == source:
                    tensor.copy_(local[name])
                comm.broadcast(tensor, source, f"state '{name}'")
            if tensor.shape != spec.shape:
                tensor = _put(whole.get(name), tensor, spec)
            whole |= dict.fromkeys((name, *spec.tied), tensor)
    return whole


def _place(spec: ShardSpec) -> tuple[object, ...]:
    return list(spec.shape), list(spec.offset), spec.blocks, list(spec.tied)


def _put(whole: Tensor | None, part: Tensor, spec: ShardSpec) -> Tensor:
    """The whole tensor with this part of it filled in."""
    if whole is None:
        whole = part.new_empty(spec.shape)
    for piece, (offset, shape) in zip(part.chunk(spec.blocks), spec.regions(part.shape), strict=True):
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


class GatheredRows(Mapping[str, Tensor]):
    """Tensors of which some are rows here, each whole when it is asked for. Collective: all ranks ask in one order.

    Args:
        local: whole tensors and rows.
        cut: names of the rows.
        specs: shapes and tied names of all.
        comm: the ranks that share one copy.
    """

    def __init__(
        self, local: Mapping[str, Tensor], cut: Collection[str], specs: Mapping[str, ShardSpec], comm: Communicator
    ) -> None:
        self._local, self._cut, self._specs, self._comm = local, cut, specs, comm
        self._owners = {other: name for name in local for other in (name, *specs[name].tied)}

    def __getitem__(self, name: str) -> Tensor:
        owner = self._owners[name]
        tensor = self._local[owner]
        if owner not in self._cut:
            return tensor
        return gather_rows({owner: tensor}, {owner: self._specs[owner].shape}, self._comm)[owner]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)
