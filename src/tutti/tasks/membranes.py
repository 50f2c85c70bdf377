"""Segmentation of membranes in electron-microscopy images (ISBI 2012), or of any grey images with binary masks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tutti.config.task_config import UnetConfig
from tutti.data.masks import MaskSource, find_masks, read_masks
from tutti.errors import DataError
from tutti.tasks.losses import per_sample
from tutti.tasks.task import Task
from tutti.tasks.unet import unet


def membranes_task(config: UnetConfig, data: str, augment: bool) -> Task:
    """Build the task of binary segmentation of grey images by a U-Net.

    A batch is a dict of ``image`` (float32, grey levels scaled to [-2, 2]) and ``mask`` (uint8, 0 or 1), both (samples,
    1, height, width); the loss is the pixels' binary cross-entropy (``mask_pixels``).

    Args:
        config: options of the U-Net: ``depth`` (downsampling scales), ``width`` (channels of the first scale) and
            ``batch_norm``.
        data: a folder with ``train/image`` and ``train/label``, and the same in ``test/``; without ``test/`` the last
            five images of ``train/`` are held out.
        augment: whether to rotate and mirror the training images together with their masks.

    Returns:
        A ``Task`` with the attributes ``model`` (a function without arguments that returns a new model), ``loss`` (the
        loss function), ``train`` (training samples) and ``eval`` (held-out samples).

    Raises:
        DataError: data are missing, an image is broken, masks are missing, of another size or not binary, or the size
            cannot be halved ``config.depth`` times.
    """
    train, held_out = map(read_masks, find_masks(data))
    height, width = train.shape[2:]
    multiple = 2**config.depth
    if held_out.shape[2:] != train.shape[2:]:
        raise DataError(
            f"held-out images are {held_out.shape[3]}×{held_out.shape[2]} and those for training {width}×{height}",
            where=data,
            remedy="crop all to one size",
        )
    if height % multiple or width % multiple:
        raise DataError(
            f"images of {width}×{height} pixels cannot be halved {config.depth} times",
            where=data,
            remedy=f"crop them to multiples of {multiple}, or take a smaller depth: --model unet:depth=…",
        )
    return Task(
        name="membranes",
        model=partial(unet, config),
        loss=mask_pixels,
        train=MaskSource(train, augment=augment),
        eval=MaskSource(held_out),
        images=True,
        describe=f"{len(train):,} + {len(held_out):,} grey images {width}×{height} with masks",
    )


def mask_pixels(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Compute the binary cross-entropy of the pixels, their accuracy and the Dice overlap of the masks.

    Args:
        model: maps images to logits of the same shape.
        batch: a dict with ``image`` (samples, 1, height, width), and ``mask`` of the same shape, 0 or 1.

    Returns:
        A tuple of the losses (samples,), -log p(mask) summed over each image; the number of pixels, by which sums are
        divided; and a dict of metric sums: ``accuracy``, the number of correct pixels, and ``dice``, the sum over
        images of 2·|A∩B| / (|A| + |B|) times the image's pixels, where the overlap of two empty masks is 1.
    """
    scores, mask = model(batch["image"]), batch["mask"]
    values = functional.binary_cross_entropy_with_logits(scores, mask.to(scores.dtype), reduction="none")
    found, true = (scores.detach() > 0).flatten(1), mask.flatten(1).bool()
    both, either = (found & true).sum(1), found.sum(1) + true.sum(1)
    overlap = ((2 * both + (either == 0)) / either.clamp(min=1)).sum()
    return per_sample(values), mask.numel(), {"accuracy": (found == true).sum(), "dice": overlap * mask[0].numel()}
