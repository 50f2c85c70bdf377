"""Decode images into one array with a thread pool. Pillow is imported on first use; no torch."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.distribution import pip_install
from tutti.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
# Pillow would otherwise try formats that start other programs, such as EPS.
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Encoded:
    """One image that is not decoded yet.

    Attributes:
        data: the encoded bytes, such as PNG, or the path of the file that holds them.
        label: number of the image's class.
        where: place of the image, for error messages.
    """

    data: bytes | Path
    label: int
    where: str


def record_dtype(size: int) -> np.dtype[Any]:
    """Return the NumPy structured dtype that holds one labelled square image of three colours.

    Fields: ``label`` (uint16) and ``image`` (uint8, of shape (3, size, size)).

    Args:
        size: height and width of the images, in pixels.
    """
    return np.dtype([("label", "<u2"), ("image", "u1", (3, size, size))])


def decode_images(rows: Iterable[Encoded], size: int) -> NDArray[Any]:
    """Decode colour images in a thread pool into one array of labelled images, in the order of ``rows``.

    Args:
        rows: the images, each ``Encoded``: ``data`` (the encoded bytes or the path of a file), ``label`` (number of the
            class) and ``where`` (the place that a DataError names).
        size: height and width that every image must have, in pixels.

    Returns:
        Structured array (samples,) with the fields ``label`` (uint16) and ``image`` (uint8, of shape (3, size, size)).

    Raises:
        DataError: an image is broken or not size × size (the first such image, in order), or Pillow is not installed.
    """
    check_pillow()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        chunks = list(pool.map(lambda chunk: _decode_chunk(chunk, size), _chunks(rows)))
    return np.concatenate(chunks) if chunks else np.empty(0, dtype=record_dtype(size))


def resolved_folder(data: str) -> Path:
    """Return the absolute path of a folder of images, with links resolved; raise DataError if nothing is there.

    Args:
        data: the value of ``--data``.
    """
    try:
        return Path(data).expanduser().resolve(strict=True)
    except (OSError, RuntimeError):
        raise DataError("there is no such folder", where=data, remedy="check --data") from None


def check_pillow() -> None:
    """Check that Pillow, the package that decodes images, is installed, by importing it.

    Raises:
        DataError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise DataError("reading images needs Pillow", remedy=f"run {pip_install('data')}") from None


def _chunks(rows: Iterable[Encoded]) -> Iterator[list[Encoded]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


def _decode_chunk(rows: Sequence[Encoded], size: int) -> NDArray[Any]:
    out = np.empty(len(rows), dtype=record_dtype(size))
    labels, images = out["label"], out["image"]
    for i, row in enumerate(rows):
        labels[i] = row.label
        images[i] = _pixels(row, size).transpose(2, 0, 1)
    return out


def _pixels(row: Encoded, size: int) -> NDArray[np.uint8]:
    """Decode one image to RGB: (size, size, 3)."""
    from PIL import Image

    try:
        data = row.data if isinstance(row.data, bytes) else row.data.read_bytes()
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            # Before any pixel is decoded: a small file may claim to be a gigantic image.
            if image.size != (size, size):
                width, height = image.size
                raise DataError(
                    f"an image is {width}×{height} and not {size}×{size}",
                    where=row.where,
                    remedy=f"resize all images to {size}×{size}",
                )
            return np.asarray(image.convert("RGB"))
    except DataError:
        raise
    except Exception as error:  # Pillow raises many types for broken files
        raise DataError(
            "an image is broken", where=row.where, why=str(error) or type(error).__name__, remedy="replace or remove it"
        ) from error
