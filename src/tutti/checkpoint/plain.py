"""Read plain weights from one safetensors file of any program; its header is checked whole before tensors are read.

Format: github.com/huggingface/safetensors. Eight bytes of little-endian length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.checkpoint.manifest import MOST_METADATA
from tutti.checkpoint.read import unsigned
from tutti.checkpoint.tensorfile import SliceRecord, check_within, checked_size
from tutti.checkpoint.weights import weights_hash
from tutti.errors import CheckpointError

HASH = "weights_sha256"
"""Metadata key of the weights' hash in files that tutti wrote."""

_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class PlainFile:
    """Reads weights from one safetensors file, which it maps into memory; implements the protocol ``Weights``.

    The constructor checks the header; a tensor's pages are read when the tensor is.

    Args:
        path: the file.

    Attributes:
        path: the file.
        metadata: the header's ``__metadata__``.
        records: every tensor's dtype and shape, by name.

    Raises:
        CheckpointError: the file cannot be read, is no safetensors file, or its header contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, str] = {}
        self.records: dict[str, SliceRecord] = {}
        self._begins: dict[str, int] = {}
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for a writer.
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise self._broken("it is no regular file")
                self._size = status.st_size
                head = file.read(9)
                length = int.from_bytes(head[:8], "little")
                if _is_pickle(head) or len(head) < 8 or length > min(self._size - 8, MOST_METADATA):
                    raise self._no_tensors(head)
                self._start = 8 + length
                file.seek(8)
                text = file.read(length)
                self._bytes = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self._broken(error.strerror or str(error)) from error
        try:
            self._read(json.loads(text, object_pairs_hook=_once))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._broken(f"its header cannot be used: {error}") from error

    def region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        """Return a region of one tensor of the file as a read-only view; the kernel reads pages that are accessed.

        Args:
            name: name of the tensor, a key of ``records``.
            offset: index of the region's first element in the tensor, one number a dimension.
            shape: shape of the region.

        Returns:
            Unsigned integers as wide as the tensor's elements, in the region's shape; an empty region is a new array.

        Raises:
            CheckpointError: the region does not lie within the tensor.
        """
        record = self.records[name]
        try:
            check_within(name, record.shape, offset, shape)
        except ValueError as error:
            raise self._broken(str(error)) from error
        count, dtype = record.nbytes // record.itemsize, unsigned(record.dtype)
        if not math.prod(shape):
            return np.empty(tuple(shape), dtype)
        whole = np.frombuffer(self._bytes, dtype, count, self._begins[name]).reshape(record.shape)
        # With the ellipsis a 0-d tensor stays an array.
        index: tuple[Any, ...] = (*(slice(o, o + n) for o, n in zip(offset, shape, strict=True)), ...)
        found: NDArray[Any] = whole[index]
        return found

    def verify(self) -> None:
        """Hash all weights of the safetensors file and compare with the hash in its metadata, if there is one.

        Raises:
            CheckpointError: the weights do not have that hash.
        """
        if HASH in self.metadata and weights_hash(self) != self.metadata[HASH]:
            raise self._broken(f"its weights do not have the {HASH} that it states")

    def _read(self, header: Any) -> None:
        """Parse and check the header. Raises ValueError, TypeError or KeyError where it is malformed."""
        metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
        if not isinstance(metadata, dict):
            raise ValueError("it is not a table of tensors")
        self.metadata = metadata
        spans = []
        for name, entry in header.items():
            record = SliceRecord.whole(name, entry["dtype"], [checked_size(number) for number in entry["shape"]])
            begin, end = map(checked_size, entry["data_offsets"])
            if end - begin != record.nbytes:
                raise ValueError(f"{name!r} has {record.nbytes} bytes at {begin} to {end}")
            self.records[name], self._begins[name] = record, self._start + begin
            spans.append((begin, end))
        last = 0
        for begin, end in sorted(spans):
            if begin != last:
                raise ValueError(f"its tensors leave a hole or overlap at byte {min(begin, last)}")
            last = end
        if self._start + last != self._size:
            raise ValueError(f"the file has {self._size} bytes and not {self._start + last}")

    def _no_tensors(self, head: bytes) -> CheckpointError:
        if _is_pickle(head):
            return CheckpointError(
                "the weights are a pickle, which is never loaded because it can run code",
                where=str(self.path),
                remedy="convert it: safetensors.torch.save_file(torch.load(file, weights_only=True), 'x.safetensors')",
            )
        return self._broken("it is no safetensors file")

    def _broken(self, why: str) -> CheckpointError:
        remedy = "give a .safetensors file, a checkpoint directory or a run directory"
        return CheckpointError("the weights cannot be read", where=str(self.path), why=why, remedy=remedy)


def _is_pickle(head: bytes) -> bool:
    """Return whether a file is a pickle, by its first 9 bytes.

    The length of a safetensors header may begin with the same bytes: 640 is ``80 02``. The header then opens with "{".
    """
    return head.startswith(_PICKLES) and head[8:] != b"{"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
