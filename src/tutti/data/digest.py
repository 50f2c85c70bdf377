"""Digest a sample, to compare the samples that ranks have read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor


def digest(sample: Any) -> str:
    """Return a 64-bit digest of a sample's structure, types and values, as 16 hexadecimal digits.

    Objects other than dense tensors, arrays of numbers, numbers, strings, bytes, None, and tuples, lists and mappings
    of them count by the name of their type alone. Tensors of an accelerator are copied to the CPU, which blocks.

    Args:
        sample: a sample of a data set.

    >>> digest({"x": 1, "y": [2.0, "three"]}) == digest({"x": 1, "y": [2.0, "three"]})
    True
    >>> len({digest(1), digest(1.0), digest("1"), digest([1]), digest((1,)), digest(b"1"), digest(None)})
    7
    >>> digest(torch.eye(2).to_sparse()) == digest(torch.eye(3).to_sparse()) != digest(1)
    True
    """
    state = hashlib.blake2b(digest_size=8)
    _add(state, sample)
    return state.hexdigest()


def _add(state: Any, value: Any) -> None:
    state.update(f"{type(value).__name__} ".encode())
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
        value = value.detach().cpu().contiguous()
        state.update(f"{value.dtype}{list(value.shape)}".encode())
        state.update(memoryview(value.flatten().view(torch.uint8).numpy()))
    elif isinstance(value, np.ndarray) and value.dtype != object:
        state.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(state, key)
            _add(state, item)
    elif isinstance(value, tuple | list):
        state.update(f"{len(value)} ".encode())
        for item in value:
            _add(state, item)
    elif isinstance(value, str | bytes | bool | int | float | complex | np.generic | NoneType):
        text = value if isinstance(value, bytes) else repr(value).encode()
        state.update(f"{len(text)} ".encode() + text)
