"""Read labelled images of one size from the Hugging Face hub, its parquet files, or folders of image files.

Only files inside the given folder and with an image's extension are opened, and nothing is unpickled. pyarrow, Pillow
and ``datasets`` are imported on first use; no torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.data.cache import cached
from tutti.data.decoding import SUFFIXES, Encoded, decode_images, resolved_folder
from tutti.distribution import pip_install
from tutti.errors import DataError

# In order of preference: where both exist, the validation set is the one to evaluate on during training.
_HELD_OUT = ("val", "validation", "test")
_IMAGE_COLUMNS = ("img", "image")
_CACHE_VERSION = 1
_LAYOUTS = "train-*.parquet and test-*.parquet (or in plain_text/ or data/), or train/CLASS/*.png and test/CLASS/*.png"


@dataclass(frozen=True)
class ImageSplit:
    """A training or held-out set of images that is located but not yet read.

    Attributes:
        name: name of the set for error messages.
        classes: names of the classes, in the order of their labels 0, 1, ….
        files: files that hold the images (images, parquet, or the Arrow cache of ``datasets``); their names, sizes and
            modification times identify the content.
        rows: function without arguments that yields each image in a fixed order, still encoded (such as PNG), with its
            label.
    """

    name: str
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    rows: Callable[[], Iterator[Encoded]]


def find_images(data: str, *, classes: Sequence[str], hub: str | None = None) -> tuple[ImageSplit, ImageSplit]:
    """Locate the training and the held-out images of a folder, or of a Hugging Face hub repository.

    A folder has one of two layouts. Class folders: ``train/CLASS/*.png`` and the same under ``val``, ``validation`` or
    ``test``. Parquet files as on the hub: ``train-*.parquet`` and ``val-*``, ``validation-*`` or ``test-*``, in the
    folder itself, its ``data`` or its ``plain_text``. Images of a folder are not read yet; a hub repository is
    downloaded, unless it is in the cache of the package ``datasets``, which loads it.

    Args:
        data: path of the folder, or the name ``hub``.
        classes: names of the classes by label, for parquet files without a README.md that gives them.
        hub: name of the only repository that ``data`` may name, such as ``uoft-cs/cifar10``; None to allow folders
            only. A folder of this name takes precedence.

    Returns:
        The training set and the held-out set, each an ``ImageSplit``: class names, paths of the files, and a function
        that yields the images, still encoded, with their labels. Of several held-out sets in a folder the first in the
        order ``val``, ``validation``, ``test`` is returned.

    Raises:
        DataError: no such folder, none of the two layouts, no images, a held-out class without training images, a link
            that leads out of the folder, or a repository that cannot be loaded or has other splits or columns.
    """
    if data == hub and not Path(data).exists():
        return _hub(data)
    root = _root(data)
    if (root / "train").is_dir():
        return _folders(root)
    names = _class_names(root) or tuple(classes)
    train, held_out = (
        ImageSplit(name, names, files, functools.partial(_parquet_rows, files, len(names)))
        for name, files in zip(("train", "held-out"), _parquet_pair(root), strict=True)
    )
    return train, held_out


def check_images(data: str, *, hub: str | None = None) -> None:
    """Check the layout of an image folder, or that the package ``datasets`` is installed; read no image.

    A folder must hold ``train`` and ``val``, ``validation`` or ``test``, as subfolders or as parquet files
    (``train-*.parquet``). For a repository of the Hugging Face hub, only the package ``datasets`` must be installed.
    ``find_images`` may still fail under the same arguments: class folders and repositories are not looked into.

    Args:
        data: path of the folder, or the name ``hub``.
        hub: name of the only repository that ``data`` may name; None to allow folders only.

    Raises:
        DataError: no such folder, none of the two layouts, a parquet file that is a link out of the folder, or
            ``datasets`` is missing.
    """
    if data != hub or Path(data).exists():
        root = _root(data)
        _held_out_folder(root) if (root / "train").is_dir() else _parquet_pair(root)
    elif importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"'{data}' is no folder here, and reading it from the hub needs the package datasets",
            remedy="run pip install datasets, or give a folder with --data",
        )


def read_images(split: ImageSplit, size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read all images and labels of a set, from the cache on disk if an earlier call has decoded them.

    The first call decodes the files and stores the result in the cache; later calls, also of other processes, map the
    cache file. If the cache cannot be written, each call decodes.

    Args:
        split: the set, as ``find_images`` has located it.
        size: height and width that every image must have, in pixels.

    Returns:
        Images (samples, 3, size, size) uint8, read-only if they are mapped from the cache file; and labels (samples,)
        int64, a new array.

    Raises:
        DataError: while files are decoded: an image is broken or has another size, a label is out of range, an image or
            parquet file cannot be read, the set is empty, or Pillow (for parquet files also pyarrow) is not installed.
        OSError: one of the set's files is gone.
    """
    stamps = [(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in split.files]
    identity = json.dumps([_CACHE_VERSION, size, split.classes, stamps])
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]

    def make() -> NDArray[Any]:
        records = decode_images(split.rows(), size)
        if not len(records):
            raise DataError(f"the {split.name} set is empty", where=str(split.files[0]), remedy="give some images")
        return records

    records = np.asarray(cached(key, make))
    return records["image"], records["label"].astype(np.int64)


def _root(data: str) -> Path:
    root = resolved_folder(data)
    if not root.is_dir():
        raise DataError("this is not a folder", where=data, remedy=f"give a folder that holds {_LAYOUTS}")
    return root


def _inside(path: Path, root: Path) -> Path:
    """Return ``path`` with links resolved. Raises DataError for a target outside ``root`` or a broken link."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise DataError("a symbolic link has no target", where=str(path), remedy="remove it") from error
    if not target.is_relative_to(root):
        raise DataError(
            "a symbolic link points outside the data folder", where=str(path), remedy="put a copy in its place"
        )
    return target


# Folders of image files.


def _folders(root: Path) -> tuple[ImageSplit, ImageSplit]:
    train, held_out = _inside(root / "train", root), _inside(_held_out_folder(root), root)
    classes = tuple(path.name for path in _entries(train) if path.is_dir())
    return _folder_split(train, root, classes), _folder_split(held_out, root, classes)


def _held_out_folder(root: Path) -> Path:
    for name in _HELD_OUT:
        if (root / name).is_dir():
            return root / name
    raise DataError("there are no held-out images", where=str(root), remedy="add the folder test/ or val/")


def _folder_split(folder: Path, root: Path, classes: tuple[str, ...]) -> ImageSplit:
    found: list[tuple[Path, int]] = []
    for subfolder in _entries(folder):
        if not subfolder.is_dir():
            continue
        if subfolder.name not in classes:
            raise DataError(
                f"class '{subfolder.name}' has no training images", where=str(subfolder), remedy="add it to train/"
            )
        label = classes.index(subfolder.name)
        files = _entries(_inside(subfolder, root))
        found += [(_image_file(file, root), label) for file in files if file.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError("there are no images", where=str(folder), remedy="the folder should hold CLASS/*.png")
    return ImageSplit(
        folder.name,
        classes,
        tuple(file for file, _ in found),
        lambda: (Encoded(file, label, str(file)) for file, label in found),
    )


def _entries(folder: Path) -> list[Path]:
    """Return a folder's entries sorted by name, without hidden ones. Raises DataError where it cannot be listed."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError("this folder cannot be listed", where=str(folder), why=str(error)) from error


def _image_file(file: Path, root: Path) -> Path:
    target = _inside(file, root) if file.is_symlink() else file
    # Opening a named pipe would block, and a link within the folder may give any file an image's extension.
    if not target.is_file() or target.suffix.lower() not in SUFFIXES:
        raise DataError("this is not an image file", where=str(file), remedy="remove it")
    return target


# Parquet files in the hub's layout.


def _class_names(root: Path) -> tuple[str, ...]:
    """Return the class names in the front matter of README.md in order of their labels; () where there are none."""
    readme = root / "README.md"
    if not readme.is_file():
        return ()
    text = _inside(readme, root).read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    block = re.search(r"^ *names:\n((?: *['\"]?\d+['\"]?: .*\n?)+)", front[1] if front else "", re.MULTILINE)
    pairs = re.findall(r"['\"]?(\d+)['\"]?: (.*)", block[1] if block else "")
    names = {int(label): name.strip().strip("'\"") for label, name in pairs}
    return tuple(names[label] for label in sorted(names)) if sorted(names) == list(range(len(names))) else ()


def _parquet_pair(root: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    train, held_out = _parquet_files(root, ("train",)), _parquet_files(root, _HELD_OUT)
    if not train or not held_out:
        raise DataError("no images found", where=str(root), remedy=f"the folder should hold {_LAYOUTS}")
    return train, held_out


def _parquet_files(root: Path, words: Sequence[str]) -> tuple[Path, ...]:
    for word in words:
        for folder in (root / "plain_text", root / "data", root):
            if files := sorted(folder.glob(f"{word}-*.parquet")):
                return tuple(_inside(file, root) for file in files)
    return ()


def _parquet_rows(files: Sequence[Path], classes: int) -> Iterator[Encoded]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError("reading parquet files needs pyarrow", remedy=f"run {pip_install('data')}") from None
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                _check_columns(file.schema_arrow.names, str(path))
                column = next(name for name in _IMAGE_COLUMNS if name in file.schema_arrow.names)
                first = 0
                for batch in file.iter_batches(1024, columns=[column, "label"]):
                    yield from _rows(batch, classes, str(path), first)
                    first += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                "this parquet file cannot be read", where=str(path), why=str(error), remedy="download it again"
            ) from error


def _check_columns(names: Sequence[str], where: str) -> None:
    if "label" not in names or not any(name in names for name in _IMAGE_COLUMNS):
        raise DataError(
            f"the columns are {', '.join(names)}", where=where, remedy="there should be img (bytes, path) and label"
        )


def _rows(batch: Any, classes: int, where: str, first: int) -> Iterator[Encoded]:
    """Yield the encoded images of an Arrow record batch; raise DataError for an invalid label or image.

    Args:
        batch: the record batch.
        classes: number of classes.
        where: the file or split, for errors.
        first: number of the batch's first row.
    """
    column = next(batch.column(name) for name in _IMAGE_COLUMNS if name in batch.schema.names)
    try:
        images = column.field("bytes").to_pylist()
    except (AttributeError, KeyError):
        raise DataError(
            f"images are stored as {column.type}", where=where, remedy="the column should be a struct of bytes and path"
        ) from None
    for row, (image, label) in enumerate(zip(images, batch.column("label").to_pylist(), strict=True), first):
        place = f"{where}, row {row}"
        if not isinstance(label, int) or not 0 <= label < classes:
            raise DataError(f"the label {label} is not in 0 … {classes - 1}", where=place, remedy="correct the label")
        if not isinstance(image, bytes):
            raise DataError("there is no image in this row", where=place, remedy="store the bytes in the column img")
        yield Encoded(image, label, place)


# The hub.


def _hub(name: str) -> tuple[ImageSplit, ImageSplit]:
    check_images(name, hub=name)
    import datasets

    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # datasets raises many types: no network, no such name, no space
        raise DataError(
            f"cannot load '{name}' from the hub",
            why=f"{type(error).__name__}: {error}",
            remedy="check the network, or download the repository and give its folder with --data",
        ) from error
    held_out = next((word for word in _HELD_OUT if word in loaded), None)
    if "train" not in loaded or held_out is None:
        raise DataError(f"'{name}' has the splits {', '.join(loaded)}", remedy="it should have train and test")
    return _hub_split(loaded["train"], name, "train"), _hub_split(loaded[held_out], name, held_out)


def _hub_split(table: Any, name: str, split: str) -> ImageSplit:
    import datasets

    where = f"{name}, {split}"
    _check_columns(table.column_names, where)
    column = next(word for word in _IMAGE_COLUMNS if word in table.column_names)
    encoded = table.cast_column(column, datasets.Image(decode=False)).with_format("arrow")
    classes = tuple(table.features["label"].names)

    def rows() -> Iterator[Encoded]:
        first = 0
        for part in encoded.iter(batch_size=1024):
            for batch in part.to_batches():
                yield from _rows(batch, len(classes), where, first)
                first += batch.num_rows

    return ImageSplit(where, classes, tuple(Path(file["filename"]) for file in table.cache_files), rows)
