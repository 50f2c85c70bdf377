"""Named tensors of several ranks as one set."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
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
    for block, (offset, shape) in zip(part.chunk(spec.blocks), spec.regions(part.shape), strict=True):
        region = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
        whole[region] = block
    return whole
