"""Compute ``weights_sha256`` incrementally, tensor by tensor. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any


class WeightsHash:
    """Computes the SHA-256 of a model's tensors incrementally: name, dtype, shape and little-endian bytes of each.

    Equal models have equal hashes, whatever the strategy or file that the tensors come from.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, dtype: str, shape: Sequence[int], data: Any) -> None:
        """Add a model's next tensor to the hash; the caller adds tensors in sorted order of their names.

        Args:
            name: the tensor's name in the model's state dict.
            dtype: PyTorch's name, such as ``float32``.
            shape: shape of the whole tensor.
            data: its bytes in C order, as a contiguous buffer.
        """
        self._digest.update(f"{name}\0{dtype}\0{list(shape)}\0".encode())
        self._digest.update(data)

    def hexdigest(self) -> str:
        """Return the SHA-256 of the model's tensors that were added so far, as 64 hexadecimal digits."""
        return self._digest.hexdigest()
