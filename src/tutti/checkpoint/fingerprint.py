"""Hash a model's tensors with SHA-256, and digest single tensors on their device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from tutti.checkpoint.weights import WeightsHash

_ALL = 4
"""Occasions up to this number are all compared, later ones if their number is a power of two (a guess): a script that
clamps its weights after every update reads them once more for each comparison."""
_WORDS = 1 << 15
_SMALL, _TOGETHER = 1 << 13, 32
"""Bytes of the largest tensor whose digest is computed together with those of others, and the most such tensors."""
# SplitMix64, as in ``tutti.comm.random_keys.mix``; signed, because PyTorch computes with no unsigned 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256, in hexadecimal, over tensors in sorted order of names: name, dtype, shape, little-endian bytes.

    Two runs with equal hashes hold bit-identical parameters and persistent buffers.

    Args:
        tensors: whole tensors by name, on any device.
    """
    return pairs_sha256((name, tensors[name]) for name in sorted(tensors))


def pairs_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of ``weights_sha256``, in hexadecimal, over tensors that are made one after the other.

    Args:
        tensors: pairs (name, whole tensor, on any device) in sorted order of the names; none is kept.
    """
    digest = WeightsHash()
    for name, whole in tensors:
        tensor = whole.detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        digest.add(name, str(tensor.dtype).removeprefix("torch."), tensor.shape, data)
    return digest.hexdigest()


def tensor_digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of a tensor's bytes in C order, as a 0-d int64 tensor on its device, without a host sync.

    The digest is the sum of all 64-bit words, each mixed with its index. Equal bytes have equal digests on every
    device; other bytes have the same digest with a chance of 1 in 2⁶⁴. The digest of an empty tensor is 0. Protects
    against accidents, not against malice.

    Args:
        tensor: a dense tensor of any dtype and shape, on any device; not changed.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    data = _bytes_of(tensor)
    whole = len(data) // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()
    words = [data[:whole].view(torch.int64)] if whole else []
    if whole < len(data):
        words.append(torch.cat([data[whole:], data.new_zeros(8 - len(data) + whole)]).view(torch.int64))
    # Blocks that stay in a CPU's cache; an accelerator gets larger blocks, which means fewer kernel launches.
    most = min(-(-len(data) // 8), _WORDS if tensor.device.type == "cpu" else _WORDS << 9)
    places = torch.arange(1, most + 1, device=tensor.device) * _GOLDEN
    begin = 0
    for piece in (piece for run in words for piece in run.split(most)):
        start = (begin * _GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63)
        total += _mixed(piece + places[: len(piece)] + start).sum()
        begin += len(piece)
    return total


def tensor_digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return ``tensor_digest`` of each tensor as a Python int, with one synchronisation of host and device for all.

    CPU tensors of at most 8 KiB are hashed in groups of up to 32, because each one alone takes some twenty small
    operations; the digests are the same.

    Args:
        tensors: tensors of any dtypes and shapes, on any devices.

    Returns:
        A signed 64-bit integer for each tensor, in their order; an empty list without tensors.
    """
    every = list(tensors)
    small = [i for i, each in enumerate(every) if each.nbytes <= _SMALL and each.device.type == "cpu"]
    chosen = set(small)
    found: list[Tensor | None] = [None if i in chosen else tensor_digest(each) for i, each in enumerate(every)]
    for first in range(0, len(small), _TOGETHER):
        places = small[first : first + _TOGETHER]
        for i, digest in zip(places, _digests_together([every[i] for i in places]), strict=True):
            found[i] = digest
    device = every[0].device if every else None
    digests: list[int] = torch.stack([each.to(device) for each in cast(list[Tensor], found)]).tolist() if found else []
    return digests


def _digests_together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ``tensor_digest`` of each of several small tensors, from one array with the words of all."""
    device = tensors[0].device
    padding = torch.zeros(8, dtype=torch.uint8, device=device)
    pieces, ends = [], [0]
    for tensor in tensors:
        data = _bytes_of(tensor)
        pieces += [data, padding[: -len(data) % 8]]
        ends.append(ends[-1] - -len(data) // 8)
    words = torch.cat(pieces).view(torch.int64)
    bounds = torch.tensor(ends, device=device)
    starts = bounds[:-1].repeat_interleave(bounds.diff(), output_size=len(words))
    places = torch.arange(1, len(words) + 1, device=device) - starts
    sums = torch.cat([bounds.new_zeros(1), _mixed(words + places * _GOLDEN).cumsum(0)])
    return (sums[bounds[1:]] - sums[bounds[:-1]]).unbind()


def is_compared(count: int) -> bool:
    """Return whether a check for changed parameters also hashes all values: checks 1 to 4, and then 8, 16, 32, …

    The checks find parameters that a user's script has written between tutti's updates. A hash reads every parameter,
    which would take too long at every check; the other checks compare norms or version counters alone.

    Args:
        count: number of the check in the run, from 1.

    >>> [count for count in range(1, 40) if is_compared(count)]
    [1, 2, 3, 4, 8, 16, 32]
    """
    return count <= _ALL or not count & (count - 1)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in C order, (bytes,) uint8."""
    # A tensor of one element is contiguous whatever its stride.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _mixed(words: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to every word in place, and return the words."""
    for shift, factor in _ROUNDS:
        words ^= (words >> shift) & ((1 << 64 - shift) - 1)
        words *= factor
    words ^= (words >> 31) & ((1 << 33) - 1)
    return words
