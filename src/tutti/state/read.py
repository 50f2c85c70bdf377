"""Reading a checkpoint: only regular files inside its directory, only as numbers, nothing before it is checked.

Numbers are read as unsigned integers of their elements' width, which neither NumPy nor PyTorch needs to understand:
torch is loaded with the first tensor that is asked for as one, and ``tutti export`` never asks.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tutti.errors import CheckpointError
from tutti.state.manifest import MANIFEST, MOST_METADATA, REMEDY, FileRecord, Manifest, TensorRecord
from tutti.state.tensorfile import DTYPES, SliceRecord, file_layout

if TYPE_CHECKING:
    from torch import Tensor

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Without O_NONBLOCK, opening a named pipe would wait for a writer."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def load_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at ``path``, checked in itself but not against the files: see ``verify``.

    For ranks that are told which checkpoint another rank has verified.

    Raises:
        CheckpointError: it is missing, damaged, of another version, or contradicts itself.
    """
    with _opened(path, MANIFEST) as (descriptor, size):
        if size > MOST_METADATA:
            raise _broken(path, MANIFEST, f"it has {size} bytes, more than {MOST_METADATA}")
        data = _read(descriptor, size)
    return Manifest.decode(data, path)


def verify(path: Path) -> Manifest:
    """The manifest of a checkpoint whose every byte is as it was written.

    Raises:
        CheckpointError: naming the file, and whether it is missing, no regular file, of another size, or damaged.
    """
    manifest = load_manifest(path)
    for file in manifest.files:
        with _opened(path, file.group, file.name) as (descriptor, size):
            _check(path, file, descriptor, size)
            with os.fdopen(os.dup(descriptor), "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                    raise _broken(path, f"{file.group}/{file.name}", "its content does not have the recorded SHA-256")
    return manifest


class Reader:
    """Global tensors of a checkpoint, or any region of them, from however many files hold their slices.

    Args:
        manifest: from ``verify`` or ``newest``; sizes are checked again, hashes are not.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._begins: dict[tuple[str, int], tuple[int, ...]] = {}

    def read(self, group: str, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of ``group``, one at a time, on the CPU.

        Args:
            group: one of ``GROUPS``; one that was not saved has no tensors.
            names: which of them, in this order; None for all.

        Raises:
            CheckpointError: a name that was not saved, or a file that is not as the manifest says.
        """
        tensors = self._manifest.tensors.get(group, {})
        for name in tensors if names is None else names:
            shape = self._record(group, name).shape
            yield name, self.read_slice(group, name, (0,) * len(shape), shape)

    def read_slice(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The region of ``shape`` at ``offset`` of one tensor; nothing else of it is read. Raises as ``numbers``."""
        from tutti.state.dtypes import as_tensor

        return as_tensor(self.numbers(group, name, offset, shape), self._record(group, name).dtype)

    def numbers(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        """The same region as unsigned integers of the elements' width.

        Raises:
            CheckpointError: no such tensor, a region outside it, or a file that is not as the manifest says.
        """
        record = self._record(group, name)
        try:
            wanted = SliceRecord(name, record.dtype, record.shape, tuple(offset), tuple(shape))
        except ValueError as error:
            raise CheckpointError("cannot read", where=str(self._manifest.path), why=str(error)) from error
        result = np.empty(wanted.part, unsigned(record.dtype))
        for file, index in record.slices:
            self._copy(file, index, result, wanted)
        return result

    def _copy(self, file: FileRecord, index: int, result: NDArray[Any], wanted: SliceRecord) -> None:
        """Copy what the slice has of the ``wanted`` region to ``result``, which is that region."""
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

    def _record(self, group: str, name: str) -> TensorRecord:
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
    """NumPy's name of the unsigned integers that are as wide as an element of ``dtype``."""
    return f"<u{DTYPES[dtype][1]}"


def _within(item: SliceRecord, low: Sequence[int], high: Sequence[int]) -> tuple[slice, ...]:
    """The region from ``low`` to ``high`` of the whole tensor as an index into a slice of it."""
    return tuple(slice(begin - start, end - start) for begin, end, start in zip(low, high, item.offset, strict=True))


def _check(path: Path, file: FileRecord, descriptor: int, size: int) -> tuple[int, ...]:
    """Where the file's slices begin, once its size and header are those that the manifest implies, to the byte."""
    name = f"{file.group}/{file.name}"
    if size != file.size:
        raise _broken(path, name, _sizes(size, file))
    layout = file_layout(file.slices)
    # The header is compared and never parsed: what it says cannot differ from what was checked.
    if _read(descriptor, len(layout.header)) != layout.header:
        raise _broken(path, name, "its safetensors header is not the one that the manifest implies")
    return layout.begins


def _sizes(size: int, file: FileRecord) -> str:
    return f"it has {size} bytes and not {file.size}"


def _broken(path: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError("the checkpoint is damaged", where=str(path / name), why=why, remedy=REMEDY)


@contextmanager
def _opened(path: Path, *names: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file below ``path``, reached without following any link."""
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
    """The file's first ``size`` bytes, or all of it where it has fewer."""
    data = bytearray()
    while len(data) < size and (piece := os.pread(descriptor, size - len(data), len(data))):
        data += piece
    return bytes(data)
