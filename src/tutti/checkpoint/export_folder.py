"""Export weights to a folder in the layout of transformers, or of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from tutti.checkpoint.disk import on_disk, sync
from tutti.checkpoint.export import export_weights
from tutti.checkpoint.weights import SomeWeights, Weights, weights_hash, whole_tensor
from tutti.errors import UsageError

MOST_BYTES = 5 * 10**9
"""Largest shard, as that of ``save_pretrained``; a larger tensor is a shard by itself."""
_INDEX = "model.safetensors.index.json"


def export_hf_folder(
    weights: Weights, output: Path, metadata: Mapping[str, str], overwrite: bool = False, most: int = MOST_BYTES
) -> tuple[str, int]:
    """Write ``weights`` as ``save_pretrained`` of transformers does: ``model.safetensors``, or shards and an index.

    Files of an earlier export to the folder are replaced, and those that the new one does not have are deleted; other
    files, such as ``config.json``, stay. One tensor at a time is in memory. Each file is written atomically; an earlier
    index is deleted first and the new one written last, so that no index names shards of both exports.

    Args:
        weights: the weights to write, such as ``open_weights`` returns: named tensors, read on demand.
        output: the folder, which is made if it does not exist; its parent must exist.
        metadata: entries of each file's ``__metadata__``, beside ``format`` and the hash of its weights.
        overwrite: whether weights in the folder may be replaced.
        most: largest number of tensor bytes in a shard; a larger tensor has a shard of its own.

    Returns:
        A pair: the SHA-256 of all weights in hexadecimal (as ``weights_hash``), and the size of all safetensors files
        in bytes.

    Raises:
        UsageError: ``output`` is a file, or holds weights and ``overwrite`` is off.
        CheckpointError: a tensor cannot be read.
        DiskError: a file cannot be written; shards that were written before stay.
    """
    earlier = _earlier(output, overwrite)
    shards = _shards(weights, most)
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    names = names if len(shards) > 1 else ["model.safetensors"]
    with on_disk(output, "the weights"):
        output.mkdir(exist_ok=True)
        (output / _INDEX).unlink(missing_ok=True)
    size = 0
    for name, tensors in zip(names, shards, strict=True):
        size += export_weights(SomeWeights(weights, tensors), output / name, {"format": "pt", **metadata}, overwrite)[1]
    digest = weights_hash(weights)
    with on_disk(output, "the weights"):
        if len(shards) > 1:
            total = sum(record.nbytes for record in weights.records.values())
            places = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": total, "weights_sha256": digest}, "weight_map": places}
            temporary = output / f".{_INDEX}.{os.getpid()}.tmp"
            temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(temporary, output / _INDEX)
        for path in earlier - {output / name for name in names}:
            path.unlink(missing_ok=True)
        sync(output)
    return digest, size


def _earlier(output: Path, overwrite: bool) -> set[Path]:
    """Return files of weights in the folder. Raises UsageError where they may not be replaced."""
    if output.exists() and not output.is_dir():
        raise UsageError("a file has the name of the folder", where=str(output), remedy="choose another -o")
    found = {*output.glob("model.safetensors"), *output.glob("model-*-of-*.safetensors")}
    if (found or (output / _INDEX).exists()) and not overwrite:
        remedy = "choose another -o, or add --overwrite"
        raise UsageError("the folder holds weights already", where=str(output), remedy=remedy)
    return found


def _shards(weights: Weights, most: int) -> list[list[str]]:
    """Return names of tensors by shard, in the order of their names."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(weights.records):
        size = weights.records[name].nbytes
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def export_dcp_folder(weights: Weights, output: Path) -> tuple[str, int]:
    """Write ``weights`` as a checkpoint of ``torch.distributed.checkpoint``. Needs torch, and memory for all tensors.

    Local: this process alone writes all tensors; no process group is needed.

    Args:
        weights: the weights to write, such as ``open_weights`` returns: named tensors, read on demand.
        output: the new folder.

    Returns:
        A pair: the SHA-256 of all weights in hexadecimal (as ``weights_hash``), and the size of all files in bytes.

    Raises:
        UsageError: ``output`` exists.
        CheckpointError: a tensor cannot be read.
        DiskError: the files cannot be written; the part of the folder that was written before stays.
    """
    import torch.distributed.checkpoint as dcp

    from tutti.checkpoint.dtypes import tensor_from_bytes

    if output.exists():
        raise UsageError("the folder exists already", where=str(output), remedy="choose another -o")
    state = {name: tensor_from_bytes(whole_tensor(weights, name), r.dtype) for name, r in weights.records.items()}
    with on_disk(output, "the weights"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # there is one process
        writer = dcp.FileSystemWriter(output)
        dcp.save(state, storage_writer=writer, no_dist=True)
        size = sum(path.stat().st_size for path in output.iterdir())
    return weights_hash(weights), size
