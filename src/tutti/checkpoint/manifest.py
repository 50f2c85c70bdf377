"""The manifest of a checkpoint: one JSON document with its own hash, checked whole before any tensor file is read.

``manifest.json`` ends with the SHA-256 of the bytes before it, so that no bit can change unnoticed. A file is named by
its group and rank, never by a path: a manifest cannot point outside its directory. Hashes detect damage, not attackers,
who can compute them too; an attacker's bytes are still only ever read as numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tutti.checkpoint.tensorfile import SliceRecord, checked_size, file_layout
from tutti.errors import CheckpointError

T = TypeVar("T")

MANIFEST = "manifest.json"
GROUPS = ("model", "ema", "optim", "data", "rng", "workers", "wire")
"""Groups of tensors, each a directory. ``workers`` and ``wire`` belong to a strategy and are optional, as is ``ema``;
the other groups do not depend on the strategy."""

MOST_METADATA = 64 * 2**20
"""Largest manifest, bytes: parsed JSON takes many times its size in memory."""

REMEDY = "resume from an older checkpoint, or restore this one from a copy"
"""The way out that errors give for a damaged checkpoint."""

_FORMAT = "tutti checkpoint"
_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Record of one tensor file of a checkpoint, ``GROUP/rank{N}.safetensors``, in the manifest.

    Attributes:
        group: the kind of state in the file, such as ``model`` (one of ``GROUPS``).
        rank: the rank that wrote the file.
        size: bytes of the file.
        sha256: hexadecimal hash of all bytes of the file.
        slices: the tensor slices in the file, in the order of their bytes.
    """

    group: str
    rank: int
    size: int
    sha256: str
    slices: tuple[SliceRecord, ...]

    @property
    def name(self) -> str:
        """Name of this tensor file of a checkpoint, which rank N wrote: ``rank{N}.safetensors``, without its directory.

        The directory is named like the file's kind of state, such as ``model``.
        """
        return f"rank{self.rank}.safetensors"

    def as_json(self) -> dict[str, Any]:
        """Return the record of a checkpoint's tensor file as a JSON object, which ``from_json`` parses.

        Keys are ``group``, ``rank``, ``size`` (bytes), ``sha256`` and ``slices``, a list of [name, dtype, shape of the
        whole tensor, offset, shape of the slice]. Each rank sends such objects to rank 0, which stores them in the
        manifest.
        """
        slices = [[s.name, s.dtype, s.shape, s.offset, s.part] for s in self.slices]
        return {"group": self.group, "rank": self.rank, "size": self.size, "sha256": self.sha256, "slices": slices}

    @classmethod
    def from_json(cls, value: object) -> FileRecord:
        """Parse and check the JSON object of ``as_json``, and return the ``FileRecord`` of a checkpoint's tensor file.

        Args:
            value: the object, with the keys ``group``, ``rank``, ``size``, ``sha256`` and ``slices``.

        Raises:
            ValueError: a key is missing, a value is invalid, or the size is not that of a file with these slices.
        """
        group, rank = _member(value, "group", str), checked_size(_member(value, "rank", int))
        if group not in GROUPS:
            raise ValueError(f"there is no group {group!r}")
        size, sha256 = checked_size(_member(value, "size", int)), _member(value, "sha256", str)
        if not _SHA256.fullmatch(sha256):
            raise ValueError(f"{sha256!r} is not a SHA-256")
        slices = tuple(_slice(entry) for entry in _member(value, "slices", list))
        record = cls(group, rank, size, sha256, slices)
        if (needed := file_layout(slices).size) != size:
            raise ValueError(f"{group}/{record.name} is said to have {size} bytes, but its slices make {needed}")
        return record


@dataclass(frozen=True)
class TensorRecord:
    """Record of one whole tensor of a checkpoint, whose slices may lie in several files.

    Attributes:
        dtype: safetensors' name of the dtype (a key of ``DTYPES``), such as ``BF16``.
        shape: shape of the whole tensor.
        slices: for each slice the record of the file that holds it, and the slice's index in the file's ``slices``.
    """

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[tuple[FileRecord, int], ...]


@dataclass(frozen=True)
class Manifest:
    """Parsed manifest of a checkpoint: position, state and files, checked to be complete and free of contradictions.

    Attributes:
        path: the checkpoint's directory.
        step: steps taken.
        config_sha256: hash of the run's configuration.
        facts: the run's further state as JSON, such as its data position and loss scale.
        files: every tensor file.
        tensors: record of each tensor, by group and then by name; derived from ``files``.

    Raises:
        ValueError: a file is listed twice, files disagree about a tensor's dtype or shape, or its slices leave a hole
            or overlap.
    """

    path: Path
    step: int
    config_sha256: str
    facts: Mapping[str, Any]
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, Mapping[str, TensorRecord]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len({(file.group, file.rank) for file in self.files}) != len(self.files):
            raise ValueError("a file is listed twice")
        object.__setattr__(self, "tensors", _tensors(self.files))

    def encode(self) -> bytes:
        """Return the bytes of a checkpoint's manifest file: a JSON object that ends with a hash of itself.

        The last member, ``sha256``, is the SHA-256 of all bytes before it.

        Raises:
            CheckpointError: ``facts``, the run's state beside its tensors, has a value that JSON lacks, such as NaN.
        """
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "config_sha256": self.config_sha256,
            "facts": self.facts,
            "files": [file.as_json() for file in self.files],
        }
        try:
            body = json.dumps(document, allow_nan=False)[:-1].encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError("the run's facts cannot be written as JSON", why=str(error)) from error
        return body + _seal(body)

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """Parse and check the content of a checkpoint's manifest file, hash included; tensor files are not read.

        Args:
            data: the file's bytes.
            path: the checkpoint's directory: the manifest's ``path``, which a CheckpointError states.

        Returns:
            The manifest: ``path``, ``step``, ``facts`` (the run's other state as JSON), and records of files and
            tensors.

        Raises:
            CheckpointError: the manifest is damaged, of another version, or contradicts itself.
        """
        where = str(path / MANIFEST)
        length = len(_seal(b""))
        if data[-length:] != _seal(data[:-length]):
            why = "its content does not have the SHA-256 that its last line states"
            raise CheckpointError("the manifest is damaged", where=where, why=why, remedy=REMEDY)
        try:
            return cls._from_json(json.loads(data), path)
        except (ValueError, RecursionError) as error:
            raise CheckpointError("the manifest cannot be used", where=where, why=str(error), remedy=REMEDY) from error

    @classmethod
    def _from_json(cls, document: object, path: Path) -> Manifest:
        if _member(document, "format", str) != _FORMAT:
            raise ValueError(f"it is not a {_FORMAT}")
        if (version := _member(document, "version", int)) != _VERSION:
            raise ValueError(f"it has format version {version}, and this tutti reads version {_VERSION}")
        return cls(
            path=path,
            step=checked_size(_member(document, "step", int)),
            config_sha256=_member(document, "config_sha256", str),
            facts=_member(document, "facts", dict),
            files=tuple(FileRecord.from_json(entry) for entry in _member(document, "files", list)),
        )


def _seal(body: bytes) -> bytes:
    """Return the document's last member: the SHA-256 of the bytes before it."""
    return f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def _member(value: object, key: str, kind: type[T]) -> T:
    found = value.get(key) if isinstance(value, dict) else None
    if type(found) is not kind:
        raise ValueError(f"'{key}' is missing or not of type {kind.__name__}")
    return found


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a shape")
    return tuple(map(checked_size, value))


def _slice(entry: object) -> SliceRecord:
    if not isinstance(entry, list) or len(entry) != 5 or not all(isinstance(text, str) for text in entry[:2]):
        raise ValueError("a slice is not [name, dtype, shape, offset, part]")
    name, dtype, *shapes = entry
    return SliceRecord(name, dtype, *map(_numbers, shapes))


def _tensors(files: Sequence[FileRecord]) -> dict[str, dict[str, TensorRecord]]:
    """Return the tensors of all files by group and name. Raises ValueError where slices do not make whole tensors."""
    found: dict[str, dict[str, list[tuple[FileRecord, int]]]] = {}
    for file in files:
        for index, item in enumerate(file.slices):
            found.setdefault(file.group, {}).setdefault(item.name, []).append((file, index))
    return {
        group: {name: _tensor(f"{group} tensor {name!r}", slices) for name, slices in tensors.items()}
        for group, tensors in found.items()
    }


def _tensor(what: str, slices: list[tuple[FileRecord, int]]) -> TensorRecord:
    records = [file.slices[index] for file, index in slices]
    check_partition(what, records)
    return TensorRecord(records[0].dtype, records[0].shape, tuple(slices))


def check_partition(what: str, records: Sequence[SliceRecord]) -> None:
    """Raise ValueError unless slices make one whole tensor: each element once, and all of one dtype and whole shape.

    Args:
        what: name of the tensor, for the message.
        records: all slices of the tensor.
    """
    kinds = {(record.dtype, record.shape) for record in records}
    if len(kinds) > 1:
        kind = " and ".join(f"{dtype}{list(shape)}" for dtype, shape in sorted(kinds))
        raise ValueError(f"files disagree about {what}: {kind}")
    if records and overlapping(records):
        raise ValueError(f"slices of {what} overlap")
    held, whole = sum(math.prod(record.part) for record in records), math.prod(records[0].shape) if records else 1
    if held != whole:
        raise ValueError(f"slices of {what} hold {held} of its {whole} elements")


def overlapping(slices: Sequence[SliceRecord]) -> bool:
    """Return whether two of a tensor's slices share an element, or one of several slices is empty.

    Such slices cannot partition a tensor. Elements that no slice covers are not looked for. For n slices along one
    dimension the time is about proportional to n: the slices are compared in the order of their offsets in the
    dimension with the most different offsets.

    Args:
        slices: all slices of the tensor, at least one, each with its ``offset`` in the tensor and its shape, ``part``.
    """
    if len(slices) == 1:
        return False
    if not slices[0].shape or any(0 in item.part for item in slices):
        return True
    axis = max(range(len(slices[0].shape)), key=lambda d: len({item.offset[d] for item in slices}))
    active: list[SliceRecord] = []
    for item in sorted(slices, key=lambda item: item.offset[axis]):
        active = [other for other in active if other.end[axis] > item.offset[axis]]
        if any(_meet(item, other) for other in active):
            return True
        active.append(item)
    return False


def _meet(a: SliceRecord, b: SliceRecord) -> bool:
    return all(begin < end for begin, end in zip(map(max, a.offset, b.offset), map(min, a.end, b.end), strict=True))
