"""What ``Run.save`` keeps beside the tensors, and how ``Run.restore`` takes it back."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from tutti.errors import CheckpointError, UsageError
from tutti.training.checkpoint import Checkpoints
from tutti.training.extra import decode, encode
from tutti.world import context

if TYPE_CHECKING:
    from tutti.training.run import Run


def saver(run: Run, folder: Path, keep: int = 2) -> Checkpoints:
    """What writes and reads ``folder``, made once; one save that fails is an error. Collective."""
    key = folder.absolute(), keep
    if key not in run.savers:
        run.savers[key] = Checkpoints(run, folder, context.current(), identity(run), keep, warnings.warn, 1)
    return run.savers[key]


def identity(run: Run) -> dict[str, Any]:
    """What a checkpoint must have been made with to be this run's."""
    contract = run.feed.contract
    known: dict[str, Any] = {
        "workers": contract.workers,
        "global_batch_size": contract.batch,
        "batch_growth": None if run.feed.epochs.growth is None else str(run.feed.epochs.growth),
        "training_samples": contract.dataset,
        "seed": run.feed.seed,
    }
    if run.optimizer is not None:
        known["optimizer_class"] = getattr(type(run.optimizer), "_ungated", type(run.optimizer)).__name__
    return {**known, "config_sha256": hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()}


def facts(run: Run, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Which epoch's loop the run is in, its optimizer's settings, and ``extra``, as JSON."""
    return {
        "within": run.within,
        "settings": [] if run.optimizer is None else [_settings(group) for group in run.optimizer.param_groups],
        "extra": encode(dict(extra), "extra"),
    }


def become(run: Run, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Take over what ``facts`` gave; returns ``extra``. A checkpoint of ``tutti train`` says less, which is enough."""
    run.within = saved.get("within")
    if run.optimizer is not None and "settings" in saved:
        _set(run.optimizer, decode(saved["settings"]))
    extra: dict[str, Any] = decode(saved.get("extra", {}))
    return extra


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's numbers and texts, such as the learning rate that a scheduler has set; the rest is the script's own."""
    kept = {}
    for key, value in group.items():
        if key != "params":
            try:
                kept[key] = encode(value.item() if isinstance(value, Tensor) else value, key)
            except (UsageError, RuntimeError):
                continue
    return kept


def _set(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    if len(settings) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(settings)} parameter groups, not {len(optimizer.param_groups)}",
            remedy="make the optimizer as it was made when the run was saved",
        )
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
