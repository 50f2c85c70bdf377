"""Broadcast of many tensors in few messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator

_MESSAGE_BYTES = 64 << 20


def broadcast_tensors(comm: Communicator, tensors: Sequence[Tensor], name: str) -> None:
    """Broadcast the values of ``tensors`` from the first rank of ``comm`` to its other ranks, in place.

    Collective over the ranks of ``comm``: several broadcasts, each after a comparison of the ranks' calls; blocks until
    all tensors are there. Local with one rank.

    Tensors may be on several devices: FSDP2 moves parameters itself, later than buffers are moved. Consecutive tensors
    of equal dtype travel together; a message is closed as soon as it has 64 MiB.

    Args:
        comm: the ranks that take part.
        tensors: equal in number, shape and dtype on all ranks.
        name: names the call in both errors; equal on all ranks.

    Raises:
        MismatchError: numbers, shapes or dtypes of the tensors, or the names, differ between ranks.
        PeerError: a rank has ended, or did not make the call in time.
    """
    if comm.size == 1:
        return
    for dtype, same in groupby(tensors, key=lambda t: t.dtype):
        for message in _messages(list(same)):
            flat = torch.cat([t.reshape(-1).to(comm.device) for t in message])
            comm.broadcast(flat, 0, f"{name}, {dtype}")
            for tensor, part in zip(message, flat.split([t.numel() for t in message]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _messages(tensors: list[Tensor]) -> list[list[Tensor]]:
    messages: list[list[Tensor]] = []
    size = _MESSAGE_BYTES
    for tensor in tensors:
        if size >= _MESSAGE_BYTES:
            messages.append([])
            size = 0
        messages[-1].append(tensor)
        size += tensor.nbytes
    return messages
