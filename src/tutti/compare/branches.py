"""Branch a run: train on from one of its checkpoints at multiples of its batch size, each in a directory of its own.

Merrill et al. 2025, arXiv 2505.23971. A branch is a resumed run: it has the checkpoint's weights and optimizer state,
another batch size, learning rate and order of samples, and a constant rate from there on.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tutti.compare.runs import Trial
from tutti.config.dotted import changed_fields
from tutti.config.layout_config import PipelineConfig
from tutti.config.lr_rule import usual_rule
from tutti.config.optimizer_config import MuonConfig
from tutti.config.settings import read_file
from tutti.config.train_config import TrainConfig
from tutti.errors import DiskError, UsageError
from tutti.metrics.metrics_file import metric_records
from tutti.metrics.records import config_sha256, config_toml, read_summary

if TYPE_CHECKING:
    from tutti.checkpoint.manifest import Manifest

RateRule = Literal["sqrt", "linear", "none"]
_FEWEST_STEPS = 2


@dataclass(frozen=True)
class BranchPoint:
    """A checkpoint of a run from which trainings at several batch sizes (branches) are continued.

    Attributes:
        run: the run directory.
        task: name of the run's task.
        checkpoint: directory of the checkpoint.
        config: the run's configuration, with the number of its logical workers (fixed shares of the global batch).
        step: number of steps until the checkpoint.
        epoch: number of epochs until the checkpoint.
        samples: training samples of an epoch.
        loss: held-out loss at the checkpoint.
        factor: learning rate of the step before the checkpoint ÷ configured rate (that of the optimizer, times the
            factor of ``--lr-scale``): the value of the schedule in that step.
    """

    run: Path
    task: str
    checkpoint: Path
    config: TrainConfig
    step: int
    epoch: int
    samples: int
    loss: float
    factor: float


def branch_point(run: Path, step: int | None = None) -> BranchPoint:
    """Find the checkpoint of a run from which trainings at several batch sizes (branches) can be continued.

    Args:
        run: directory of a run of ``tutti train``.
        step: number of training steps after which the checkpoint was saved; None for the newest checkpoint that was
            saved at an epoch's end.

    Returns:
        A ``BranchPoint``: ``run`` (its directory), ``task`` (its name), ``checkpoint`` (directory), ``config`` of the
        run, position (``step``, ``epoch``), number of training ``samples`` in an epoch, held-out ``loss`` at the
        checkpoint, and ``factor``, by which the learning-rate schedule multiplied the configured rate in the step
        before the checkpoint.

    Raises:
        UsageError: the files of the run cannot be read, there is no such checkpoint, it is not at the end of an epoch,
            no evaluation was made there, ``factor`` is below 1/1000, or the run adapts its batch size or learning rate
            during training (``--batch-growth``, ``--regime-batch``, ``--lr-scale adascale``).
    """
    from tutti.checkpoint.folder import scan

    values = read_file(run / "config.toml")
    task = str(values.pop("task", ""))
    config = TrainConfig(**{**values, "resume": None, "change": None})
    if config.growth is not None or config.lr_rule.adaptive or config.regime_batch is not None:
        raise UsageError(
            "a run whose batch or rate adapts during training cannot be branched",
            where=str(run),
            remedy="branch a run without --batch-growth, --regime-batch and --lr-scale adascale",
        )
    found = _chosen(run, scan(run / "checkpoints"), step)
    facts = found.facts
    # The newest first.
    lines = [record for record in metric_records(run)[::-1] if record.get("step") == int(facts["step"])]
    held_out = next((line["loss"] for line in lines if line.get("group") == "eval"), None)
    rate = next((line["lr"] for line in lines if line.get("group") == "train" and line.get("lr") is not None), None)
    if held_out is None or rate is None:
        raise UsageError(
            f"the run has no evaluation at step {facts['step']}, at which its checkpoint was saved",
            where=str(run),
            remedy="train it with --eval-every 1ep --checkpoint-every 1ep",
        )
    own = config.optimizer_choice.options.lr * config.lr_rule.factor(config.batch_size)
    factor = float(rate) / own
    if factor < 1e-3:
        raise UsageError(
            f"the schedule has lowered the learning rate to {factor:.2g} of its value at the checkpoint",
            where=str(found.path),
            why="training on at this rate changes nothing, at any batch size",
            remedy="branch an earlier checkpoint: --step N, of a run with --keep",
        )
    return BranchPoint(
        run=run,
        task=task,
        checkpoint=found.path,
        config=dataclasses.replace(config, workers=int(facts["workers"])),
        step=int(facts["step"]),
        epoch=int(facts["position"]["epoch"]),
        samples=int(facts["training_samples"]),
        loss=float(held_out),
        factor=factor,
    )


def _chosen(run: Path, manifests: Sequence[Manifest], step: int | None) -> Manifest:
    between = [each for each in manifests if not each.facts["position"]["batch"]]
    for each in between:
        if step is None or each.facts["step"] == step:
            return each
    kept = ", ".join(str(each.facts["step"]) for each in between)
    raise UsageError(
        "the run has no checkpoint at the end of an epoch" + (f" at step {step}" if step is not None else ""),
        where=str(run),
        why=f"at the ends of epochs it has checkpoints of steps {kept}" if kept else None,
        remedy="train it with --checkpoint-every 1ep; the batch size can change only between two epochs",
    )


def branch_trials(
    point: BranchPoint, multiples: Sequence[int], seeds: int, window: int, rule: RateRule | None
) -> list[Trial]:
    """Return the runs (branches) that continue a checkpoint at multiples of its batch size; nothing is started.

    Micro-batches keep their size, so that batch norm sees as many samples in each branch. A branch has a constant
    learning rate: that of the run's step before the checkpoint, times the rule's factor for the multiple.

    Args:
        point: the checkpoint, from ``branch_point``.
        multiples: global batch sizes of the branches, as multiples of the run's; 1 is always added.
        seeds: number of branches of each multiple, each with another seed, and so another order of samples.
        window: number of epochs that each branch trains after the checkpoint.
        rule: factor on the learning rate: the multiple (``linear``), its square root (``sqrt``) or 1 (``none``); read
            only if the run has no rule of its own (``--lr-scale``). None: ``linear`` for SGD, else ``sqrt``.

    Returns:
        One trial for each branch, ordered by seed and then by multiple: its configuration, seed and run directory, a
        subfolder of ``branches`` in the directory of ``point.run``.

    Raises:
        UsageError: a multiple is below 1, or its batch makes fewer than two steps in the window.
    """
    base = point.config
    chosen = base.optimizer_choice.options
    rule = rule or usual_rule(chosen)
    changes = [f"optimizer.lr={chosen.lr * point.factor:.17g}"]
    if isinstance(chosen, MuonConfig):
        changes.append(f"optimizer.adam_lr={chosen.adam_lr * point.factor:.17g}")
    scale = base.lr_scale
    if scale == "none" and rule != "none":
        scale = f"{rule}:base_batch={base.batch_size}"
    found = []
    for multiple in multiples:
        if multiple < 1:
            raise UsageError(f"--branch is {multiple}", remedy="give whole multiples of at least 1")
        batch = multiple * base.batch_size
        if window * point.samples < _FEWEST_STEPS * batch:
            raise UsageError(
                f"--branch is {multiple}",
                why=f"{window} epochs of {point.samples} samples are fewer than two steps of {batch}",
                remedy="give smaller multiples, or a longer --window",
            )
    for seed in range(seeds):
        for multiple in sorted({1, *multiples}):
            batch = multiple * base.batch_size
            config = dataclasses.replace(
                base,
                batch_size=batch,
                **_micro_batches(base, multiple),
                optimizer=changed_fields({"optimizer": base.optimizer}, changes)["optimizer"],
                schedule="constant",
                lr_scale=scale,
                seed=base.seed + 1 + seed,
                epochs=float(point.epoch + window),
                steps=None,
                samples=None,
                duration=None,
                until=None,
                patience=None,
                noise_every=None,
                keep_best=None,
                eval_every="none",
                checkpoint_every="none",
            )
            name = f"step-{point.step}-x{multiple}-seed-{config.seed}-{config_sha256(config)[:8]}"
            found.append(Trial(f"{multiple} × the batch", config.seed, config, point.run / "branches" / name))
    return found


def _micro_batches(base: TrainConfig, multiple: int) -> dict[str, Any]:
    """Return the options that keep the size of a micro-batch at a multiple of the batch."""
    layout = base.strategy_choice.layout
    if not isinstance(layout, PipelineConfig) or layout.micro_batches is None:
        return {"micro_batch": base.micro_batch or -(-base.batch_size // (base.workers or 1))}
    more = [f"strategy.micro_batches={layout.micro_batches * multiple}"]
    return {"strategy": changed_fields({"strategy": base.strategy}, more)["strategy"]}


def prepare_branch(point: BranchPoint, trial: Trial) -> None:
    """Make the run directory of a branch, from which ``run_trial`` then continues a checkpoint at another batch size.

    The directory gets the run's configuration and a copy of the checkpoint. Nothing happens where it has a checkpoint
    already.

    Args:
        point: the checkpoint.
        trial: the run, of ``branch_trials``.

    Raises:
        DiskError: the directory cannot be written.
    """
    folder = trial.directory / "checkpoints"
    if folder.is_dir():
        return
    names = ["batch_size", "lr", "lr_scale", "schedule", "seed"]
    if isinstance(trial.config.optimizer_choice.options, MuonConfig):
        names.append("adam_lr")
    directory = str(trial.directory)
    config = dataclasses.replace(trial.config, out=directory, resume=directory, change=",".join(names))
    unfinished = folder.with_name("checkpoints.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        trial.directory.mkdir(parents=True, exist_ok=True)
        (trial.directory / "config.toml").write_text(config_toml(config, point.task), encoding="utf-8")
        shutil.copytree(point.checkpoint, unfinished / point.checkpoint.name)
        os.replace(unfinished, folder)
    except OSError as error:
        raise DiskError("cannot make the branch", where=directory, why=error.strerror) from error


def branch_loss(trial: Trial) -> float:
    """Return the held-out loss at the end of a finished branch, and delete its copy of the checkpoint.

    A branch is a run that continues a checkpoint at another batch size. Errors of deleting are ignored.

    Args:
        trial: the branch.

    Returns:
        The loss; NaN if it is not finite, or the branch's ``summary.json`` has none.
    """
    shutil.rmtree(trial.directory / "checkpoints", ignore_errors=True)
    loss = (read_summary(trial.directory).get("eval") or {}).get("loss")
    return float(loss) if isinstance(loss, int | float) else float("nan")
