"""A warm start: weights and buffers from elsewhere, and everything else of a fresh run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tutti.comm.communicator import Communicator
from tutti.errors import CheckpointError, TuttiError, UsageError
from tutti.state.source import open_weights, verified
from tutti.state.weights import Weights
from tutti.training.run import Run
from tutti.training.saved import Given, catalogue, check_model
from tutti.types import ShardSpec


def begin_with(run: Run, path: str | Path) -> str:
    """Give a fresh run the weights and buffers at ``path``: no step is taken back, no optimizer state is read.

    Rank 0 verifies every byte and compares names and shapes; then every rank reads its own part. An average of the
    weights begins there. Workers that train alone all begin with the same. Collective.

    Args:
        run: one that has not stepped.
        path: a run directory (its newest checkpoint that verifies), a checkpoint directory, or a safetensors file.

    Returns:
        The checkpoint directory or file that was read.

    Raises:
        UsageError: the run has stepped, or there is nothing at ``path``.
        CheckpointError: what is there is damaged, or of another model, which is said with all names.
    """
    if run.clock:
        raise UsageError("a run that has stepped cannot begin anew", where=f"step {run.clock}")
    own = catalogue(run)
    found = Path(_asked_of_first(run.setting.comms.world, lambda: str(_find(Path(path), own))))
    saved = Given(open_weights(found), run.replica.specs)
    run.exchange.load(saved)
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
    """A tensor that this model has once may be there under several names, but not with several values."""
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
    """What ``function`` gives on rank 0, on every rank; what it raises there is raised on all. Collective."""
    answer = None
    if comm.rank == 0:
        try:
            answer = {"value": function()}
        except TuttiError as error:
            kind = "usage" if isinstance(error, UsageError) else "checkpoint"
            answer = {"kind": kind, "said": [error.what, error.where, error.why, error.remedy]}
    answer = comm.broadcast_json(answer, 0, "initial weights")
    if "value" in answer:
        return answer["value"]
    what, where, why, remedy = answer["said"]
    raise (UsageError if answer["kind"] == "usage" else CheckpointError)(what, where=where, why=why, remedy=remedy)
