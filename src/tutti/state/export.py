"""One plain safetensors file of a model's weights, for programs without tutti. No torch, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tutti.errors import UsageError
from tutti.state.disk import NEW, on_disk, sync
from tutti.state.hashing import WeightsHash
from tutti.state.plain import HASH
from tutti.state.tensorfile import DTYPES, file_layout
from tutti.state.weights import Weights, flat


def export(weights: Weights, output: Path, metadata: Mapping[str, str], overwrite: bool = False) -> tuple[str, int]:
    """Write ``weights`` to ``output``, which appears whole or not at all.

    Args:
        weights: what to write.
        output: the new file.
        metadata: what the file says of itself, beside the hash of its weights.
        overwrite: whether a file that is there may be replaced.

    Returns:
        ``weights_sha256`` and the file's size in bytes.

    Raises:
        UsageError: there is something already.
        CheckpointError: a tensor cannot be read.
        DiskError: the file cannot be written. Nothing of it is left, and what was there still is.
    """
    if output.is_dir() or (output.exists() and not overwrite):
        remedy = "choose another -o" if output.is_dir() else "choose another -o, or add --overwrite"
        raise UsageError("there is something already", where=str(output), remedy=remedy)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with on_disk(output, "the weights", remove=temporary):
        digest, size = _write(weights, temporary, metadata)
        os.replace(temporary, output)
        sync(output.parent)
    return digest, size


def _write(weights: Weights, path: Path, metadata: Mapping[str, str]) -> tuple[str, int]:
    # Wide elements first, as in safetensors: every tensor then starts at a multiple of its element's size.
    records = sorted(weights.records.values(), key=lambda record: (-record.itemsize, record.name))
    # The hash comes last and is as long as this one, so that the tensors' places do not depend on it.
    layout = file_layout(records, {**metadata, HASH: "0" * 64})
    begins = dict(zip((record.name for record in records), layout.begins, strict=True))
    digest = WeightsHash()
    descriptor = os.open(path, NEW, 0o666)
    try:
        for name in sorted(begins):
            record, data = weights.records[name], flat(weights.numbers(name))
            digest.add(name, DTYPES[record.dtype][0], record.shape, data)
            _put(descriptor, data, begins[name])
        _put(descriptor, memoryview(file_layout(records, {**metadata, HASH: digest.hexdigest()}).header), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest(), layout.size


def _put(descriptor: int, data: memoryview, begin: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, begin)
        data, begin = data[written:], begin + written
