"""Read weights and buffers of a checkpoint or file by their names in the plain model's state dict. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

from numpy.typing import NDArray

from tutti.checkpoint.manifest import REMEDY, Manifest, TensorRecord
from tutti.checkpoint.read import TensorReader
from tutti.checkpoint.tensorfile import DTYPES, SliceRecord
from tutti.errors import CheckpointError, UsageError, did_you_mean


class Weights(Protocol):
    """Named tensors of a model, in a checkpoint or file, that are read one at a time (protocol).

    Attributes:
        records: every tensor's dtype and shape, by name.
    """

    @property
    def records(self) -> Mapping[str, SliceRecord]:
        """Description of each tensor of the model by name: a ``SliceRecord`` with ``dtype`` and ``shape``.

        A record's shape is that of the whole tensor, not of this rank's slice. ``dtype`` is safetensors' name, such as
        ``BF16``. Exports, hashes and warm starts read this mapping before they read any tensor.
        """

    def region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        """Return a rectangular region of one tensor's elements, as unsigned integers of the same width.

        Warm starts call it for the slice of a rank, so that no rank reads tensors of which it keeps only a part.

        Args:
            name: name of the tensor, a key of ``records``.
            offset: index of the region's first element in the tensor, one number a dimension.
            shape: shape of the region.

        Returns:
            A read-only view of a file that is mapped into memory, or, where the region has no such file of its own, a
            new array.

        Raises:
            CheckpointError: the region does not lie within the tensor, or is unreadable.
        """


def whole_tensor(weights: Weights, name: str) -> NDArray[Any]:
    """Return a copy of one whole tensor's elements as unsigned integers of the same width, in the tensor's shape.

    Exports, hashes and warm starts call it for one tensor after the other. Bits are unchanged: a bfloat16 tensor, a
    dtype that NumPy lacks, becomes uint16. ``weights.records[name].dtype`` has the real dtype.

    Args:
        weights: the named tensors.
        name: name of the tensor, a key of ``weights.records``.

    Raises:
        CheckpointError: the tensor is unreadable.
    """
    shape = weights.records[name].shape
    found = weights.region(name, (0,) * len(shape), shape)
    return found if found.flags.writeable else found.copy()


class SavedWeights:
    """Weights and buffers of a checkpoint's model, read one at a time, with a tied tensor under each of its names.

    Args:
        manifest: the manifest of the verified checkpoint.
        ema: read the EMA of the weights instead; buffers are the model's own.

    Attributes:
        records: dtype and shape of each whole tensor, by name.

    Raises:
        CheckpointError: the checkpoint has no EMA, or its tied names are invalid.
    """

    def __init__(self, manifest: Manifest, ema: bool = False) -> None:
        self._reader = TensorReader(manifest)
        self._from: dict[str, tuple[str, str]] = {name: ("model", name) for name in manifest.tensors.get("model", {})}
        if ema:
            averages = manifest.tensors.get("ema", {})
            if not averages:
                raise CheckpointError(
                    "the checkpoint has no average of the weights",
                    where=str(manifest.path),
                    remedy="leave --ema out, or train with --ema",
                )
            self._from |= {name: ("ema", name) for name in averages}
        tied = manifest.facts.get("tied", {})
        if not isinstance(tied, dict) or not {*map(str, tied.values())} <= self._from.keys():
            raise CheckpointError(
                "the checkpoint's 'tied' names tensors that it does not have", where=str(manifest.path), remedy=REMEDY
            )
        for other, name in tied.items():
            self._from[other] = self._from[str(name)]
        found = {name: manifest.tensors[group][first] for name, (group, first) in self._from.items()}
        self.records: Mapping[str, SliceRecord] = {name: _record(name, record) for name, record in found.items()}

    def region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        """Read a region of one tensor, or of its EMA, from the files of the checkpoint that hold a part of it.

        Args:
            name: name of the tensor, a key of ``records``; tied tensors are found under each of their names.
            offset: index of the region's first element in the tensor, one number a dimension.
            shape: shape of the region.

        Returns:
            A new array of unsigned integers as wide as the tensor's elements, in the region's shape.

        Raises:
            CheckpointError: the region does not lie within the tensor, or a file differs from the manifest.
        """
        return self._reader.numbers(*self._from[name], offset, shape)


class SomeWeights:
    """Selection of the named tensors of a checkpoint or file; its tensors are read one at a time.

    Args:
        weights: all tensors of the checkpoint or file.
        names: names of the tensors to keep, keys of ``weights.records``.

    Attributes:
        records: dtype and shape of each selected tensor, by name.
    """

    def __init__(self, weights: Weights, names: Iterable[str]) -> None:
        self._weights = weights
        self.records: Mapping[str, SliceRecord] = {name: weights.records[name] for name in names}

    def region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        """Read a region of one tensor of this selection, as the checkpoint or file gives it (``Weights.region``).

        Args:
            name: name of a selected tensor, a key of ``records``.
            offset: index of the region's first element in the tensor, one number a dimension.
            shape: shape of the region.

        Raises:
            CheckpointError: the region does not lie within the tensor, or is unreadable.
        """
        return self._weights.region(name, offset, shape)


def matching_weights(weights: Weights, patterns: str) -> SomeWeights:
    """Return the tensors of ``weights`` whose names match a shell pattern (``fnmatch``), or one of several patterns.

    Args:
        weights: all tensors.
        patterns: a pattern, or several joined by ``+``, such as ``head.*+norm.*``.

    Returns:
        A ``SomeWeights``: ``records`` describes each selected tensor by name, and ``region(name, offset, shape)`` reads
        a part of one.

    Raises:
        UsageError: a pattern matches no name.
    """
    found: dict[str, None] = {}
    for pattern in patterns.split("+"):
        names = [name for name in weights.records if fnmatchcase(name, pattern)]
        if not names:
            remedy = did_you_mean(pattern, weights.records)
            raise UsageError(f"no tensor of the weights matches '{pattern}'", where="--only", remedy=remedy)
        found |= dict.fromkeys(names)
    return SomeWeights(weights, found)


class WeightsHash:
    """Computes the SHA-256 of a model's tensors incrementally: name, dtype, shape and little-endian bytes of each.

    Equal models have equal hashes, whatever the strategy or file that the tensors come from.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, dtype: str, shape: Sequence[int], data: Any) -> None:
        """Add a model's next tensor to the hash; the caller adds tensors in sorted order of their names.

        Args:
            name: the tensor's name in the model's state dict.
            dtype: PyTorch's name, such as ``float32``.
            shape: shape of the whole tensor.
            data: its bytes in C order, as a contiguous buffer.
        """
        self._digest.update(f"{name}\0{dtype}\0{list(shape)}\0".encode())
        self._digest.update(data)

    def hexdigest(self) -> str:
        """Return the SHA-256 of the model's tensors that were added so far, as 64 hexadecimal digits."""
        return self._digest.hexdigest()


def weights_hash(weights: Weights) -> str:
    """Return the SHA-256, in hexadecimal, over name, dtype, shape and bytes of all tensors in sorted order of names.

    Equal to ``fingerprint.weights_sha256`` of the same model; one tensor at a time is in memory.

    Args:
        weights: the tensors of a checkpoint or file.
    """
    digest = WeightsHash()
    for name in sorted(weights.records):
        record = weights.records[name]
        digest.add(name, DTYPES[record.dtype][0], record.shape, flat(whole_tensor(weights, name)))
    return digest.hexdigest()


def flat(numbers: NDArray[Any]) -> memoryview:
    """Return the bytes of an array as a one-dimensional memoryview, without a copy.

    Args:
        numbers: a C-contiguous array of any shape and dtype.
    """
    return numbers.reshape(-1).view("u1").data


def _record(name: str, record: TensorRecord) -> SliceRecord:
    return SliceRecord.whole(name, record.dtype, record.shape)
