"""Find each rung's like-with-like baselines: rungs that differ from it only in the number of workers. No torch.

A logical worker is a replica of the algorithm with a fixed share of the global batch; ``workers`` is their number,
which devices do not change. The claim that N logical workers hold the accuracy of one worker needs the same recipe at
both scales. Muon at eight workers against Adam at one differs in two causes, and proves nothing about either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tutti.compare.ladder import Ladder, Rung
from tutti.config.train_config import TrainConfig
from tutti.metrics.records import BESIDE_THE_RESULT

_SCALE = frozenset({"workers", "batch_size", "lr_scale", "seed"})
"""Scale of a run: workers, their batch and its learning-rate rule. Seeds are repeated and not compared."""

_RATES = frozenset({"lr", "adam_lr"})
"""Options of optimizers that are tuned to the batch size."""

_WARMUPS = frozenset({"warmup", "warmup_from"})


def recipes(ladder: Ladder) -> tuple[Rung, ...]:
    """Select the training configurations (rungs) of a ladder that are to be tested against baselines.

    These are the rungs at another scale (number of logical workers, batch size) than the first rung. If all have the
    first rung's scale, they are all rungs but the first.

    Args:
        ladder: the ladder, a series of rungs.

    Returns:
        The rungs in the ladder's order, each with name and configuration; at least one.
    """
    first = ladder.rungs[0]
    scaled = tuple(rung for rung in ladder.rungs if _scale(rung) != _scale(first))
    return scaled or ladder.rungs[1:]


def baselines(ladder: Ladder, rung: Rung) -> tuple[Rung, ...]:
    """Select the training configurations (rungs) of a ladder with which a rung may be compared like with like.

    Such rungs have the first rung's scale, its number of logical workers and its batch size, and otherwise the options
    of the compared rung. The learning rate, its rule and its warm-up may differ, because each scale needs its own. The
    baseline of a rung at the first rung's scale is the first rung, if the two differ in at most one option besides the
    learning rate.

    Args:
        ladder: the ladder, a series of rungs.
        rung: the rung to compare.

    Returns:
        The rungs in the ladder's order, each with name and configuration; empty if the ladder has none.
    """
    first = ladder.rungs[0]
    if _scale(rung) == _scale(first):
        return (first,) if rung != first and len(other_causes(rung.config, first.config)) <= 1 else ()
    controls = (other for other in ladder.rungs if _scale(other) == _scale(first))
    return tuple(other for other in controls if not other_causes(rung.config, other.config))


def other_causes(config: TrainConfig, reference: TrainConfig) -> list[str]:
    """Return the options in which two runs differ, apart from scale (logical workers, batch size) and learning rate.

    An option that has no effect at the reference's scale counts as not set: ``regime_batch`` equal to the reference's
    batch size, ``gradient_noise`` whose base batch has this size, and, if the reference has one worker,
    ``batch_norm=sync`` and ``identical_batches``. The seed and options that do not affect a result, such as folders,
    are not compared.

    Args:
        config: options of one run.
        reference: options of the other run, whose scale decides which options have an effect.

    Returns:
        Names of fields of ``TrainConfig``, such as ``optimizer``, sorted; empty if only scale and learning rate differ.
    """
    ours, theirs = _compared(config, reference), _compared(reference, reference)
    return [name for name in ours if ours[name] != theirs[name]]


def _scale(rung: Rung) -> tuple[int | None, int]:
    return rung.config.workers, rung.config.batch_size


def _compared(config: TrainConfig, reference: TrainConfig) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(TrainConfig)} - BESIDE_THE_RESULT - _SCALE
    found = {name: getattr(config, name) for name in sorted(names)}
    found["optimizer"] = _without(config.optimizer_choice.options, _RATES)
    found["schedule"] = _without(config.lr_schedule, _WARMUPS)
    noise = config.noise
    if noise is not None and noise.base_batch == reference.batch_size:
        found["gradient_noise"] = "none"
    if config.regime_batch == reference.batch_size:
        found["regime_batch"] = None
    if reference.workers == 1:
        found["identical_batches"] = False
        found["batch_norm"] = "worker" if config.batch_norm == "sync" else config.batch_norm
    return found


def _without(chosen: Any, aside: frozenset[str]) -> tuple[str, Mapping[str, Any]]:
    options = dataclasses.asdict(chosen)
    return type(chosen).__name__, {name: value for name, value in options.items() if name not in aside}
