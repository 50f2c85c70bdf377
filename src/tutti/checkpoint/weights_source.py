"""Open the weights of a warm start: a run, a checkpoint, a safetensors file or a folder of them. No torch."""

from __future__ import annotations

from pathlib import Path

from tutti.checkpoint.dcp_folder import DcpFolder, is_dcp_folder
from tutti.checkpoint.folder import FOLDER, newest_checkpoint, scan
from tutti.checkpoint.manifest import MANIFEST
from tutti.checkpoint.plain import PlainFile
from tutti.checkpoint.plain_folder import PlainFolder, is_plain_folder
from tutti.checkpoint.read import load_manifest, verify
from tutti.checkpoint.weights import SavedWeights, Weights
from tutti.errors import CheckpointError, UsageError


def check_source(path: Path) -> None:
    """Check that ``path`` is a run, a checkpoint, or a safetensors file or folder; tensors are not read.

    Args:
        path: where a run is to read its initial weights.

    Raises:
        UsageError: ``path`` does not exist, or is a directory of another kind.
        CheckpointError: a run without a checkpoint, a checkpoint with an invalid manifest, or a file with an invalid
            header.
    """
    if not path.exists():
        raise UsageError("there are no weights to start from", where=str(path), remedy=_REMEDY)
    if not path.is_dir():
        PlainFile(path)
    elif (path / MANIFEST).exists():
        load_manifest(path)
    elif (path / FOLDER).is_dir():
        if not scan(path / FOLDER):
            raise _nothing(path, [])
    elif is_plain_folder(path):
        _folder(path)
    else:
        raise UsageError("there are no weights to start from", where=str(path), remedy=_REMEDY)


def verified(path: Path) -> Path:
    """Return the checkpoint directory or file that ``path`` stands for, after verifying the hashes of its bytes.

    Of a file without a stored hash, only the header is checked.

    Args:
        path: a run directory, which stands for its newest intact checkpoint; a checkpoint directory; or a safetensors
            file or folder, which stands for itself.

    Raises:
        UsageError: ``path`` does not exist, or is a directory of another kind.
        CheckpointError: the run has no checkpoint, or the bytes are damaged.
    """
    check_source(path)
    if not path.is_dir():
        PlainFile(path).verify()
        return path
    if (path / MANIFEST).exists():
        return verify(path).path
    if not (path / FOLDER).is_dir():
        _folder(path).verify()
        return path
    manifest, broken = newest_checkpoint(path / FOLDER)
    if manifest is None:
        raise _nothing(path, broken)
    return manifest.path


def open_weights(path: Path) -> Weights:
    """Open the weights at ``path`` and return them as named tensors, which are read on demand.

    Headers are checked, hashes are not: ``verified`` does that.

    Args:
        path: a checkpoint directory, a safetensors file, or a folder of safetensors files.

    Returns:
        A ``Weights``: ``records`` describes each tensor by name (dtype and shape), and ``region(name, offset, shape)``
        reads a rectangular part of one as an array of unsigned integers.

    Raises:
        CheckpointError: this rank cannot read the weights, or a header is invalid.
    """
    if not path.is_dir():
        return PlainFile(path)
    return SavedWeights(load_manifest(path)) if (path / MANIFEST).exists() else _folder(path)


def _folder(path: Path) -> PlainFolder | DcpFolder:
    return DcpFolder(path) if is_dcp_folder(path) else PlainFolder(path)


def _nothing(path: Path, broken: list[str]) -> CheckpointError:
    why = "; ".join(broken[:3]) or "it has none"
    return CheckpointError("the run has no valid checkpoint", where=str(path), why=why, remedy=_REMEDY)


_REMEDY = "give a run directory, a checkpoint directory step-N, or a .safetensors file or a folder of them"
