"""Read a checkpoint: only regular files inside its directory, only as numbers, and no bytes before they are checked.

Elements are read as unsigned integers of the same width, so that NumPy need not know their dtype. Torch is imported
only when a ``Tensor`` is read, which ``tutti export`` never does.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tutti.checkpoint.manifest import MANIFEST, MOST_METADATA, REMEDY, FileRecord, Manifest, TensorRecord
from tutti.checkpoint.tensorfile import DTYPES, SliceRecord, file_layout
from tutti.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Without O_NONBLOCK, opening a named pipe would wait for a writer."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CHUNK = 2**20


def load_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint and check its own hash and consistency; its tensor files are not read.

    For ranks to which rank 0 broadcasts the path of a checkpoint that it has verified (``verify`` reads all files).

    Args:
        path: the checkpoint's directory.

    Returns:
        A ``Manifest``: ``path``, ``step``, ``facts`` (the run's other state as JSON), and records of files and tensors.

    Raises:
        CheckpointError: the manifest is missing, damaged, of another version, or contradicts itself.
    """
    with _opened(path, MANIFEST) as (descriptor, size):
        if size > MOST_METADATA:
            raise _broken(path, MANIFEST, f"it has {size} bytes, more than {MOST_METADATA}")
        data = _read(descriptor, size)
    return Manifest.decode(data, path)


def verify(path: Path, progress: Callable[[], object] = lambda: None) -> Manifest:
    """Read every byte of a checkpoint, compare the files' hashes with its manifest, and return the manifest.

    Args:
        path: the checkpoint's directory.
        progress: called after every mebibyte.

    Returns:
        A ``Manifest``: ``path``, ``step``, ``facts`` (the run's other state as JSON), and records of files and tensors.

    Raises:
        CheckpointError: the manifest is not valid; or a file is missing, no regular file, of another size, or damaged.
            The error names the file.
    """
    manifest = load_manifest(path)
    for file in manifest.files:
        with _opened(path, file.group, file.name) as (descriptor, size):
            _check(path, file, descriptor, size)
            with os.fdopen(os.dup(descriptor), "rb") as stream:
                digest = hashlib.sha256()
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    progress()
                if digest.hexdigest() != file.sha256:
                    raise _broken(path, f"{file.group}/{file.name}", "its content does not have the recorded SHA-256")
    return manifest


class TensorReader:
    """Reads whole tensors of a checkpoint, or any region of them, from all files that hold their slices.

    Args:
        manifest: manifest of a verified checkpoint; file sizes and headers are checked again, hashes are not.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._begins: dict[tuple[str, int], tuple[int, ...]] = {}

    def read(self, group: str, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of one group of a checkpoint as (name, whole tensor), one at a time, on the CPU.

        Args:
            group: kind of state: ``model`` (parameters and buffers), ``ema`` (averaged weights), ``optim`` (optimizer
                state) or ``workers`` (state of each logical worker, a fixed share of the global batch); a group that
                was not saved has no tensors.
            names: the tensors to read, in this order; None for all.

        Raises:
            CheckpointError: a name was not saved, or a file differs from the manifest.
        """
        tensors = self._manifest.tensors.get(group, {})
        for name in tensors if names is None else names:
            shape = self.record(group, name).shape
            yield name, self.read_slice(group, name, (0,) * len(shape), shape)

    def read_slice(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a rectangular region of one tensor of a checkpoint, on the CPU, in the tensor's dtype.

        Only files that hold a part of the region are opened.

        Args:
            group: kind of state: ``model`` (parameters and buffers), ``ema`` (averaged weights), ``optim`` (optimizer
                state) or ``workers`` (state of each logical worker, a fixed share of the global batch).
            name: the tensor's name.
            offset: index of the region's first element in the tensor, one number a dimension.
            shape: shape of the region, one number a dimension.

        Raises:
            CheckpointError: no such tensor, a region outside it, or a file that differs from the manifest.
        """
        from tutti.checkpoint.dtypes import tensor_from_bytes

        return tensor_from_bytes(self.numbers(group, name, offset, shape), self.record(group, name).dtype)

    def numbers(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        """Return a rectangular region of one tensor of a checkpoint as an array of unsigned integers.

        The array has the region's shape, and integers as wide as the tensor's elements. Bits are unchanged: a bfloat16
        tensor, a dtype that NumPy lacks, becomes uint16. Files that hold no part of the region are not opened.

        Args:
            group: kind of state: ``model`` (parameters and buffers), ``ema`` (averaged weights), ``optim`` (optimizer
                state) or ``workers`` (state of each logical worker, a fixed share of the global batch).
            name: the tensor's name.
            offset: index of the region's first element, one number a dimension.
            shape: shape of the region, one number a dimension.

        Raises:
            CheckpointError: no such tensor, a region outside it, or a file that differs from the manifest.
        """
        record = self.record(group, name)
        try:
            wanted = SliceRecord(name, record.dtype, record.shape, tuple(offset), tuple(shape))
        except ValueError as error:
            raise CheckpointError(
                f"cannot read a region of {name!r}", where=str(self._manifest.path), why=str(error)
            ) from error
        result = np.empty(wanted.part, unsigned(record.dtype))
        for file, index in record.slices:
            self._copy(file, index, result, wanted)
        return result

    def _copy(self, file: FileRecord, index: int, result: NDArray[Any], wanted: SliceRecord) -> None:
        """Copy the intersection of the stored slice and the ``wanted`` region into ``result``, the region's array."""
        stored = file.slices[index]
        low, high = tuple(map(max, wanted.offset, stored.offset)), tuple(map(min, wanted.end, stored.end))
        if any(begin >= end for begin, end in zip(low, high, strict=True)):
            return
        with _opened(self._manifest.path, file.group, file.name) as (descriptor, size):
            begin = self._begin(file, descriptor, size)[index]
            page = begin - begin % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(descriptor, begin - page + stored.nbytes, access=mmap.ACCESS_READ, offset=page)
        values = np.frombuffer(mapped, result.dtype, math.prod(stored.part), begin - page).reshape(stored.part)
        result[_within(wanted, low, high)] = values[_within(stored, low, high)]

    def _begin(self, file: FileRecord, descriptor: int, size: int) -> tuple[int, ...]:
        if size != file.size:
            raise _broken(self._manifest.path, f"{file.group}/{file.name}", _sizes(size, file))
        key = (file.group, file.rank)
        if key not in self._begins:
            self._begins[key] = _check(self._manifest.path, file, descriptor, size)
        return self._begins[key]

    def record(self, group: str, name: str) -> TensorRecord:
        """Return dtype, shape and files of one tensor of a checkpoint, from its manifest; no tensor file is read.

        Args:
            group: kind of state, such as ``model``.
            name: the tensor's name within the group.

        Returns:
            A ``TensorRecord``: ``dtype`` (safetensors' name, such as ``BF16``), ``shape`` of the whole tensor, and
            ``slices``: for each saved slice the record of its file, and its index among the slices of that file.

        Raises:
            CheckpointError: no such tensor.
        """
        tensors = self._manifest.tensors.get(group, {})
        if name not in tensors:
            raise CheckpointError(
                f"the checkpoint has no {group} tensor {name!r}",
                where=str(self._manifest.path),
                why=f"it holds {len(tensors)} others",
                remedy="load it into the model and optimizer that saved it",
            )
        return tensors[name]


def unsigned(dtype: str) -> str:
    """Return NumPy's name of the unsigned integer as wide as an element of a dtype: ``<u2`` for ``BF16``.

    Args:
        dtype: safetensors' name of the dtype, a key of ``DTYPES``.
    """
    return f"<u{DTYPES[dtype][1]}"


def _within(item: SliceRecord, low: Sequence[int], high: Sequence[int]) -> tuple[slice, ...]:
    """Return the index, within the slice ``item``, of the global tensor's region from ``low`` to ``high``."""
    return tuple(slice(begin - start, end - start) for begin, end, start in zip(low, high, item.offset, strict=True))


def _check(path: Path, file: FileRecord, descriptor: int, size: int) -> tuple[int, ...]:
    """Check a file's size and header, byte for byte, against the manifest; return the byte at which each slice begins.

    Raises CheckpointError where they differ.
    """
    name = f"{file.group}/{file.name}"
    if size != file.size:
        raise _broken(path, name, _sizes(size, file))
    layout = file_layout(file.slices)
    # The header is compared and never parsed: it cannot contradict the manifest, which was checked.
    if _read(descriptor, len(layout.header)) != layout.header:
        raise _broken(path, name, "its safetensors header is not the one that the manifest implies")
    return layout.begins


def _sizes(size: int, file: FileRecord) -> str:
    return f"it has {size} bytes and not {file.size}"


def _broken(path: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError("the checkpoint is damaged", where=str(path / name), why=why, remedy=REMEDY)


@contextmanager
def _opened(path: Path, *names: str) -> Iterator[tuple[int, int]]:
    """Open a regular file below ``path`` without following links; yield its descriptor and size in bytes."""
    with ExitStack() as stack:
        try:
            descriptor = os.open(path, _DIRECTORY)
            stack.callback(os.close, descriptor)
            for name in names:
                flags = _FILE if name == names[-1] else _DIRECTORY | os.O_NOFOLLOW
                descriptor = os.open(name, flags, dir_fd=descriptor)
                stack.callback(os.close, descriptor)
        except OSError as error:
            reasons = {errno.ENOENT: "it is missing", errno.ELOOP: "it is a link, and links are not followed"}
            reason = reasons.get(error.errno or 0, error.strerror or str(error))
            raise _broken(path, "/".join(names), reason) from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _broken(path, "/".join(names), "it is no regular file")
        yield descriptor, status.st_size


def _read(descriptor: int, size: int) -> bytes:
    """Return the file's first ``size`` bytes, or all of a shorter file."""
    data = bytearray()
    while len(data) < size and (piece := os.pread(descriptor, size - len(data), len(data))):
        data += piece
    return bytes(data)
