"""Compare a checkpoint with the run that resumes it, and apply the changes that the user has named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tutti.checkpoint.json_codec import encode_json
from tutti.checkpoint.manifest import Manifest
from tutti.config.named_changes import BETWEEN_EPOCHS, NamedChanges, SettingDifference
from tutti.config.optimizer_config import ImportedOptimizerConfig, OptimizerChoice
from tutti.data.epochs import EarlierEpochs
from tutti.errors import CheckpointError, UsageError
from tutti.optim.mixing import IMPLEMENTATION_OPTIONS

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tutti.train.run import Run

SETTINGS = "optimizer_settings"
EARLIER = "earlier_epochs"
CHANGES = "changes"

_FACTS = {
    "global_batch_size": "batch_size",
    "batch_growth": "batch_growth",
    "training_samples": "data",
    "seed": "seed",
    "schedule": "schedule",
    "clip": "clip",
    "lr_scale": "lr_scale",
    "optimizer_class": "optimizer_class",
}


def optimizer_settings(trainer: Sequence[Optimizer] | OptimizerChoice) -> list[dict[str, Any]]:
    """Return the options of each of the optimizer's parameter groups, as a JSON value for comparisons on resuming.

    Args:
        trainer: the script's optimizers, or the optimizer options of the configuration.

    Returns:
        A list with a dict of values by option name, such as ``lr``, for each parameter group in order; for options of
        the configuration a list of one dict. The values are those at the time of the call.
    """
    if isinstance(trainer, OptimizerChoice):
        chosen = trainer.options
        given = {"lr": chosen.lr, **chosen.options} if isinstance(chosen, ImportedOptimizerConfig) else None
        return [_plain(dataclasses.asdict(chosen) if given is None else given)]
    return [_plain(group) for each in trainer for group in each.param_groups]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that JSON can hold; others, and the choice of a kernel, are not compared."""
    kept = {}
    for key, value in group.items():
        if key in ("params", "param_names", *IMPLEMENTATION_OPTIONS):
            continue
        number = value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1 else value
        try:
            kept[key] = encode_json(number, key)
        except (UsageError, RuntimeError):
            continue
    return kept


def find_differences(facts: Mapping[str, Any], run_facts: Mapping[str, Any], run: Run) -> list[SettingDifference]:
    """Return the settings that a checkpoint and the run that resumes it both state, with different values.

    Settings are those of the run, such as batch size and seed, and the options of each parameter group.

    Args:
        facts: the checkpoint's settings by key, such as ``global_batch_size`` and ``seed``.
        run_facts: the run's settings by the same keys.
        run: the run, for the settings of its optimizer.

    Returns:
        A list of ``SettingDifference``s: ``name``, ``saved`` and ``now`` (the two values; for an option of a parameter
        group texts, with the group's index if there are several); settings of the run first, then options of parameter
        groups, each sorted by name. Options are left out if the optimizers differ in class or number of groups, and
        ``lr_scale`` if AdaScale begins or ends, which the load of its state refuses.
    """
    found = [
        SettingDifference(name, facts[key], run_facts[key])
        for key, name in _FACTS.items()
        if key in facts and key in run_facts and facts[key] != run_facts[key]
    ]
    # To begin or end with adascale is refused where its state is loaded.
    found = [each for each in found if each.name != "lr_scale" or "adascale" not in (each.saved, each.now)]
    saved, mine = facts.get(SETTINGS, []), run.settings.optimizer_settings
    # Another class or number of groups is refused elsewhere.
    alike = facts.get("optimizer_class") == run_facts.get("optimizer_class") and len(saved) == len(mine)
    for number, (before, now) in enumerate(zip(saved, mine, strict=True) if alike else ()):
        where = f" of group {number}" if len(mine) > 1 else ""
        for key in before.keys() & now.keys():
            if before[key] != now[key]:
                found.append(SettingDifference(key, f"{before[key]}{where}", f"{now[key]}{where}"))
    return sorted(found, key=lambda each: (each.name not in _FACTS.values(), each.name))


def refuse_unnamed(differences: Sequence[SettingDifference], named: NamedChanges, where: str) -> None:
    """Check that the user has named, by ``--change``, every setting in which a resumed run differs from its checkpoint.

    Args:
        differences: all settings that differ.
        named: names of the settings that the user allows to differ.
        where: path of the checkpoint, for the error.

    Raises:
        CheckpointError: a setting differs that is not named; the error states both values of each such setting.
    """
    wrong = [each for each in differences if not named.covers(each.name)]
    if not wrong:
        return
    names = ",".join(dict.fromkeys(each.name for each in wrong if each.name not in ("optimizer_class", "batch_growth")))
    change = f"name what changes, --change {names} (in a script run.restore(folder, change='{names}')), " * bool(names)
    raise CheckpointError(
        f"the checkpoint was made with {'; '.join(map(str, wrong))}",
        where=where,
        remedy=f"resume with the same settings, {change}or start a new run in another folder",
    )


def check_changes(manifest: Manifest, differences: Sequence[SettingDifference], run: Run) -> None:
    """Check that the settings that the user changes on resuming can change at this point and in this run.

    Batch size, data and seed can change only at the end of an epoch. In a run with batch growth, AdaScale or a strategy
    that has options in epochs, batch size and data cannot change at all. Other settings are not checked here.

    Args:
        manifest: the checkpoint.
        differences: the settings that change, all of them named by the user (``--change``).
        run: the run that resumes.

    Raises:
        CheckpointError: a setting cannot change.
    """
    names = [each.name for each in differences]
    reordered = [name for name in names if name in BETWEEN_EPOCHS]
    if not reordered:
        return
    position = manifest.facts["position"]
    what, where = " and ".join(reordered), str(manifest.path)
    if position["batch"]:
        raise CheckpointError(
            f"{what} can change only between two epochs",
            where=where,
            why=f"the checkpoint is within epoch {position['epoch'] + 1}, after {position['batch']} of its batches, "
            "and the epoch's other samples would be repeated or lost",
            remedy="resume from the checkpoint of an epoch's end (--checkpoint-every 1ep, in a script run.save after "
            f"the loop over an epoch), or train with the old settings up to the end of epoch {position['epoch'] + 1}",
        )
    if reordered == ["seed"]:
        return
    reason = None
    if run.feed.epochs.growth is not None:
        reason = "batch growth plans the batches of all epochs"
    elif run.adascale is not None:
        reason = "adascale counts steps of one worker's share of the batch"
    elif run.settings.epochs_as_steps:
        reason = "the strategy has counted epochs of its options in steps of this batch"
    if reason is not None:
        raise CheckpointError(
            f"{what} cannot change in this run", where=where, why=reason, remedy="start a new run with --init-from"
        )


def apply_changes(manifest: Manifest, differences: Sequence[SettingDifference], run: Run) -> None:
    """Record in a resumed run the settings that were changed on resuming, now or in earlier resumes.

    Called on every rank after the checkpoint has been restored; not collective. If batch size or data were changed,
    ``run.feed`` gets the batch size and the number of samples of the epochs before each change (``Feed.follow``), so
    that steps and samples of these epochs are counted as they were. ``run.changes`` becomes the checkpoint's list of
    changes; if ``differences`` has any, ``{"step": …, "changed": {name: [saved, now]}}`` is appended.

    Args:
        manifest: the checkpoint's manifest.
        differences: the settings that change now, checked by ``check_changes``.
        run: the run, restored to the checkpoint's position.
    """
    facts = manifest.facts
    earlier = [EarlierEpochs(*each) for each in facts.get(EARLIER, [])]
    epoch = facts["position"]["epoch"]
    if epoch and any(each.name in ("batch_size", "data") for each in differences):
        batch, samples = (facts.get(key) for key in ("global_batch_size", "training_samples"))
        contract = run.feed.contract
        earlier.append(EarlierEpochs(epoch, batch or contract.batch, samples or contract.dataset))
    if earlier:
        run.feed.follow(earlier)
    run.changes = list(facts.get(CHANGES, []))
    if differences:
        changed = {each.name: [each.saved, each.now] for each in differences}
        run.changes.append({"step": facts["step"], "changed": changed})


def change_facts(run: Run) -> dict[str, Any]:
    """Return the optimizer's settings, and the settings changed on resuming, as entries of a checkpoint's manifest.

    Args:
        run: the run that is saved.

    Returns:
        JSON values by key: ``optimizer_settings``, a list with a dict of options for each parameter group, as
        ``tutti.prepare`` found them; and, if there are any, ``earlier_epochs`` (list of ``[epoch, batch size,
        samples]``: until this epoch the run had this batch size and number of training samples, None if unknown) and
        ``changes`` (list of ``{"step": …, "changed": {name: [saved, now]}}``, one for each resume that changed
        settings).
    """
    earlier = run.feed.epochs.earlier
    return {
        SETTINGS: run.settings.optimizer_settings,
        **({EARLIER: [list(each) for each in earlier]} if earlier else {}),
        **({CHANGES: run.changes} if run.changes else {}),
    }
