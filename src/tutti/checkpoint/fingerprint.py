"""Hash a model's tensors with SHA-256, and digest single tensors on their device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tutti.checkpoint.weights_hash import WeightsHash

_ALL = 4
"""Occasions up to this number are all compared, later ones if their number is a power of two (a guess): a script that
clamps its weights after every update reads them once more for each comparison."""
_WORDS = 1 << 16
# SplitMix64, as in ``tutti.comm.random_keys.mix``; signed, because PyTorch computes with no unsigned 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256, in hexadecimal, over tensors in sorted order of names: name, dtype, shape, little-endian bytes.

    Two runs with equal hashes hold bit-identical parameters and persistent buffers.

    Args:
        tensors: whole tensors by name, on any device.
    """
    digest = WeightsHash()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        digest.add(name, str(tensor.dtype).removeprefix("torch."), tensor.shape, data)
    return digest.hexdigest()


def tensor_digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of a tensor's bytes in C order, as a 0-d int64 tensor on its device, without a host sync.

    The digest is the sum of all 64-bit words, each mixed with its index. Equal bytes have equal digests on every
    device; other bytes have the same digest with a chance of 1 in 2⁶⁴. Protects against accidents, not against malice.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    # A tensor of one element is contiguous whatever its stride.
    data = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    whole = len(data) // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()
    words = [data[:whole].view(torch.int64)] if whole else []
    if whole < len(data):
        words.append(torch.cat([data[whole:], data.new_zeros(8 - len(data) + whole)]).view(torch.int64))
    # Blocks that stay in a CPU's cache; an accelerator gets larger blocks, which means fewer kernel launches.
    most = min(-(-len(data) // 8), _WORDS if tensor.device.type == "cpu" else _WORDS << 8)
    places = torch.arange(1, most + 1, device=tensor.device) * _GOLDEN
    begin = 0
    for piece in (piece for run in words for piece in run.split(most)):
        start = (begin * _GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63)
        total += _mixed(piece + places[: len(piece)] + start).sum()
        begin += len(piece)
    return total


def tensor_digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return ``tensor_digest`` of each tensor as a Python int, with one synchronisation of host and device for all.

    Args:
        tensors: tensors of one device, of any dtypes and shapes.
    """
    found = [tensor_digest(tensor) for tensor in tensors]
    digests: list[int] = torch.stack(found).tolist() if found else []
    return digests


def is_compared(count: int) -> bool:
    """Return whether the values of parameters are compared at the ``count``-th occasion: the first four, then 8, 16, …

    A digest reads every parameter, so that one at every occasion would take too long.

    Args:
        count: number of the occasion, from 1.

    >>> [count for count in range(1, 40) if is_compared(count)]
    [1, 2, 3, 4, 8, 16, 32]
    """
    return count <= _ALL or not count & (count - 1)


def _mixed(words: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to every word in place, and return the words."""
    for shift, factor in _ROUNDS:
        words ^= (words >> shift) & ((1 << 64 - shift) - 1)
        words *= factor
    words ^= (words >> 31) & ((1 << 33) - 1)
    return words
