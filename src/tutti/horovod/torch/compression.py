"""Compression of gradients for the wire, with Horovod's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Interface of a compression: ``compress`` before the all-reduce, ``decompress`` after it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the compressed tensor, and what ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its former dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return ``tensor``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return ``tensor``."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating point tensors in half precision."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor in float16 if it is floating point, and its dtype."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in the dtype ``ctx``."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressions that can be given as ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
