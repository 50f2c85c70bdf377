"""Find the newest or best undamaged checkpoint of a run, and delete checkpoints that are no longer needed.

Checkpoints are found by reading manifests, never by following a ``latest`` link, which a crash can leave wrong.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tutti.checkpoint.disk import discard
from tutti.checkpoint.manifest import MANIFEST, Manifest
from tutti.checkpoint.read import load_manifest, verify
from tutti.errors import CheckpointError, DiskError

FOLDER = "checkpoints"
"""Name of the folder of checkpoints in a run directory."""

_UNFINISHED = re.compile(r"step-\d+(\.old)?\.tmp-.+")
_FINISHED = re.compile(r"step-\d+(\.old)?")


Score = Callable[[Mapping[str, Any]], float | None]
"""Maps the facts of a checkpoint's manifest to its score: higher is better, None for a checkpoint without a score."""


def newest_checkpoint(folder: Path) -> tuple[Manifest | None, list[str]]:
    """Return the newest intact checkpoint in a run's folder, and the error texts of damaged ones.

    A checkpoint is intact if its manifest is valid and all files have the hashes in it. Reads every byte of the
    checkpoint that it returns, so that one rank should call it and the others ``load_manifest``. Not collective.

    Args:
        folder: the run's ``checkpoints``.

    Returns:
        A tuple of the manifest (path, step, records of files and tensors, and ``facts``, the run's other state as
        JSON), None where there is no intact checkpoint; and a list with a text for each damaged checkpoint found.
    """
    return _trusted(*_scan(folder))


def best_checkpoint(folder: Path, score: Score) -> tuple[Manifest | None, list[str]]:
    """Return the intact checkpoint with the highest score, and the error texts of damaged ones.

    A checkpoint is intact if its manifest is valid and all files have the hashes in it. Of equal scores the newest
    checkpoint is taken; checkpoints without a score are left out.

    Args:
        folder: the run's ``checkpoints``.
        score: maps the ``facts`` of a manifest (the run's state beside its tensors, as JSON, with the held-out values
            of the step) to a score, higher is better; None for a checkpoint without one.

    Returns:
        A tuple of the manifest (path, step, ``facts``, records of files and tensors), None where no intact checkpoint
        has a score; and a list with a text for each damaged checkpoint found.
    """
    manifests, broken = _scan(folder)
    return _trusted(ranked(manifests, score), broken)


def scan(folder: Path) -> list[Manifest]:
    """Return the manifests of all checkpoints in a folder, newest first; no tensor file is read.

    Args:
        folder: a run's ``checkpoints``.

    Returns:
        A list of manifests (path, step, records of files and tensors, and ``facts``, the run's other state as JSON).
        Checkpoints whose manifest cannot be read are left out. A step occurs twice if a crash has interrupted the save
        that was to replace its checkpoint; the newer one comes first.
    """
    return _scan(folder)[0]


def other_folder(folder: Path) -> tuple[str, str] | None:
    """Describe a path that is no folder of checkpoints, such as a file or a run's directory, for an error.

    Args:
        folder: the path that a user has given as a run's ``checkpoints``.

    Returns:
        A pair of texts, the description of ``folder`` and a remedy, if it is a file, a single checkpoint, or the
        directory of a run, which has its checkpoints in a subfolder. None otherwise: a missing or empty folder may be
        that of a run that has yet to begin.
    """
    if folder.exists() and not folder.is_dir():
        remedy = "give the folder that run.save was given; load a file of torch.save by model.load_state_dict"
        return "it is a file", remedy
    if (folder / MANIFEST).exists():
        return "it is one checkpoint", f"give {folder.absolute().parent}, whose newest checkpoint is restored"
    if _scan(folder / FOLDER)[0]:
        return "it is the directory of a run", f"give {folder / FOLDER}"
    return None


def ranked(manifests: Iterable[Manifest], score: Score) -> list[Manifest]:
    """Return the manifests of checkpoints that have a score, highest first; equal scores keep their order.

    Args:
        manifests: manifests of checkpoints.
        score: maps a manifest's ``facts`` (the run's state beside its tensors, as JSON, with the held-out values of the
            step) to a number, higher is better, or to None for no score.

    Returns:
        The manifests themselves; those without a score are left out.
    """
    scored = [(worth, manifest) for manifest in manifests if (worth := score(manifest.facts)) is not None]
    return [manifest for _, manifest in sorted(scored, key=lambda pair: -pair[0])]


def last_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a folder whose manifest is valid; 0 if there is none.

    Tensor files are not read.

    Args:
        folder: a run's ``checkpoints``.
    """
    manifests, _ = _scan(folder)
    return manifests[0].step if manifests else 0


def prune(
    folder: Path,
    *,
    keep_last: int,
    keep_best: int = 0,
    score: Score | None = None,
    verified: set[Path] | None = None,
    progress: Callable[[], object] = lambda: None,
) -> list[str]:
    """Delete checkpoints that are no longer needed and leftovers of unfinished saves. Rank 0 only, never during a save.

    Kept are the newest and the best-scored checkpoints, as many as asked for. Their files are verified before anything
    is deleted: for a damaged one the next in the order is kept, too, and the damaged one itself stays on disk, as does
    a checkpoint whose manifest is unreadable. All other checkpoints are deleted without being verified.

    Args:
        folder: the run's ``checkpoints``.
        keep_last: number of newest intact checkpoints to keep, at least 1.
        keep_best: number of intact checkpoints with the highest ``score`` to keep besides.
        score: maps the ``facts`` of a manifest (the run's state beside its tensors, as JSON) to a score, higher is
            better; None for a checkpoint without one.
        verified: paths of checkpoints already verified, which are not read again; updated in place.
        progress: called after every mebibyte that is read.

    Returns:
        The error texts of damaged checkpoints.

    Raises:
        ValueError: ``keep_last`` below 1, or ``keep_best`` without ``score``.
        DiskError: a checkpoint or a leftover could not be deleted.
    """
    if keep_last < 1 or (keep_best and score is None):
        raise ValueError("keep_last must be 1 or more, and keep_best needs a score")
    manifests, broken = _scan(folder)
    known = set() if verified is None else verified
    keep = _first(keep_last, manifests, known, broken, progress)
    if score is not None:
        keep |= _first(keep_best, ranked(manifests, score), known, broken, progress)
    try:
        for manifest in reversed(manifests):
            if manifest.path not in keep:
                discard(manifest.path)
                known.discard(manifest.path)
        for path in _directories(folder):
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path)
    except OSError as error:
        raise DiskError("old checkpoints could not be deleted", where=str(folder), why=str(error)) from error
    return list(dict.fromkeys(broken))


def _trusted(manifests: Iterable[Manifest], broken: list[str]) -> tuple[Manifest | None, list[str]]:
    """Return the first checkpoint that verifies, and ``broken`` with the errors of those before it appended."""
    for manifest in manifests:
        if _verifies(manifest, broken):
            return manifest, broken
    return None, broken


def _first(
    count: int, manifests: Iterable[Manifest], known: set[Path], broken: list[str], progress: Callable[[], object]
) -> set[Path]:
    """Return the paths of the first ``count`` checkpoints of different steps that verify, and of damaged ones before.

    Args:
        count: number of undamaged checkpoints.
        manifests: in order of preference.
        known: paths already verified; updated in place.
        broken: error texts; appended to.
        progress: called after every mebibyte that is read.
    """
    found: set[Path] = set()
    steps: set[int] = set()
    for manifest in manifests:
        if len(steps) == count:
            break
        if manifest.step in steps:
            continue
        found.add(manifest.path)
        if manifest.path in known or _verifies(manifest, broken, progress):
            steps.add(manifest.step)
            known.add(manifest.path)
    return found


def _verifies(manifest: Manifest, broken: list[str], progress: Callable[[], object] = lambda: None) -> bool:
    try:
        verify(manifest.path, progress)
    except CheckpointError as error:
        broken.append(str(error))
        return False
    return True


def _scan(folder: Path) -> tuple[list[Manifest], list[str]]:
    """Return the manifests that can be read, newest first, and the error texts of the others."""
    found, broken = [], []
    for path in _directories(folder):
        if _UNFINISHED.fullmatch(path.name) or not (_FINISHED.fullmatch(path.name) or (path / MANIFEST).exists()):
            continue
        try:
            found.append(load_manifest(path))
        except CheckpointError as error:
            broken.append(str(error))
    # After a save that a crash interrupted, a step may have two checkpoints: the replaced one, ``.old``, comes second.
    found.sort(key=lambda manifest: (manifest.step, not manifest.path.name.endswith(".old")), reverse=True)
    return found, broken


def _directories(folder: Path) -> list[Path]:
    """Return the directories within ``folder`` without links; an empty list if it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
