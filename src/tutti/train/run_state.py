"""Save and restore the facts that ``Run.save`` keeps beside the tensors: epoch, optimizer settings, user values."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from tutti.checkpoint.json_codec import decode_json, encode_json
from tutti.config.named_changes import NamedChanges
from tutti.errors import CheckpointError, UsageError, counted
from tutti.launcher import context
from tutti.optim.mixing import IMPLEMENTATION_OPTIONS
from tutti.optim.several import members_of
from tutti.train.run_checkpoints import Checkpoints

if TYPE_CHECKING:
    from tutti.train.run import Run


def saver(run: Run, folder: Path, keep: int = 2) -> Checkpoints:
    """Return the ``Checkpoints`` with which ``Run.save`` writes checkpoints into ``folder`` and deletes old ones.

    The first call for a folder and ``keep`` creates the object, which is collective over all ranks (broadcasts); later
    calls return the same object and send nothing. Its saves raise at the first failure.

    Args:
        run: the run to save.
        folder: folder of the checkpoints.
        keep: number of newest checkpoints to keep.

    Returns:
        A ``Checkpoints``, with the methods ``save`` and ``restore``.
    """
    key = folder.absolute(), keep
    if key not in run.savers:
        run.savers[key] = Checkpoints(run, folder, context.current(), checkpoint_identity(run), keep, warnings.warn, 1)
    return run.savers[key]


def checkpoint_identity(run: Run) -> dict[str, Any]:
    """Return the settings of a run that ``restore`` compares with a checkpoint's, by key, and a hash of them.

    Args:
        run: the run that is saved or restored.

    Returns:
        JSON values with the keys ``workers`` (number of logical workers, the fixed shares of a global batch),
        ``global_batch_size`` (samples of a step over all ranks), ``batch_growth`` (text of the schedule by which the
        global batch grows, such as ``30ep,factor=5``; None without one), ``training_samples`` (size of the data set),
        ``seed``, ``optimizer_class`` (class names joined by ``+``; absent without an optimizer), ``clip`` (largest norm
        of a gradient; None for no clipping) and ``config_sha256``, the SHA-256 in hexadecimal of the JSON text of the
        entries before ``clip``.
    """
    contract = run.feed.contract
    known: dict[str, Any] = {
        "workers": contract.workers,
        "global_batch_size": contract.batch,
        "batch_growth": None if run.feed.epochs.growth is None else str(run.feed.epochs.growth),
        "training_samples": contract.dataset,
        "seed": run.feed.seed,
    }
    if run.optimizer is not None:
        known["optimizer_class"] = "+".join(type(each).__name__ for each in members_of(run.optimizer))
    return {
        **known,
        "clip": run.context.clip,
        "config_sha256": hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest(),
    }


def run_facts(run: Run, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a checkpoint of ``Run.save`` holds beside tensors and settings, for ``restore_run``.

    Args:
        run: the run to save.
        extra: the script's own values, by name.

    Returns:
        JSON values with the keys ``within`` (number of the epoch whose loop the run is in, or None), ``settings`` (a
        dict of options, such as ``lr``, for each parameter group), ``schedulers`` and ``callbacks`` (lists of their
        states), ``callback_names`` and ``extra``.

    Raises:
        UsageError: ``extra``, or the state of a scheduler or callback, holds another value than numbers, texts, None,
            and lists, tuples and dicts of them.
    """
    return {
        "within": run.open_epoch,
        **optimizer_facts(run),
        "callbacks": run.callbacks.facts(),
        "callback_names": run.callbacks.names(),
        "extra": encode_json(dict(extra), "extra"),
    }


def optimizer_facts(run: Run) -> dict[str, Any]:
    """Return the settings of a run's own optimizers and the states of its schedulers, for a checkpoint.

    Args:
        run: the run to save.

    Returns:
        JSON values: ``settings`` (a dict of options for each parameter group, without the learning rate where a
        schedule of the run sets it; empty for an optimizer that was given as options) and ``schedulers`` (a list of
        their states).

    Raises:
        UsageError: the state of a scheduler holds a value that JSON cannot hold.
    """
    groups = [] if run.optimizer is None else [_settings(group) for group in run.optimizer.param_groups]
    for group in groups if run.lr_schedule is not None else ():
        for key in ("lr", "initial_lr"):
            group.pop(key, None)
    return {"settings": groups, "schedulers": run.schedulers.facts()}


def restore_optimizers(run: Run, saved: Mapping[str, Any], named: NamedChanges) -> None:
    """Restore the options of the script's optimizers, and the states of its schedulers, from a checkpoint's facts.

    Options are the entries of parameter groups, such as ``lr``; the optimizer's tensors (moments) are restored
    elsewhere. An optimizer that ``tutti.prepare`` was given as options keeps its own. The options ``fused``,
    ``foreach`` and ``capturable``, which choose a kernel and not the update, keep the script's values. Not collective.

    Args:
        run: the run to restore.
        saved: the checkpoint's facts, with the keys that ``optimizer_facts`` returns; nothing is restored where it has
            no ``settings``.
        named: the settings of ``--change``: options of these names, such as ``lr``, keep the script's values, and
            ``initial_lr`` does with ``lr``.

    Raises:
        CheckpointError: the number of parameter groups or schedulers differs.
    """
    if "settings" not in saved:
        return
    run.schedulers.load(saved)
    if run.optimizer is not None:
        _set(run.optimizer, decode_json(saved["settings"]), named)


def restore_run(run: Run, saved: Mapping[str, Any], named: NamedChanges) -> dict[str, Any]:
    """Restore a run's epoch, optimizer settings, schedulers and callbacks from the facts of a checkpoint.

    ``Run.restore`` calls this after ``Checkpoints.restore``, which has restored tensors and the position in the data. A
    checkpoint of ``tutti train`` has such facts only of a task's own optimizer; otherwise the optimizer's settings stay
    as they are.

    Args:
        run: the run to restore.
        saved: the checkpoint's facts, with the keys that ``run_facts`` returns.
        named: names of optimizer settings, such as ``lr``, that keep the script's values.

    Returns:
        The script's own values, ``extra`` as ``Run.save`` was given it; empty for a checkpoint without them.

    Raises:
        CheckpointError: the number of parameter groups or schedulers, or the callbacks, differ.
    """
    run.open_epoch = saved.get("within")
    restore_optimizers(run, saved, named)
    if "settings" in saved:
        run.callbacks.load(saved)
    extra: dict[str, Any] = decode_json(saved.get("extra", {}))
    return extra


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's settings that JSON can hold, such as the learning rate that a scheduler has set.

    Other values, and the choice of a kernel, which another device may not have, are left out: the script sets them.
    """
    kept = {}
    for key, value in group.items():
        if key not in ("params", *IMPLEMENTATION_OPTIONS):
            try:
                kept[key] = encode_json(value.item() if isinstance(value, Tensor) else value, key)
            except (UsageError, RuntimeError):
                continue
    return kept


def _set(optimizer: Optimizer, settings: list[dict[str, Any]], named: NamedChanges) -> None:
    if len(settings) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {counted(len(settings), 'parameter group')}, not "
            f"{len(optimizer.param_groups)}",
            remedy="make the optimizer as it was made when the run was saved",
        )
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            if named.covers(key) or key in IMPLEMENTATION_OPTIONS:
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
