"""One rank's part of ``tutti train``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tutti import strategies
from tutti.data.adapt import adapt
from tutti.data.contract import BatchContract
from tutti.errors import Preempted
from tutti.optim.config import check_optimizer, check_schedule
from tutti.optim.scaling import check_rule
from tutti.optim.scaling import scaled as scaled_optimizer
from tutti.optim.schedules import make as make_schedule
from tutti.tasks import table
from tutti.tasks.task import Task
from tutti.training.checkpoint import Checkpoints
from tutti.training.config import TrainConfig
from tutti.training.listener import Header, Listeners
from tutti.training.loop import Means, Plan, train
from tutti.training.prepare import prepare
from tutti.training.progress import terminal_listener
from tutti.training.records import RunDirectory, config_sha256
from tutti.training.run import Run
from tutti.training.stopping import stopping
from tutti.world import context
from tutti.world.context import World


def main(task: str, config: TrainConfig, directory: str | None) -> int:
    """Train this rank's part of the run; rank 0 speaks and writes into ``directory``.

    Returns:
        0. Whatever goes wrong is raised, as a TuttiError with its exit code where it was foreseen.
    """
    world = context.init(config.device, config.timeout)
    threads = _set_threads(config, world)
    torch.manual_seed(config.seed)
    chosen = table.load(task, data=config.data, model=config.model, augment=config.augment)
    model = chosen.model()
    size = sum(p.numel() for p in model.parameters())
    run = _prepare(chosen, model, config, world)
    contract = run.feed.contract
    # Regime adaptation: durations are counted in batches of another size (Hoffer et al. 2017, arXiv 1705.08741, §5).
    counted = config.regime_batch or contract.batch
    total = config.length().steps(contract.dataset, counted)
    scaled = check_rule(config.lr_scale).factor(contract.batch)
    run.lr_factor = make_schedule(check_schedule(config.schedule), total, contract.dataset, counted, scaled)
    plan = Plan(total, _steps(config, "eval_every", contract), _steps(config, "checkpoint_every", contract))
    held_out = None if chosen.eval is None else adapt(chosen.eval)
    facts = _identity(task, config, run, world, size, threads)
    # An attempt that the launcher started anew continues as --resume would.
    again = config.resume is not None or world.identity.attempt > 0
    place = run.setting.comms.world.broadcast_json(directory, 0, "run directory")
    listeners = Listeners(())
    try:
        with stopping(run) as reason:
            saver = _saver(run, place, world, config, facts, lambda text: listeners.warned(text))
            restored = saver.restore() if saver is not None and again else None
            if world.identity.rank == 0:
                keep_lines = run.clock if again else None
                own = [RunDirectory(directory, config, task, keep_lines)] if directory else []
                listeners = Listeners([terminal_listener(sys.stderr, config), *own])
            header = Header(
                _title(task, config),
                _derived(chosen, config, run, world, total, size, threads),
                total,
                contract.steps_per_epoch,
            )
            means = Means(**restored["means"]) if restored else None
            result = train(run, plan, held_out, header, listeners, saver, means)
        listeners.finished({**facts, **result, "exit_code": 0})
    except Preempted as stop:
        listeners.warned(str(stop))
        raise reason.error(stop) from None
    finally:
        listeners.close()
    context.shutdown()
    return 0


def _steps(
    config: TrainConfig, field: Literal["eval_every", "checkpoint_every"], contract: BatchContract
) -> int | None:
    every = config.every(field)
    return None if every is None else max(1, every.steps(contract.dataset, contract.batch))


def _saver(
    run: Run,
    place: str | None,
    world: World,
    config: TrainConfig,
    facts: Mapping[str, Any],
    warn: Callable[[str], None],
) -> Checkpoints | None:
    if place is None:
        return None
    kept = {**facts, "training_samples": run.feed.contract.dataset, "config_sha256": config_sha256(config)}
    return Checkpoints(run, Path(place) / "checkpoints", world, kept, config.keep, warn)


def _prepare(task: Task, model: nn.Module, config: TrainConfig, world: World) -> Run:
    return prepare(
        model,
        config.optimizer,
        task.train,
        task.loss,
        strategy=config.strategy,
        workers=config.workers,
        batch_size=config.batch_size,
        micro_batch=config.micro_batch,
        precision=config.precision,
        channels_last=task.images if config.channels_last is None else config.channels_last,
        lr_scale=config.lr_scale,
        batch_norm=config.batch_norm,
        clip=config.clip,
        reproducible=config.reproducible,
        seed=config.seed,
        max_nonfinite=config.max_nonfinite,
    )


def _set_threads(config: TrainConfig, world: World) -> int:
    """CPU threads of this process: as asked, one in reproducible mode, else this host's cores shared out."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = config.threads or (1 if config.reproducible else max(1, cores // world.identity.local_size))
    torch.set_num_threads(threads)
    return threads


def _title(task: str, config: TrainConfig) -> str:
    return f"{task} · {config.strategy} · {config.optimizer}"


def _derived(
    task: Task, config: TrainConfig, run: Run, world: World, total: int, size: int, threads: int
) -> Mapping[str, str]:
    """Everything that follows from the configuration, in the order to print it."""
    grid = run.setting.grid
    axes = {"data": grid.data_ranks, "stages": grid.stage, "tensor": grid.tensor}
    split = " × ".join(f"{extent} {name}" for name, extent in axes.items() if extent > 1 or name == "data")
    kind = world.device.type if world.device.type == "cuda" else f"cpu, {threads} thread{'s' * (threads > 1)} each"
    exact = ", reproducible" if config.reproducible else ""
    return {
        "data": task.describe or f"{run.feed.contract.dataset} training samples",
        "model": f"{config.model or 'default'}, {size:,} parameters",
        "strategy": f"{config.strategy}: {strategies.parse(config.strategy).row.summary}",
        "devices": f"{grid.size} ({split}; {kind})",
        **run.feed.contract.describe(),
        "training": f"{total} steps = {_length(config)}, {config.precision}{exact}",
        "learning rate": _rate(config),
        "seed": str(config.seed),
    }


def _length(config: TrainConfig) -> str:
    counted = f" in batches of {config.regime_batch}" if config.regime_batch else ""
    return f"{config.length()}{counted}"


def _rate(config: TrainConfig) -> str:
    given = check_optimizer(config.optimizer)
    rule = check_rule(config.lr_scale)
    rate = f"{scaled_optimizer(given, rule, config.batch_size).lr:g}"
    rate += f" = {given.lr:g} × {rule.factor(config.batch_size):g} ({config.lr_scale})" * (config.lr_scale != "none")
    return f"{rate}, {config.schedule}"


def _identity(task: str, config: TrainConfig, run: Run, world: World, size: int, threads: int) -> dict[str, Any]:
    return {
        "task": task,
        "strategy": config.strategy,
        "optimizer": config.optimizer,
        "schedule": config.schedule,
        "workers": run.setting.workers,
        "devices": world.identity.size,
        "device": world.device.type,
        "threads": threads,
        "global_batch_size": config.batch_size,
        "precision": config.precision,
        "reproducible": config.reproducible,
        "seed": config.seed,
        "parameters": size,
    }
