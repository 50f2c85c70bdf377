"""Read grey images with binary masks from folders of files: ``train/image/NN.png`` and ``train/label/NN.png``.

Only files inside the given folder and with an image's extension are opened. Pillow is imported on first use, torch on
the first fetch.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tutti.data.cache import cached
from tutti.data.decoding import SUFFIXES, check_pillow, resolved_folder
from tutti.data.keyed_random import hash64
from tutti.data.source import AugmentKey
from tutti.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

HELD_OUT = 5
"""Images, the last ones by name, that are held out for evaluation."""
_STREAM = int.from_bytes(b"dihedral", "big")
_CACHE_VERSION = 1
# Pillow would otherwise try formats that start other programs, such as EPS.
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_DEEP = ("I", "F")
_LAYOUT = "the folder should hold train/image/NN.png and train/label/NN.png"

Pairs: TypeAlias = NDArray[np.uint8]
"""Images beside their masks: (samples, 2, height, width), grey levels in channel 0, 0 or 1 in channel 1."""


@dataclass(frozen=True)
class Pair:
    """The paths of an image file and of the file of its mask, which have the same name in two folders.

    Attributes:
        image: path of the image.
        mask: path of the mask.
    """

    image: Path
    mask: Path


class MaskSource:
    """Map-style data set of grey images with binary masks, for segmentation; a ``tutti.data.Source``.

    Args:
        pairs: uint8 (samples, 2, height, width): grey levels in channel 0, the mask (0 or 1) in channel 1, as
            ``read_masks`` returns it. Kept, not copied, and never changed: a fetch copies its samples.
        augment: whether to flip and transpose each image with its mask by one of the eight symmetries of the square
            (four for other rectangles), drawn for each sample and epoch.
    """

    def __init__(self, pairs: Pairs, *, augment: bool = False) -> None:
        self._pairs, self._augment = pairs, augment

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._pairs)

    def fetch(self, indices: NDArray[np.int64], augment: AugmentKey | None) -> dict[str, Tensor]:
        """Return a dict of images and masks of the samples ``indices``, in that order, on the CPU.

        Args:
            indices: int64 (samples,), indices of the samples in the data set.
            augment: key of the random augmentation, which depends on (augment.seed, augment.epoch, index) alone; None
                for evaluation, without augmentation.

        Returns:
            ``image``: float32 in [-2, 2], (grey level - 127.5) / 63.75, and ``mask``: uint8, 0 or 1; both (samples, 1,
            height, width).
        """
        import torch

        picked = self._pairs[indices]
        if augment is not None and self._augment:
            flip_pairs(picked, hash64(_STREAM, augment.seed, augment.epoch, np.asarray(indices)))
        image = (picked[:, :1].astype(np.float32) - 127.5) / 63.75
        return {"image": torch.from_numpy(image), "mask": torch.from_numpy(picked[:, 1:].copy())}


def flip_pairs(pairs: Pairs, bits: NDArray[np.uint64]) -> None:
    """Flip and transpose each image and its mask alike, in place, by three random bits a sample.

    Bit 61 decides whether the sample is turned upside down, bit 62 whether it is mirrored left to right, and bit 63
    whether a square image is transposed first.

    Args:
        pairs: uint8 (samples, 2, height, width), the images (channel 0) and masks (channel 1) of a batch; changed.
        bits: uint64 (samples,), 64 random bits a sample; bits 0 to 60 have no effect.
    """
    square = pairs.shape[2] == pairs.shape[3]
    draws = np.stack([bits >> np.uint64(place) & np.uint64(1) for place in (61, 62, 63)], axis=1).astype(bool)
    for pair, (upside_down, mirrored, transposed) in zip(pairs, draws, strict=True):
        changed = pair.transpose(0, 2, 1) if square and transposed else pair
        pair[...] = changed[:, :: -1 if upside_down else 1, :: -1 if mirrored else 1].copy()


def check_masks(data: str) -> None:
    """Check that a folder holds images in ``train/image`` and for each a mask of the same name in ``train/label``.

    No image is opened.

    Args:
        data: path of the folder; it may hold ``test/image`` and ``test/label``, too.

    Raises:
        DataError: there is no such folder; one of these subfolders is missing or has no images; an image has no mask,
            or a mask no image; two files of a subfolder have one name; a link leads out of the folder; or there are
            five training images or fewer and no ``test``, for which five would be held out.
    """
    find_masks(data)


def find_masks(data: str) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Return the paths of the images and masks of the training set and of the held-out set; opens no image.

    Without the folder ``test`` the last five of ``train`` are held out.

    Args:
        data: the folder, with ``train/image`` and ``train/label``, and optionally the same in ``test/``.

    Returns:
        Training set and held-out set, each a tuple of ``Pair`` (path of an image, path of its mask) sorted by name.

    Raises:
        DataError: there is no such folder; one of these subfolders is missing or has no images; an image has no mask,
            or a mask no image; two files of a subfolder have one name; a link leads out of the folder; or there are
            five training images or fewer and no ``test``.
    """
    root = resolved_folder(data)
    train = _pairs(root / "train", root)
    if (root / "test").is_dir():
        return train, _pairs(root / "test", root)
    if len(train) <= HELD_OUT:
        raise DataError(
            f"there are {len(train)} images, and {HELD_OUT} are held out for evaluation",
            where=str(root / "train"),
            remedy="add more, or add test/image and test/label",
        )
    return train[:-HELD_OUT], train[-HELD_OUT:]


def read_masks(pairs: tuple[Pair, ...]) -> Pairs:
    """Read all images with their masks, decoded once for all processes: later calls map a cache file.

    The cache file is in tutti's cache directory (``$TUTTI_CACHE``) and is named by a hash of the files' paths, sizes
    and times of modification, so that images are decoded again after one has changed. Where the cache cannot be
    written, each call decodes all images into memory.

    Args:
        pairs: paths of each image and its mask, as ``find_masks`` returns them; at least one pair.

    Returns:
        A NumPy array (samples, 2, height, width) uint8, samples in the order of ``pairs``: grey levels in channel 0,
        the mask (0 or 1) in channel 1. Read-only where it is mapped.

    Raises:
        DataError: an image or mask is broken, has more than 8 bits a pixel or another size than the first image, or a
            mask has more than one level besides 0; or Pillow is not installed.
        OSError: one of the files is gone.
    """
    files = [file for pair in pairs for file in (pair.image, pair.mask)]
    stamps = [(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps(["masks", _CACHE_VERSION, stamps]).encode()).hexdigest()[:32]
    return np.asarray(cached(key, lambda: _decode(pairs)))


def _pairs(folder: Path, root: Path) -> tuple[Pair, ...]:
    images, masks = (_files(folder / name, root) for name in ("image", "label"))
    for have, other, name in ((images, masks, "mask"), (masks, images, "image")):
        if missing := sorted(have.keys() - other.keys()):
            partner = folder / ("label" if name == "mask" else "image")
            raise DataError(
                f"there is no {name} for it", where=str(have[missing[0]]), remedy=f"add {missing[0]}.png to {partner}"
            )
    return tuple(Pair(images[name], masks[name]) for name in sorted(images))


def _files(folder: Path, root: Path) -> dict[str, Path]:
    """Return image files by name without extension. Raises DataError where there are none."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise DataError("this folder cannot be listed", where=str(folder), why=error.strerror, remedy=_LAYOUT) from None
    found: dict[str, Path] = {}
    for path in paths:
        if path.suffix.lower() not in SUFFIXES or path.name.startswith("."):
            continue
        # Opening a named pipe would block, and a link may lead to any file of the machine.
        target = path.resolve()
        if not target.is_file() or not target.is_relative_to(root):
            raise DataError(
                "this is not an image file of the folder", where=str(path), remedy="put a copy in its place"
            )
        if path.stem in found:
            raise DataError(f"there are two files of the name {path.stem}", where=str(path), remedy="remove one")
        found[path.stem] = path
    if not found:
        raise DataError("there are no images", where=str(folder), remedy=_LAYOUT)
    return found


def _decode(pairs: tuple[Pair, ...]) -> Pairs:
    check_pillow()
    first = _grey(pairs[0].image, None)
    out = np.empty((len(pairs), 2, *first.shape), dtype=np.uint8)
    for number, pair in enumerate(pairs):
        out[number] = _grey(pair.image, first.shape), _binary(pair.mask, first.shape)
    return out


def _binary(file: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read a mask as 0 and 1. Raises DataError where it has more than one level besides 0."""
    levels = _grey(file, shape)
    if (levels[levels > 0] != levels.max()).any():
        raise DataError(
            f"this mask has {len(np.unique(levels))} different levels",
            where=str(file),
            remedy="save it with two, 0 and 255, in a format that keeps them, such as PNG",
        )
    return (levels > 0).astype(np.uint8)


def _grey(file: Path, shape: tuple[int, ...] | None) -> NDArray[np.uint8]:
    """Read an image's grey levels (height, width). Raises DataError for another shape than ``shape``, if given."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(file.read_bytes()), formats=_FORMATS) as image:
            # Before any pixel is decoded: a small file may claim to be a gigantic image.
            _check_form(image, file, shape)
            return np.asarray(image.convert("L"))
    except DataError:
        raise
    except Exception as error:  # Pillow raises many types for broken files
        raise DataError(
            "an image is broken", where=str(file), why=str(error) or type(error).__name__, remedy="replace or remove it"
        ) from error


def _check_form(image: Image, file: Path, shape: tuple[int, ...] | None) -> None:
    width, height = image.size
    if shape is not None and shape != (height, width):
        raise DataError(
            f"this image is {width}×{height} and the first one {shape[1]}×{shape[0]}",
            where=str(file),
            remedy="crop all images and masks to one size",
        )
    if image.mode.startswith(_DEEP):
        # Pillow would clip every level above 255.
        raise DataError("this image has more than 8 bits a pixel", where=str(file), remedy="convert it to 8 bits")
