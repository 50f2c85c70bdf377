"""Export a model's weights to one plain safetensors file for other programs. No torch, one tensor in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tutti.checkpoint.disk import NEW, on_disk, sync
from tutti.checkpoint.plain import HASH
from tutti.checkpoint.tensorfile import DTYPES, file_layout
from tutti.checkpoint.weights import Weights, WeightsHash, flat, whole_tensor
from tutti.errors import UsageError


def export_weights(
    weights: Weights, output: Path, metadata: Mapping[str, str], overwrite: bool = False
) -> tuple[str, int]:
    """Write ``weights`` to the safetensors file ``output`` atomically; one tensor at a time is in memory.

    Args:
        weights: the weights to write, such as ``open_weights`` returns: named tensors, read on demand.
        output: the new file.
        metadata: entries of the header's ``__metadata__``, beside the hash of the weights.
        overwrite: whether an existing file may be replaced.

    Returns:
        A pair: the SHA-256 of the weights in hexadecimal (as ``weights_hash``), and the file's size in bytes.

    Raises:
        UsageError: ``output`` is a directory, or exists and ``overwrite`` is off.
        CheckpointError: a tensor cannot be read.
        DiskError: the file cannot be written. No part of it is left, and an existing file is intact.
    """
    if output.is_dir() or (output.exists() and not overwrite):
        remedy = "choose another -o" if output.is_dir() else "choose another -o, or add --overwrite"
        raise UsageError("the file exists already", where=str(output), remedy=remedy)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with on_disk(output, "the weights", remove=temporary):
        digest, size = _write(weights, temporary, metadata)
        os.replace(temporary, output)
        sync(output.parent)
    return digest, size


def _write(weights: Weights, path: Path, metadata: Mapping[str, str]) -> tuple[str, int]:
    # Wide elements first, as in safetensors: every tensor then starts at a multiple of its element's size.
    records = sorted(weights.records.values(), key=lambda record: (-record.itemsize, record.name))
    # The hash is written last; the placeholder is as long as it, so that the tensors' offsets do not depend on it.
    layout = file_layout(records, {**metadata, HASH: "0" * 64})
    begins = dict(zip((record.name for record in records), layout.begins, strict=True))
    digest = WeightsHash()
    descriptor = os.open(path, NEW, 0o666)
    try:
        for name in sorted(begins):
            record, data = weights.records[name], flat(whole_tensor(weights, name))
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
