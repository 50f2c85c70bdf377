"""Map the checkpoint format's dtypes to PyTorch's and back."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.checkpoint import tensorfile

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, known) for name, (known, _) in tensorfile.DTYPES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_from_bytes(numbers: NDArray[Any], dtype: str) -> Tensor:
    """Return a CPU tensor with the bits of an array of unsigned integers, whose memory it shares.

    Args:
        numbers: unsigned integers as wide as an element of ``dtype``, in the tensor's shape.
        dtype: dtype of the tensor by safetensors' name, such as ``BF16``; a key of
            ``tutti.checkpoint.tensorfile.DTYPES``.
    """
    # NumPy gives an empty array strides of zero, and torch cannot view such a tensor as another dtype.
    if not numbers.size:
        return torch.empty(numbers.shape, dtype=DTYPES[dtype])
    return torch.from_numpy(numbers).view(DTYPES[dtype])
