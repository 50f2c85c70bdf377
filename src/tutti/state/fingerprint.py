"""A model's identity as one hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names in sorted order: name, dtype, shape, little-endian bytes.

    Two runs with equal hashes hold bit-identical parameters and persistent buffers.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
