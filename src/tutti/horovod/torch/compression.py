"""Compression of gradients for the wire, with Horovod's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Interface of a compression: ``compress`` before the all-reduce, ``decompress`` after it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return ``tensor`` in the form that is sent, and a context for ``decompress``. Implemented by subclasses."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return a reduced tensor in the dtype that it had before ``compress``. Implemented by subclasses.

        Args:
            tensor: the reduced tensor, in its compressed form.
            ctx: second result of ``compress``.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return ``tensor`` itself, uncompressed, and None as the context."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return ``tensor`` itself; ``ctx`` is ignored."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating point tensors in half precision."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Cast a floating-point tensor to float16; return it with its former dtype as the context.

        Other tensors are returned as they are.
        """
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Cast ``tensor`` back to the dtype ``ctx``, the second result of ``compress``."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressions that can be given as ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
