"""The checkpoints of one run: which is the newest that can be trusted, and which are no longer needed.

What is there is found by reading manifests, never by following a ``latest`` link, which a crash can leave wrong.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tutti.errors import CheckpointError, DiskError
from tutti.state.disk import discard
from tutti.state.manifest import MANIFEST, Manifest
from tutti.state.read import load_manifest, verify

_UNFINISHED = re.compile(r"step-\d+(\.old)?\.tmp-.+")
_FINISHED = re.compile(r"step-\d+(\.old)?")


Score = Callable[[Manifest], float | None]
"""A checkpoint's worth, from its facts: the higher the better, None for one that has none."""


def newest(folder: Path) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint that verifies, None where there is none; and what is wrong with each newer one.

    Reads every byte of the checkpoint that it returns. On several ranks let one call it, and the others
    ``load_manifest``.
    """
    return _trusted(*_scan(folder))


def best(folder: Path, score: Score) -> tuple[Manifest | None, list[str]]:
    """As ``newest``, of those that have a score the one with the highest, of equals the newest."""
    manifests, broken = _scan(folder)
    return _trusted(ranked(manifests, score), broken)


def scan(folder: Path) -> list[Manifest]:
    """All checkpoints that can be read, newest first; what their files hold is not looked at."""
    return _scan(folder)[0]


def ranked(manifests: Iterable[Manifest], score: Score) -> list[Manifest]:
    """Those that have a score, the best first; equals stay in order."""
    scored = [(worth, manifest) for manifest in manifests if (worth := score(manifest)) is not None]
    return [manifest for _, manifest in sorted(scored, key=lambda pair: -pair[0])]


def last_step(folder: Path) -> int:
    """The step of the newest complete checkpoint, which is not read for it; 0 where there is none."""
    manifests, _ = _scan(folder)
    return manifests[0].step if manifests else 0


def prune(
    folder: Path,
    *,
    keep_last: int,
    keep_best: int = 0,
    score: Score | None = None,
    verified: set[Path] | None = None,
) -> list[str]:
    """Delete checkpoints that are no longer needed, and what unfinished saves left. Rank 0 only, while none is saving.

    Nothing is deleted before as many others as are to be kept have been verified. A damaged one neither counts nor is
    deleted, unless it is older than all that are kept.

    Args:
        folder: the run's ``checkpoints``.
        keep_last: how many of the newest to keep, at least 1.
        keep_best: how many of those with the highest ``score`` to keep besides.
        score: a checkpoint's worth; those without are not among the best.
        verified: those that are known to be good, not read again; those found good here join them.

    Returns:
        What is wrong with the damaged ones that were met.

    Raises:
        ValueError: ``keep_last`` below 1, or ``keep_best`` without ``score``.
        DiskError: something could not be deleted.
    """
    if keep_last < 1 or (keep_best and score is None):
        raise ValueError("keep_last must be 1 or more, and keep_best needs a score")
    manifests, broken = _scan(folder)
    known = set() if verified is None else verified
    keep = _first(keep_last, manifests, known, broken)
    if score is not None:
        keep |= _first(keep_best, ranked(manifests, score), known, broken)
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
    """The first that verifies; what is wrong with those before it joins ``broken``."""
    for manifest in manifests:
        if _verifies(manifest, broken):
            return manifest, broken
    return None, broken


def _first(count: int, manifests: Iterable[Manifest], known: set[Path], broken: list[str]) -> set[Path]:
    """The first ``count`` that verify, of different steps, and the damaged ones before them."""
    found: set[Path] = set()
    steps: set[int] = set()
    for manifest in manifests:
        if len(steps) == count:
            break
        if manifest.step in steps:
            continue
        found.add(manifest.path)
        if manifest.path in known or _verifies(manifest, broken):
            steps.add(manifest.step)
            known.add(manifest.path)
    return found


def _verifies(manifest: Manifest, broken: list[str]) -> bool:
    try:
        verify(manifest.path)
    except CheckpointError as error:
        broken.append(str(error))
        return False
    return True


def _scan(folder: Path) -> tuple[list[Manifest], list[str]]:
    """All checkpoints whose manifests can be read, newest first, and what is wrong with the others."""
    found, broken = [], []
    for path in _directories(folder):
        if _UNFINISHED.fullmatch(path.name) or not (_FINISHED.fullmatch(path.name) or (path / MANIFEST).exists()):
            continue
        try:
            found.append(load_manifest(path))
        except CheckpointError as error:
            broken.append(str(error))
    # Of two of one step, the one that was being replaced when a save was cut short comes second.
    found.sort(key=lambda manifest: (manifest.step, not manifest.path.name.endswith(".old")), reverse=True)
    return found, broken


def _directories(folder: Path) -> list[Path]:
    """Directories within ``folder``, links left out; none where it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
