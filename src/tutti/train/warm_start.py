"""Warm start: load weights and buffers from a checkpoint or file into a fresh run; all other state starts fresh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tutti.checkpoint.checkpoint_reader import WeightsReader, catalogue, check_model
from tutti.checkpoint.gather import gathered_model
from tutti.checkpoint.weights import Weights, whole_tensor
from tutti.checkpoint.weights_source import open_weights, verified
from tutti.comm.broadcast import broadcast_result
from tutti.comm.communicator import Communicator
from tutti.config.init_map import FittedWeights, InitMap
from tutti.errors import CheckpointError, UsageError
from tutti.train.run import Run
from tutti.types.shard_spec import ShardSpec

_OTHER_NAMES = (
    "; if transformers renames the tensors when it loads them, load the model by from_pretrained before tutti.prepare,"
    " or write the folder once more by model.save_pretrained(FOLDER, save_original_format=False)"
)
"""End of the remedy for a folder of transformers, which may have other names than the model."""


@dataclass(frozen=True)
class WarmStart:
    """Record of the weights from which a run began; ``str`` gives path and differences as a text.

    Attributes:
        path: the checkpoint directory, file or folder that was read.
        fitted: names of the tensors in which source and model differ, as ``init_map`` allowed: unused, new or of
            another shape.
    """

    path: str
    fitted: FittedWeights

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.path, self.fitted.text())))


class _RenamedWeights:
    """Weights whose tensors have the model's names."""

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        self._weights, self._names = weights, names
        self.records = {name: weights.records[old] for name, old in names.items()}

    def region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        return self._weights.region(self._names[name], offset, shape)


def find_warm_start(
    comm: Communicator, path: Path, own: Mapping[str, ShardSpec], init_map: InitMap | None = None
) -> WarmStart:
    """Verify the weights at ``path`` and compare their names and shapes with a model's, on one rank for all.

    Collective: the first rank of ``comm`` reads every byte, and broadcasts the outcome.

    Args:
        comm: all ranks of the job.
        path: a run directory (its newest intact checkpoint), a checkpoint directory, a safetensors file, or a folder of
            such files.
        own: shape and tied names of each tensor of the whole model, by its first name.
        init_map: renames of the saved tensors, and differences that are allowed; default: none.

    Returns:
        A ``WarmStart``: ``path``, the text of the path to read, and ``fitted``, the differences that ``init_map``
        allowed.

    Raises:
        UsageError: ``path`` holds no weights, or ``init_map`` names tensors that do not exist.
        CheckpointError: the weights are damaged or of another model; the error names the tensors that differ.
    """
    found = broadcast_result(comm, 0, partial(_find, path, own, init_map or InitMap()), "initial weights")
    return WarmStart(found["path"], FittedWeights(**found["fitted"]))


def open_warm_start(begun: WarmStart, init_map: InitMap | None = None) -> Weights:
    """Open weights that ``find_warm_start`` has found, as named tensors that are read on demand.

    Args:
        begun: the weights.
        init_map: the same as in ``find_warm_start``; the tensors have the names that it gives them.

    Raises:
        CheckpointError: this rank cannot read the weights.
    """
    return _renamed(open_weights(Path(begun.path)), init_map or InitMap())


def load_warm_start(
    run: Run, path: str | Path, init_map: InitMap | None = None, begun: WarmStart | None = None
) -> WarmStart:
    """Load the weights and buffers at ``path`` into a run before its first step; no optimizer state is read.

    Collective over all ranks. Rank 0 verifies every byte, compares names and shapes, and broadcasts the outcome; then
    every rank reads its own slices (``GradientSync.load``). A moving average of the weights (EMA) starts from the
    loaded ones. Replicas with their own parameters (local SGD) all start with the same weights.

    Args:
        run: a run that has taken no step.
        path: a run directory (its newest intact checkpoint), a checkpoint directory, a safetensors file, or a folder of
            such files.
        init_map: renames of the saved tensors, and differences that are allowed; default: none.
        begun: the result of ``find_warm_start`` for ``path`` and the whole model; None to find it now.

    Returns:
        A ``WarmStart``: ``path``, the text of the path that was read, and ``fitted``, the differences between the
        tensors there and the model's that ``init_map`` allowed; ``str`` of it gives both as a text.

    Raises:
        UsageError: the run has stepped, ``path`` holds no weights, or ``init_map`` names tensors that do not exist.
        CheckpointError: the weights are damaged or of another model; the error names the tensors that differ.
    """
    if run.global_step:
        raise UsageError(
            "a run that has already made steps cannot load initial weights", where=f"step {run.global_step}"
        )
    if begun is None:
        own = catalogue(run.replica, run.context.comms.model)
        begun = find_warm_start(run.context.comms.world, Path(path), own, init_map)
    saved = WeightsReader(open_warm_start(begun, init_map), run.replica.specs, _initial(run, begun.fitted.kept))
    run.gradient_sync.load(saved)
    if run.average is not None:
        run.average.load(saved, 0)
    return begun


def _find(path: Path, own: Mapping[str, ShardSpec], init_map: InitMap) -> dict[str, Any]:
    found = verified(path)
    weights = _renamed(open_weights(found), init_map)
    saved = {name: record.shape for name, record in weights.records.items()}
    shapes, tied = ({name: getattr(s, key) for name, s in own.items()} for key in ("shape", "tied"))
    fitted = init_map.fit(shapes, tied, saved)
    others = {*fitted.unused, *(other for name in fitted.reshaped for other in (name, *own[name].tied))}
    check_model(
        {name: spec for name, spec in own.items() if name not in fitted.kept},
        {name: shape for name, shape in saved.items() if name not in others},
        str(found),
        "build the model that was saved, or allow the differences by init_map: rename=OLD:NEW,new=PATTERN,"
        "unused=PATTERN,reshaped=PATTERN" + (_OTHER_NAMES if (found / "config.json").exists() else ""),
    )
    _check_tied({name: spec for name, spec in own.items() if name not in fitted.kept}, weights, found)
    return {"path": str(found), "fitted": fitted._asdict()}


def _renamed(weights: Weights, init_map: InitMap) -> Weights:
    return _RenamedWeights(weights, init_map.names(weights.records)) if init_map.rename else weights


def _initial(run: Run, names: list[str]) -> dict[str, Tensor]:
    """Return whole tensors of the model as the run was built, on the CPU. Collective."""
    whole = (
        gathered_model(run.replica, run.context.comms, run.gradient_sync.merged(), run.context.mesh.at("shard") == 0)
        if names
        else {}
    )
    return {name: whole[name].detach().cpu().clone() for name in names}


def _check_tied(own: Mapping[str, ShardSpec], weights: Weights, where: Path) -> None:
    """Raise CheckpointError where names that the model ties hold different values in ``weights``."""
    for name, spec in own.items():
        first, *others = [n for n in (name, *spec.tied) if n in weights.records]
        for other in others:
            same = weights.records[first].dtype == weights.records[other].dtype
            if not same or not np.array_equal(whole_tensor(weights, first), whole_tensor(weights, other)):
                raise CheckpointError(
                    "the checkpoint is of another model",
                    where=str(where),
                    why=f"{first} and {other} differ, which this model ties",
                    remedy="build the model that was saved",
                )
