"""Read model size, data and final loss of finished runs, for a law of the loss. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import FINISHED, NonFiniteError, UsageError
from tutti.metrics.records import read_summary


@dataclass(frozen=True)
class LossEvidence:
    """Model size, data and final loss of one training run.

    Attributes:
        path: the run directory.
        parameters: number of parameters of the run's model.
        samples: number of samples that the model was trained on.
        loss: loss at the end of the run: held-out where the run has evaluated, else of training.
    """

    path: Path
    parameters: float
    samples: float
    loss: float


def loss_evidence(paths: Sequence[Path]) -> list[LossEvidence]:
    """Read model size, samples and final loss from the directories of finished runs of one task.

    The loss is the held-out one if the runs have evaluated, else the training loss.

    Args:
        paths: run directories of ``tutti train``.

    Returns:
        A ``LossEvidence`` for each path, in their order: ``path``, ``parameters`` (number of them), ``samples`` trained
        on, and ``loss``.

    Raises:
        UsageError: a run has not finished, by its ``summary.json``, or records no number of parameters, samples or
            loss above 0; runs are of several tasks; or only some were evaluated.
        NonFiniteError: a run has diverged, by its exit code.
    """
    summaries = {path: read_summary(path) for path in paths}
    for path, summary in summaries.items():
        if summary.get("exit_code") == NonFiniteError.exit_code:
            raise NonFiniteError(
                "the run diverged, so that its loss says nothing", where=str(path), remedy="leave it out"
            )
        if summary.get("exit_code") not in FINISHED:
            raise UsageError("the run has not finished", where=str(path), remedy="leave it out, or resume it")
    tasks = {str(summary.get("task")) for summary in summaries.values()}
    if len(tasks) > 1:
        raise UsageError(
            f"the runs are of several tasks: {', '.join(sorted(tasks))}", remedy="give runs of one task to --law"
        )
    evaluated = {path for path, summary in summaries.items() if (summary.get("eval") or {}).get("loss") is not None}
    if evaluated and len(evaluated) < len(paths):
        other = next(path for path in paths if path not in evaluated)
        raise UsageError(
            "some runs have a held-out loss, and others have none",
            where=str(other),
            remedy="give runs with --eval-every, or none of them",
        )
    found = []
    for path, summary in summaries.items():
        part = summary.get("eval" if evaluated else "train") or {}
        values = (summary.get("parameters"), summary.get("samples"), part.get("loss"))
        if not all(isinstance(v, int | float) and math.isfinite(v) and v > 0 for v in values):
            raise UsageError(
                "the run records no number of parameters, samples or loss above 0",
                where=str(path),
                remedy="leave it out",
            )
        found.append(LossEvidence(path, *(float(value) for value in values)))  # type: ignore[arg-type]
    return found
