"""A model's identity as one hash."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tutti.state.hashing import WeightsHash


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names in sorted order: name, dtype, shape, little-endian bytes.

    Two runs with equal hashes hold bit-identical parameters and persistent buffers.
    """
    digest = WeightsHash()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        digest.add(name, str(tensor.dtype).removeprefix("torch."), tensor.shape, data)
    return digest.hexdigest()
