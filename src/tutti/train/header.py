"""A run's title, the lines of its header before the first step, and the facts that identify it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from tutti.config.optimizer_config import ImportedOptimizerConfig
from tutti.config.train_config import TrainConfig
from tutti.device import describe_products, is_accelerator, replays_graphs
from tutti.errors import counted
from tutti.launcher.context import World
from tutti.native.native_library import kernels
from tutti.nn.ac_policy import UNCACHED
from tutti.nn.float8 import describe_layers
from tutti.optim.scaling import scaled
from tutti.optim.several import members_of
from tutti.tasks.task import Task
from tutti.train.run import Run


def title(task: str, config: TrainConfig, run: Run) -> str:
    """Return the title of a run as one line: ``{task} · {strategy} · {optimizer}``.

    Args:
        task: name of the task.
        config: the configuration, which states strategy and optimizer.
        run: the prepared run, which has the optimizer that the task makes itself.
    """
    return f"{task} · {config.strategy} · {optimizer_name(config, run)}"


def optimizer_name(config: TrainConfig, run: Run) -> str:
    """Return the text of ``--optimizer``, or class and number of parameter groups of the optimizer that the task makes.

    Several optimizers are joined by ``+``.

    Args:
        config: the configuration.
        run: the prepared run.
    """
    if run.optimizer is None or isinstance(config.optimizer_choice.options, ImportedOptimizerConfig):
        return config.optimizer
    names = "+".join(type(each).__name__ for each in members_of(run.optimizer))
    return f"{names} of the task, {counted(len(run.optimizer.param_groups), 'parameter group')}"


def derived(
    task: Task, config: TrainConfig, run: Run, world: World, total: int | None, facts: Mapping[str, Any]
) -> Mapping[str, str]:
    """Return the lines of the run's header, such as data, model, devices and learning rate, in the order to print them.

    Args:
        task: the task, built-in or the user's.
        config: the resolved configuration.
        run: the prepared run.
        world: ranks and device.
        total: steps of the run; None if unknown.
        facts: the result of ``run_identity``.

    Returns:
        The text of each line by its label: always ``data``, ``model``, ``strategy``, ``devices``, ``training``,
        ``learning rate``, ``kernels`` and ``seed``; others, such as ``average``, where the run has such a setting.
    """
    size, threads = facts["parameters"], facts["threads"]
    mesh = run.context.mesh
    axes = {"data": mesh.data_ranks, "stages": mesh.stage, "tensor": mesh.tensor}
    split = " × ".join(f"{extent} {name}" for name, extent in axes.items() if extent > 1 or name == "data")
    kind = world.device.type if is_accelerator(world.device) else f"cpu, {counted(threads, 'thread')} each"
    if not is_accelerator(world.device) and world.identity.local_size > (cores := os.cpu_count() or 1):
        kind += f"; more processes than the {counted(cores, 'core')} of this machine"
    exact = ", reproducible" if config.reproducible else ""
    worth = "scale-invariant " * (run.adascale is not None)
    length = f"{counted(total, worth + 'step')} = {_length(config, run)}" if total is not None else str(config.length)
    return {
        "data": task.describe or f"{run.feed.contract.dataset or 'a stream of'} training samples",
        "model": f"{config.model or 'default'}, {counted(size, 'parameter')}",
        "strategy": f"{config.strategy}: {config.strategy_choice.row.summary}",
        "devices": f"{mesh.size} ({split}; {kind})",
        **run.replica.summary,
        **run.feed.describe(),
        "training": f"{length}, {config.precision}{exact}{_forward(config, world.device)}",
        **({"float32": products} if (products := describe_products(world.device, config.precision)) else {}),
        **({"in bfloat16": describe_layers(run.settings.in_bf16)} if run.settings.in_bf16 else {}),
        **({"config.use_cache": UNCACHED} if run.settings.uncached else {}),
        "learning rate": _rate(config, run),
        **_noise(config, run),
        **(
            {}
            if config.noise_every is None
            else {"noise scale": f"measured every {counted(config.noise_every, 'step')}"}
        ),
        **(
            {"a killed rank": "the other ranks continue without it, except without rank 0"}
            if run.context.comms.world.file_all_gather is not None
            else {}
        ),
        **_kept(config),
        **_ending(config, task),
        "kernels": facts["kernels"],
        **({"slowed": "; ".join(map(str, config.slowness))} if config.slowness else {}),
        "seed": str(config.seed),
    }


def _noise(config: TrainConfig, run: Run) -> dict[str, str]:
    """Return the line on gradient noise, if any."""
    if run.noise is None:
        return {}
    sigma = run.noise.sigma(config.batch_size)
    return {"gradient noise": f"that of {counted(run.noise.base_batch, 'sample')}: losses times N(1, {sigma:.3g}²)"}


def _kept(config: TrainConfig) -> dict[str, str]:
    """Return the lines on the average of the weights and the best checkpoint, if any."""
    average, best = config.averaging, config.best()
    lines = {}
    if average is not None:
        lines["average"] = f"of the weights, decay {average}; it is what is evaluated"
    if best is not None:
        lines["best kept"] = f"the checkpoint with the {'highest' if best.more else 'lowest'} held-out {best.metric}"
    return lines


def _ending(config: TrainConfig, task: Task) -> dict[str, str]:
    """Return the line on evaluations that may end the run, if any."""
    target, metric = config.target(task.directions), config.watched_metric(task.directions)
    if metric is None:
        return {}
    parts = [] if target is None else [f"an evaluation with {target}"]
    if config.patience is not None:
        parts.append(f"{counted(config.patience, 'evaluation')} in a row without a better {metric.name}")
    return {"ends early at": ", or ".join(parts)}


def _length(config: TrainConfig, run: Run) -> str:
    counted = f" in batches of {config.regime_batch}" if config.regime_batch else ""
    if run.adascale is not None:
        counted = " of one worker alone"
    if not run.context.synchronous:
        counted = "of all workers together; a slow worker makes fewer"
    return f"{config.length}{counted}"


def _rate(config: TrainConfig, run: Run) -> str:
    workers, given = run.context.workers, config.optimizer_choice.options
    if run.optimizer is not None and not isinstance(given, ImportedOptimizerConfig):
        rates = dict.fromkeys(f"{float(group['lr']):g}" for group in run.optimizer.param_groups)
        names = ", ".join(type(each).__name__ for each in run.schedulers.own)
        return f"{' and '.join(rates)}, {names or config.schedule}"
    rule = config.lr_rule
    rate = f"{scaled(given, rule, config.batch_size).lr:g}"
    if rule.adaptive:
        return f"{rate} × each step's gain (adascale, 1 to {workers}), {config.schedule}"
    rate += f" = {given.lr:g} × {rule.factor(config.batch_size):g} ({config.lr_scale})" * (config.lr_scale != "none")
    return f"{rate}, {config.schedule}"


def run_identity(task: str, config: TrainConfig, run: Run, world: World, size: int, threads: int) -> dict[str, Any]:
    """Return the facts that identify the run in its checkpoints' manifests and in ``summary.json``, by key.

    Args:
        task: name of the task.
        config: the resolved configuration.
        run: the prepared run.
        world: ranks and device.
        size: number of parameters.
        threads: CPU threads of each rank.

    Returns:
        JSON values by key: ``task``, ``strategy``, ``optimizer``, ``schedule``, ``lr_scale``, ``clip``, ``workers``
        (logical data-parallel workers, fixed shares of the global batch), ``devices`` (number), ``device`` (type),
        ``threads``, ``kernels`` (whether tutti's C++ loops are compiled here), ``global_batch_size``, ``batch_growth``,
        ``precision``, ``reproducible``, ``seed``, ``parameters`` (number) and ``ema``.
    """
    return {
        "task": task,
        "strategy": config.strategy,
        "optimizer": optimizer_name(config, run),
        "schedule": config.schedule,
        "lr_scale": config.lr_scale,
        "clip": config.clip,
        "workers": run.context.workers,
        "devices": world.identity.size,
        "device": world.device.type,
        "threads": threads,
        "kernels": kernels(),
        "global_batch_size": config.batch_size,
        "batch_growth": None if config.growth is None else str(config.growth),
        "precision": config.precision,
        "reproducible": config.reproducible,
        "seed": config.seed,
        "parameters": size,
        "ema": None if config.averaging is None else str(config.averaging),
    }


def _forward(config: TrainConfig, device: torch.device) -> str:
    """Return text on compilation and activation checkpointing, empty for neither."""
    again = f", checkpointing {config.activation_checkpointing}" * (config.activation_checkpointing != "none")
    chosen = config.compile_choice
    if chosen is None:
        return again
    plain = chosen.records_graphs and not replays_graphs(device)
    return f", compiled ({config.compile}{f', without graphs on {device.type}' * plain}){again}"
