"""Named tensors of several ranks as one set."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator


def gather_named(local: Mapping[str, Tensor], comm: Communicator) -> dict[str, Tensor]:
    """The whole model's tensors from those of each rank of one replica, in its order. One broadcast a tensor."""
    if comm.size == 1:
        return dict(local)
    whole: dict[str, Tensor] = {}
    for source in range(comm.size):
        entries = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in local.items()]
        for name, dtype, shape in comm.broadcast_json(entries, source, "names of the state"):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=comm.device)
            if comm.rank == source:
                tensor.copy_(local[name])
            comm.broadcast(tensor, source, f"state '{name}'")
            whole[name] = tensor
    return whole
