"""Before the first step: do all ranks hold the same model, and do they start from the same numbers?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.nn.swap import buffers, describe, parameters

_MESSAGE_BYTES = 64 << 20


def agree_on_state(comm: Communicator, parts: Sequence[nn.Module]) -> None:
    """Compare names, shapes, dtypes, order and trainability of parameters and buffers over the ranks.

    Raises MismatchError on every rank, with the first entry that differs.
    """
    comm.agree(describe(parts), "the model", "build the same model, in the same order and precision, on every rank")


def spread_state(comm: Communicator, parts: Sequence[nn.Module]) -> None:
    """Overwrite parameters and buffers by the first rank's: one broadcast for each run of equal dtype, up to 64 MiB."""
    if comm.size == 1:
        return
    tensors = [p.data for _, p in parameters(parts)] + [slot.get() for slot in buffers(parts)]
    for dtype, same in groupby(tensors, key=lambda t: t.dtype):
        for message in _messages(list(same)):
            flat = torch.cat([t.reshape(-1) for t in message])
            comm.broadcast(flat, 0, f"initial state, {dtype}")
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
