"""Weights to begin with, from wherever a user says that they are. No torch."""

from __future__ import annotations

from pathlib import Path

from tutti.errors import CheckpointError, UsageError
from tutti.state.folder import newest, scan
from tutti.state.manifest import MANIFEST
from tutti.state.plain import PlainFile
from tutti.state.read import load_manifest, verify
from tutti.state.weights import SavedWeights, Weights

FOLDER = "checkpoints"
"""Where a run directory has its checkpoints."""


def check_source(path: Path) -> None:
    """Refuse what cannot be weights, without reading them.

    Raises:
        UsageError: there is nothing, or something that is none of the three.
        CheckpointError: it is a run without a checkpoint, a checkpoint whose manifest cannot be used, or a file whose
            header cannot.
    """
    if not path.exists():
        raise UsageError("there are no weights to begin with", where=str(path), remedy=_REMEDY)
    if not path.is_dir():
        PlainFile(path)
    elif (path / MANIFEST).exists():
        load_manifest(path)
    elif (path / FOLDER).is_dir():
        if not scan(path / FOLDER):
            raise _nothing(path, [])
    else:
        raise UsageError("there are no weights to begin with", where=str(path), remedy=_REMEDY)


def verified(path: Path) -> Path:
    """The checkpoint directory or file that ``path`` stands for, every byte of it read and as it was written.

    Of a run directory the newest checkpoint that verifies. Of a file that states no hash only the header is checked.
    Raises as ``check_source``, and CheckpointError for damage.
    """
    check_source(path)
    if not path.is_dir():
        PlainFile(path).verify()
        return path
    if (path / MANIFEST).exists():
        return verify(path).path
    manifest, broken = newest(path / FOLDER)
    if manifest is None:
        raise _nothing(path, broken)
    return manifest.path


def open_weights(path: Path) -> Weights:
    """The weights at what ``verified`` gave. Raises CheckpointError where they cannot be read here."""
    return SavedWeights(load_manifest(path)) if path.is_dir() else PlainFile(path)


def _nothing(path: Path, broken: list[str]) -> CheckpointError:
    why = "; ".join(broken[:3]) or "it has none"
    return CheckpointError("the run has no checkpoint that can be used", where=str(path), why=why, remedy=_REMEDY)


_REMEDY = "give a run directory, a checkpoint directory step-N, or a .safetensors file"
