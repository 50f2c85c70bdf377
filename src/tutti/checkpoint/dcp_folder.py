"""Read weights that ``torch.distributed.checkpoint`` has written in safetensors files, each with one rank's slices.

``HuggingFaceStorageWriter(folder, save_distributed=True)`` writes them: no pickle, and the offset of each slice as JSON
in the file's metadata. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.checkpoint.manifest import check_partition
from tutti.checkpoint.plain import PlainFile
from tutti.checkpoint.read import unsigned
from tutti.checkpoint.tensorfile import SliceRecord, checked_size
from tutti.errors import CheckpointError

_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def is_dcp_folder(path: Path) -> bool:
    """Return whether a folder holds safetensors files that state offsets of slices, and no index.

    Args:
        path: the folder.

    Raises:
        CheckpointError: the first file cannot be read.
    """
    files = sorted(path.glob("*.safetensors"))
    return bool(files) and not any(path.glob("*.index.json")) and _SHARDING in PlainFile(files[0]).metadata


class DcpFolder:
    """Reads weights that ``torch.distributed.checkpoint`` has written as slices into a folder of safetensors files.

    Implements the protocol ``Weights``. Tensors are read one at a time, each from the files with its slices.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        records: every whole tensor's dtype and shape, by name.

    Raises:
        CheckpointError: a file cannot be used, or slices do not make whole tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = [PlainFile(file) for file in sorted(path.glob("*.safetensors"))]
        found: dict[str, list[tuple[PlainFile, tuple[int, ...]]]] = {}
        for file in self._files:
            offsets = self._offsets(file)
            for name in file.records:
                found.setdefault(name, []).append((file, offsets[name]))
        self._slices: dict[str, list[tuple[PlainFile, SliceRecord]]] = {}
        try:
            for name, parts in found.items():
                self._slices[name] = _slices(name, parts)
        except ValueError as error:
            raise self._broken(str(error)) from error
        self.records: Mapping[str, SliceRecord] = {
            name: SliceRecord.whole(name, parts[0][1].dtype, parts[0][1].shape) for name, parts in self._slices.items()
        }

    def region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        """Return a region of one tensor, put together from the slices of the folder that hold a part of it.

        Args:
            name: name of the tensor, a key of ``records``.
            offset: index of the region's first element in the tensor, one number a dimension.
            shape: shape of the region.

        Returns:
            Unsigned integers as wide as the tensor's elements, in the region's shape: of a tensor in one file a
            read-only view of the file, otherwise a new array.

        Raises:
            CheckpointError: the region does not lie within the tensor.
        """
        parts = self._slices[name]
        if len(parts) == 1:
            return parts[0][0].region(name, offset, shape)
        try:
            wanted = SliceRecord(name, self.records[name].dtype, self.records[name].shape, tuple(offset), tuple(shape))
        except ValueError as error:
            raise self._broken(str(error)) from error
        result = np.empty(wanted.part, unsigned(wanted.dtype))
        for file, part in parts:
            low, high = tuple(map(max, wanted.offset, part.offset)), tuple(map(min, wanted.end, part.end))
            if all(begin < end for begin, end in zip(low, high, strict=True)):
                lengths = tuple(end - begin for begin, end in zip(low, high, strict=True))
                place = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, wanted.offset, strict=True))
                result[place] = file.region(name, tuple(a - o for a, o in zip(low, part.offset, strict=True)), lengths)
        return result

    def verify(self) -> None:
        """Hash the tensors of each file of the folder and compare with the hash in its metadata, if there is one.

        Raises:
            CheckpointError: a file's tensors do not have the hash that its metadata state.
        """
        for file in self._files:
            file.verify()

    def _offsets(self, file: PlainFile) -> dict[str, tuple[int, ...]]:
        """Return the offset of each slice of a file in its tensor, by the tensor's name."""
        try:
            stated = json.loads(file.metadata[_SHARDING])
            return {name: tuple(map(checked_size, stated[name][_OFFSETS])) for name in file.records}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._broken(f"{file.path.name} does not state where its slices are: {error!r}") from error

    def _broken(self, why: str) -> CheckpointError:
        remedy = "give all files of one save by torch.distributed.checkpoint, and no others"
        return CheckpointError("the weights cannot be read", where=str(self.path), why=why, remedy=remedy)


def _slices(name: str, parts: Sequence[tuple[PlainFile, tuple[int, ...]]]) -> list[tuple[PlainFile, SliceRecord]]:
    """Return the slices of one tensor with their files. Raises ValueError where they do not make a whole tensor."""
    held = [(file, offset, file.records[name]) for file, offset in parts]
    if len({len(record.shape) for _, _, record in held} | {len(offset) for _, offset, _ in held}) > 1:
        raise ValueError(f"files disagree about the dimensions of {name!r}")
    ends = [tuple(map(sum, zip(offset, record.shape, strict=True))) for _, offset, record in held]
    shape = tuple(map(max, zip(*ends, strict=True)))
    # A rank beyond the last row has an empty slice.
    found = [
        (file, SliceRecord(name, record.dtype, shape, offset, record.shape))
        for file, offset, record in held
        if record.nbytes or len(held) == 1
    ]
    check_partition(repr(name), [record for _, record in found])
    return found
