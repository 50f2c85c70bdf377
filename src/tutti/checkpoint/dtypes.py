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
    """View an array as a tensor that shares its memory; ``dtype`` is a key of ``DTYPES``, as wide as the elements."""
    # NumPy gives an empty array strides of zero, and torch cannot view such a tensor as another dtype.
    if not numbers.size:
        return torch.empty(numbers.shape, dtype=DTYPES[dtype])
    return torch.from_numpy(numbers).view(DTYPES[dtype])
