"""All-gather of vectors whose lengths differ between ranks: one message for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator

_ALIGN = 16
"""Bytes; every vector begins at a multiple, as a view of any dtype must."""


def gather_uneven(
    comm: Communicator, vectors: Sequence[Tensor], lengths: Sequence[Sequence[int]], text: str
) -> list[list[Tensor]]:
    """All-gather several vectors, whose lengths differ between ranks, in one message padded to the longest.

    Collective over the ranks of ``comm``: one all-gather of bytes, none where no rank has an element; blocks.

    Args:
        comm: the ranks.
        vectors: this rank's 1-d tensors; the i-th has the same dtype on all ranks.
        lengths: for each rank the number of elements of each vector, equal on all ranks.
        text: names the call in PeerError and MismatchError; equal on all ranks.

    Returns:
        For each rank its vectors, which share one memory. With one rank copies of ``vectors``.

    Raises:
        MismatchError: the ranks wait in different calls.
        PeerError: a rank has ended, a connection broke, or the timeout has passed.
    """
    sizes = [vector.element_size() for vector in vectors]
    longest = max(sum(_aligned(n * size) for n, size in zip(row, sizes, strict=True)) for row in lengths)
    whole = torch.empty(comm.size * longest, dtype=torch.uint8, device=comm.device)
    parts = [whole[rank * longest : (rank + 1) * longest] for rank in range(comm.size)]
    for place, vector in zip(_split(parts[comm.rank], lengths[comm.rank], vectors), vectors, strict=True):
        place.copy_(vector)
    if longest:
        comm.gather_into(whole, parts[comm.rank], text)
    return [_split(part, row, vectors) for part, row in zip(parts, lengths, strict=True)]


def _split(flat: Tensor, lengths: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a rank's bytes, one for each vector."""
    found, start = [], 0
    for length, vector in zip(lengths, like, strict=True):
        size = length * vector.element_size()
        found.append(flat[start : start + size].view(vector.dtype))
        start += _aligned(size)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
