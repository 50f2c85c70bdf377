"""Compression of gradients for the wire, with Horovod's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Interface of a compression of gradients: ``compress`` before the all-reduce, ``decompress`` after it.

    As in Horovod; a subclass implements both static methods.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return a gradient in the form in which it is all-reduced, and a context that ``decompress`` needs.

        Called before each all-reduce of a gradient. Implemented by subclasses; raises NotImplementedError here.

        Args:
            tensor: the gradient.

        Returns:
            Pair of a tensor of any dtype, which is all-reduced in place of the gradient, and a context of any type,
            such as the gradient's dtype.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return a reduced tensor in the dtype that it had before ``compress``.

        Implemented by subclasses; raises NotImplementedError here.

        Args:
            tensor: the reduced tensor, in its compressed form.
            ctx: context that ``compress`` returned.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Compression of gradients that leaves tensors as they are: Horovod's ``Compression.none``."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return (``tensor``, None): the gradient itself, uncompressed, and the context for ``decompress``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the reduced gradient ``tensor`` itself, because it was not compressed.

        Args:
            tensor: the reduced gradient.
            ctx: context that ``compress`` returned, which is None; not used.
        """
        return tensor


class FP16Compressor(Compressor):
    """Compression of gradients that all-reduces floating-point tensors in float16: Horovod's ``Compression.fp16``."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return (``tensor`` in float16, its former dtype); a tensor that is not floating-point keeps its dtype.

        The dtype is the context for ``decompress``.
        """
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return ``tensor`` cast back to its dtype before ``compress``; tensors that are not floating-point unchanged.

        Args:
            tensor: the reduced tensor, in float16 if the gradient was a floating-point tensor.
            ctx: dtype before ``compress``, which returned it as the context.
        """
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """Horovod's compressions of gradients, for the argument ``compression`` of ``DistributedOptimizer``.

    ``none`` leaves gradients as they are; ``fp16`` all-reduces them in float16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
