"""Warm start: load weights and buffers from a checkpoint or file into a fresh run; all other state starts fresh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tutti.checkpoint.checkpoint_reader import WeightsReader, catalogue, check_model
from tutti.checkpoint.weights import Weights
from tutti.checkpoint.weights_source import open_weights, verified
from tutti.comm.communicator import Communicator
from tutti.errors import CheckpointError, TuttiError, UsageError
from tutti.train.run import Run
from tutti.types import ShardSpec


def load_warm_start(run: Run, path: str | Path) -> str:
    """Load the weights and buffers at ``path`` into a fresh run; no optimizer state is read.

    Rank 0 verifies every byte and compares names and shapes; then every rank reads its own slices. An EMA of the
    weights starts from them. Logical workers with their own parameters (local SGD) all start with the same. Collective.

    Args:
        run: a run that has taken no step.
        path: a run directory (its newest checkpoint that verifies), a checkpoint directory, or a safetensors file.

    Returns:
        The checkpoint directory or file that was read.

    Raises:
        UsageError: the run has stepped, or ``path`` holds no weights.
        CheckpointError: the weights are damaged or of another model; the error names the tensors that differ.
    """
    if run.clock:
        raise UsageError("a run that has already made steps cannot load initial weights", where=f"step {run.clock}")
    own = catalogue(run.replica, run.context.comms.model)
    found = Path(_asked_of_first(run.context.comms.world, lambda: str(_find(Path(path), own))))
    saved = WeightsReader(open_weights(found), run.replica.specs)
    run.gradient_sync.load(saved)
    if run.average is not None:
        run.average.load(saved, 0)
    return str(found)


def _find(path: Path, own: Mapping[str, ShardSpec]) -> Path:
    found = verified(path)
    weights = open_weights(found)
    check_model(own, {name: record.shape for name, record in weights.records.items()}, str(found))
    _check_tied(own, weights, found)
    return found


def _check_tied(own: Mapping[str, ShardSpec], weights: Weights, where: Path) -> None:
    """Raise CheckpointError where names that the model ties hold different values in ``weights``."""
    for name, spec in own.items():
        first, *others = [n for n in (name, *spec.tied) if n in weights.records]
        for other in others:
            same = weights.records[first].dtype == weights.records[other].dtype
            if not same or not np.array_equal(weights.numbers(first), weights.numbers(other)):
                raise CheckpointError(
                    "the checkpoint is of another model",
                    where=str(where),
                    why=f"{first} and {other} differ, which this model ties",
                    remedy="build the model that was saved",
                )


def _asked_of_first(comm: Communicator, function: Callable[[], Any]) -> Any:
    """Call ``function`` on rank 0, and return its result or raise its TuttiError on every rank.

    Collective: broadcasts from rank 0. An error other than UsageError is raised as CheckpointError.
    """
    answer = None
    if comm.rank == 0:
        try:
            answer = {"value": function()}
        except TuttiError as error:
            kind = "usage" if isinstance(error, UsageError) else "checkpoint"
            answer = {"kind": kind, "message": [error.what, error.where, error.why, error.remedy]}
    answer = comm.broadcast_json(answer, 0, "initial weights")
    if "value" in answer:
        return answer["value"]
    what, where, why, remedy = answer["message"]
    raise (UsageError if answer["kind"] == "usage" else CheckpointError)(what, where=where, why=why, remedy=remedy)
