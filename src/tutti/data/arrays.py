"""Fetch samples from arrays, in memory or mapped from a file, with normalisation and augmentation at fetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.data.keyed_random import hash64
from tutti.data.source import AugmentKey
from tutti.errors import DataError, counted

Augmentation: TypeAlias = Callable[[NDArray[Any], NDArray[np.uint64]], NDArray[Any]]
"""``augmentation(inputs, bits)`` returns an augmented copy of a batch; ``bits``: 64 random bits for each sample."""

# Sample order is drawn from (seed, epoch, …) too; an RNG stream of its own keeps crops independent of the order.
_STREAM = int.from_bytes(b"augment", "big")
_BLOCK = 64


@dataclass(frozen=True)
class CropFlip:
    """Augmentation that shifts images by up to ``pad`` pixels with black borders, and mirrors half of them at random.

    A callable: ``augmentation(images, bits)`` takes images (samples, channels, height, width) and one uint64 of random
    bits for each, and returns new images of the same shape and dtype. It is the standard augmentation of CIFAR (He et
    al. 2015, arXiv:1512.03385, §4.2): pad by 4, crop back, flip.

    Attributes:
        pad: largest shift in pixels, in each direction.
    """

    pad: int = 4

    def __call__(self, images: NDArray[Any], bits: NDArray[np.uint64]) -> NDArray[Any]:
        """Shift each image by up to ``pad`` pixels with black borders, and mirror it with probability 1/2.

        Args:
            images: (samples, channels, height, width).
            bits: uint64 (samples,), 64 random bits for each image, which decide on shift and mirroring.

        Returns:
            The augmented images, a new array of the same shape and dtype.
        """
        samples, channels, height, width = images.shape
        pad, places = self.pad, np.uint64(2 * self.pad + 1)
        padded = np.zeros((samples, channels, height + 2 * pad, width + 2 * pad), dtype=images.dtype)
        padded[:, :, pad : pad + height, pad : pad + width] = images
        low24 = np.uint64(0xFFFFFF)
        top = ((bits & low24) * places) >> np.uint64(24)
        left = (((bits >> np.uint64(24)) & low24) * places) >> np.uint64(24)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        cropped = windows[np.arange(samples), :, top.astype(np.intp), left.astype(np.intp)]
        mirrored = (bits >> np.uint64(63)).astype(bool)
        cropped[mirrored] = cropped[mirrored][..., ::-1]
        return cropped


class ArraySource:
    """Map-style data set of pairs (inputs, targets) in two arrays; a ``tutti.data.Source``.

    The arrays are kept, not copied; each fetch copies its samples.

    Args:
        inputs: (samples, …); uint8 images are (samples, channels, height, width).
        targets: (samples, …).
        mean, std: one number for each channel (the inputs' second dimension), in units of the inputs' scale: 255 for
            uint8, 1 for all other dtypes. The fetched inputs are (inputs / scale - mean) / std in float32; without
            either of the two, inputs are fetched as they are.
        augment: applied to the raw inputs of every fetch that has an ``AugmentKey``.

    Raises:
        DataError: no samples, or not as many targets as inputs.
    """

    def __init__(
        self,
        inputs: NDArray[Any],
        targets: NDArray[Any],
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        augment: Augmentation | None = None,
    ) -> None:
        if len(inputs) != len(targets):
            raise DataError(
                f"the data have {counted(len(inputs), 'input')} and {counted(len(targets), 'target')}",
                remedy="give one of each",
            )
        if not len(inputs):
            raise DataError("there are no samples", remedy="give at least one")
        # np.asarray drops the subclass np.memmap, whose bookkeeping costs time on every fetch, and keeps its pages.
        self.inputs, self.targets, self.augment = np.asarray(inputs), np.asarray(targets), augment
        self._line: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
        if mean is not None and std is not None:
            scale = 255.0 if self.inputs.dtype == np.uint8 else 1.0
            shape = (len(mean), *(1,) * (self.inputs.ndim - 2))
            centre, spread = (np.asarray(values, dtype=np.float64).reshape(shape) for values in (mean, std))
            self._line = (1 / (scale * spread)).astype(np.float32), (-centre / spread).astype(np.float32)

    def __len__(self) -> int:
        """Return the number of samples in the arrays."""
        return len(self.inputs)

    def fetch(self, indices: NDArray[np.int64], augment: AugmentKey | None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples ``indices``, in that order, as new contiguous tensors on the CPU.

        Args:
            indices: int64 (samples,), numbers of the samples in the data set.
            augment: key of the random augmentation, which depends on (augment.seed, augment.epoch, index) alone; None
                for evaluation, without augmentation.

        Returns:
            (inputs, targets), with the samples as first dimension and otherwise the shapes of the arrays; inputs are
            float32 if a mean and deviation of the channels were given, else of the array's dtype.
        """
        picked = self.inputs[indices]
        if augment is not None and self.augment is not None:
            picked = self.augment(picked, hash64(_STREAM, augment.seed, augment.epoch, np.asarray(indices)))
        inputs = np.ascontiguousarray(picked) if self._line is None else _affine(picked, *self._line)
        return torch.from_numpy(inputs), torch.from_numpy(self.targets[indices])


def _affine(raw: NDArray[Any], factor: NDArray[np.float32], shift: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return raw · factor + shift in float32.

    Computes with NumPy, in blocks that stay in the cache: torch's threads would compete with those of training.
    """
    out = np.empty(raw.shape, dtype=np.float32)
    for start in range(0, len(raw), _BLOCK):
        block = out[start : start + _BLOCK]
        block[...] = raw[start : start + _BLOCK]
        block *= factor
        block += shift
    return out
