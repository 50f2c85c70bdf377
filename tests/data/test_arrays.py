"""Arrays as a source: normalisation, and augmentation that depends on the sample and never on its position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tutti.data.arrays import ArraySource, CropFlip
from tutti.data.keyed_random import hash64
from tutti.data.source import AugmentKey, Source
from tutti.errors import DataError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)


def pictures(count: int = 150) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (count, 3, 6, 6), dtype=np.uint8)


def test_fetch_normalises_in_the_order_asked() -> None:
    images, labels = pictures(), np.arange(150)
    source = ArraySource(images, labels, mean=MEAN, std=STD)
    indices = np.random.default_rng(1).permutation(150)
    inputs, targets = source.fetch(indices, None)
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (MEAN, STD))
    np.testing.assert_allclose(inputs.numpy(), (images[indices] / 255 - mean) / std, atol=2e-6)
    assert inputs.dtype == torch.float32 and inputs.is_contiguous() and targets.tolist() == indices.tolist()
    assert isinstance(source, Source) and len(source) == 150


def test_plain_arrays_are_fetched_as_they_are() -> None:
    x = np.linspace(0, 1, 5)[:, None]
    inputs, targets = ArraySource(x, 2 * x).fetch(np.array([4, 0]), AugmentKey(0, 0))
    assert inputs.dtype == torch.float64 and inputs.tolist() == [[1.0], [0.0]] and targets.tolist() == [[2.0], [0.0]]


def test_a_fetched_batch_is_a_copy() -> None:
    images = pictures(3)
    before = images.copy()
    inputs, _ = ArraySource(images, np.arange(3)).fetch(np.arange(3), None)
    inputs.zero_()
    assert (images == before).all()


def test_mapped_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", pictures())
    source = ArraySource(np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(150), augment=CropFlip())
    assert type(source.inputs) is np.ndarray
    assert (source.fetch(np.array([7]), None)[0].numpy() == pictures()[[7]]).all()


def test_augmentation_depends_on_seed_epoch_and_sample_only() -> None:
    source = ArraySource(pictures(), np.arange(150), augment=CropFlip(pad=2))
    indices = np.arange(150)
    whole, _ = source.fetch(indices, AugmentKey(3, 1))
    shuffled = np.random.default_rng(2).permutation(150)
    assert (source.fetch(shuffled, AugmentKey(3, 1))[0] == whole[shuffled]).all()
    assert (source.fetch(np.array([149]), AugmentKey(3, 1))[0] == whole[149:]).all()
    for other in (AugmentKey(4, 1), AugmentKey(3, 2), None):
        assert (source.fetch(indices, other)[0] != whole).any()


def test_crop_and_flip_against_one_image_at_a_time() -> None:
    images, pad = pictures(400), 2
    out = CropFlip(pad)(images, hash64(np.arange(400)))
    seen = set()
    for image, got in zip(images, out, strict=True):
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
        places = {
            (y, x, flip)
            for y in range(5)
            for x in range(5)
            for flip in (1, -1)
            if (padded[:, y : y + 6, x : x + 6][..., ::flip] == got).all()
        }
        assert len(places) == 1
        seen |= places
    assert len(seen) == 50, "every shift and both directions occur"


def test_no_augmentation_pads_nothing() -> None:
    images = pictures(64)
    out = CropFlip(pad=0)(images, hash64(np.arange(64)))
    flipped = (out == images[..., ::-1]).all(axis=(1, 2, 3))
    assert ((out == images).all(axis=(1, 2, 3)) | flipped).all() and 0 < flipped.sum() < 64


def test_refusals() -> None:
    with pytest.raises(DataError, match="3 inputs and 2 targets"):
        ArraySource(np.zeros(3), np.zeros(2))
    with pytest.raises(DataError, match="no samples"):
        ArraySource(np.zeros((0, 2)), np.zeros(0))
