"""Choose a checkpoint of a run for commands that read it: by step, the newest, or the best by a metric. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

from tutti.checkpoint.folder import FOLDER, best_checkpoint, newest_checkpoint, scan
from tutti.checkpoint.manifest import MANIFEST, Manifest
from tutti.checkpoint.read import verify
from tutti.config.best import BestMetric
from tutti.errors import CheckpointError, UsageError


def chosen_checkpoint(run: Path, step: str, warn: Callable[[str], None]) -> Manifest:
    """Return the manifest of one of a run's checkpoints, after comparing every byte with the hashes in the manifest.

    Args:
        run: a run directory, one of its checkpoints, or a folder that a script's ``run.save`` has filled.
        step: which checkpoint, as text: its step, ``newest``, ``best:NAME`` (by the held-out metric NAME) or ``best``
            (by the metric of the run's ``--keep-best``). Where ``run`` is a checkpoint, only ``newest`` is allowed.
        warn: called with a line on each damaged checkpoint that was passed over.

    Returns:
        A ``Manifest``: ``path`` and ``step`` of the checkpoint, ``facts`` (the run's other state as JSON), and records
        of files and tensors.

    Raises:
        UsageError: there is no such run, ``step`` is malformed, no checkpoint has this step, or ``best`` is given
            without a name and the run was trained without ``--keep-best``.
        CheckpointError: the checkpoint of this step or all checkpoints are damaged, none has been saved, or ``best`` is
            asked for and none has been evaluated.
    """
    if (run / MANIFEST).exists():
        if step != "newest":
            raise UsageError("--step needs a run directory", where=str(run), remedy="give the run directory")
        return verify(run)
    folder = run / FOLDER
    if not folder.is_dir():
        if not scan(run):
            raise UsageError(
                "there is no run with checkpoints",
                where=str(run),
                remedy="give a run directory, a checkpoint directory step-N, or the folder of a script's run.save",
            )
        folder = run
    if step.isdecimal():
        return _numbered(folder, int(step))
    if step == "newest":
        manifest, broken = newest_checkpoint(folder)
    elif step.partition(":")[0] == "best":
        manifest, broken = best_checkpoint(folder, _measure(run, step).score)
    else:
        raise UsageError(f"--step is '{step}'", remedy="give a step, best, best:NAME or newest")
    for text in broken:
        warn(f"ignored: {text}")
    if manifest is None:
        why, remedy = "none was evaluated so", "take --step newest, or train with --eval-every and --keep-best"
        if broken or step == "newest":
            why = "none can be trusted" if broken else "none was saved"
            remedy = "give another run; --checkpoint-every saves while a run trains, and not at its end alone"
        raise CheckpointError("there is no such checkpoint", where=str(folder), why=why, remedy=remedy)
    return manifest


def _numbered(folder: Path, step: int) -> Manifest:
    manifests = scan(folder)
    found = next((manifest for manifest in manifests if manifest.step == step), None)
    if found is None:
        there = ", ".join(str(manifest.step) for manifest in reversed(manifests)) or "none"
        raise UsageError(f"there is no checkpoint of step {step}", where=str(folder), remedy=f"there are: {there}")
    return verify(found.path)


def _measure(run: Path, step: str) -> BestMetric:
    """Return the metric of ``best``: from ``best:NAME``, or from the run's ``--keep-best``. Raises UsageError."""
    name = step.partition(":")[2]
    if not name:
        try:
            name = str(tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["keep_best"])
        except (OSError, ValueError, KeyError):
            raise UsageError(
                "the run was trained without --keep-best",
                where=str(run),
                remedy="give --step best:NAME, such as best:accuracy",
            ) from None
    return BestMetric.parse(name, "--step best")
