"""Weights and buffers by the names of a plain model's state, wherever they lie. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from tutti.errors import CheckpointError
from tutti.state.hashing import WeightsHash
from tutti.state.manifest import REMEDY, Manifest, TensorRecord
from tutti.state.read import Reader
from tutti.state.tensorfile import DTYPES, SliceRecord


class Weights(Protocol):
    """A set of named tensors that can be read one at a time.

    Attributes:
        records: every tensor's dtype and shape, by name.
    """

    @property
    def records(self) -> Mapping[str, SliceRecord]: ...

    def numbers(self, name: str) -> NDArray[Any]:
        """One tensor as unsigned integers of its elements' width. Raises CheckpointError where it cannot be read."""


class SavedWeights:
    """The model of a checkpoint, a tied tensor under each of its names.

    Args:
        manifest: the checkpoint's, verified.
        ema: take the average of the weights instead; buffers are the model's own.

    Raises:
        CheckpointError: there is no average in it.
    """

    def __init__(self, manifest: Manifest, ema: bool = False) -> None:
        self._reader = Reader(manifest)
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
                "the checkpoint's 'tied' names no tensors of it", where=str(manifest.path), remedy=REMEDY
            )
        for other, name in tied.items():
            self._from[other] = self._from[str(name)]
        found = {name: manifest.tensors[group][first] for name, (group, first) in self._from.items()}
        self.records: Mapping[str, SliceRecord] = {name: _record(name, record) for name, record in found.items()}

    def numbers(self, name: str) -> NDArray[Any]:
        """One tensor; see ``Weights``."""
        shape = self.records[name].shape
        return self._reader.numbers(*self._from[name], (0,) * len(shape), shape)


def weights_hash(weights: Weights) -> str:
    """``weights_sha256`` of all tensors, of which one at a time is in memory."""
    digest = WeightsHash()
    for name in sorted(weights.records):
        record = weights.records[name]
        digest.add(name, DTYPES[record.dtype][0], record.shape, flat(weights.numbers(name)))
    return digest.hexdigest()


def flat(numbers: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array."""
    return numbers.reshape(-1).view("u1").data


def _record(name: str, record: TensorRecord) -> SliceRecord:
    return SliceRecord.whole(name, record.dtype, record.shape)
