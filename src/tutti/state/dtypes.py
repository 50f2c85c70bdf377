"""The format's dtypes as PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.state import tensorfile

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, known) for name, (known, _) in tensorfile.DTYPES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_tensor(numbers: NDArray[Any], dtype: str) -> Tensor:
    """A tensor of these very bytes, which it shares; ``dtype`` is a key of ``DTYPES``, as wide as the numbers."""
    # Of no elements NumPy's strides come out as zeros, with which torch cannot view it as another dtype.
    if not numbers.size:
        return torch.empty(numbers.shape, dtype=DTYPES[dtype])
    return torch.from_numpy(numbers).view(DTYPES[dtype])
