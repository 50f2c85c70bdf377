"""Prepare a rank of ``tutti train`` up to its first step: the process, the task's model, and the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tutti.config.train_config import TrainConfig
from tutti.device import is_accelerator, usable_cores
from tutti.errors import UsageError
from tutti.host_memory import free_memory
from tutti.launcher.context import World
from tutti.nn.init_on_disk import spilling
from tutti.optim.plateau import Plateau
from tutti.tasks.task import Task
from tutti.train.batch_size_schedule import without_growth_warnings
from tutti.train.prepare import prepare_run
from tutti.train.run import Run
from tutti.train.run_options import RunOptions
from tutti.train.train_plan import make_lr_schedule


def prepare_process(config: TrainConfig, world: World) -> int:
    """Seed PyTorch with the run's seed, and set this process's number of intra-op CPU threads.

    Args:
        config: the resolved configuration, with seed, threads and reproducible mode.
        world: all ranks, with this rank's device.

    Returns:
        The number of threads that was set: ``config.threads``; if that is None, 1 in reproducible mode, otherwise the
        usable cores divided by the ranks on this node, and by 2 on an accelerator, rounded down but at least 1. On an
        accelerator half of the cores are left to threads that issue kernels, copy and load (docs/devices.md).
    """
    torch.manual_seed(config.seed)
    cores = usable_cores() // world.identity.local_size // (2 if is_accelerator(world.device) else 1)
    threads = config.threads or (1 if config.reproducible else max(1, cores))
    torch.set_num_threads(threads)
    return threads


def build_task_model(task: Task, config: TrainConfig, world: World) -> nn.Module:
    """Build the task's model; its large tensors are on disk if the strategy leaves each rank only a part of the model.

    Tensors go to disk once the model exceeds a quarter of this rank's share of the free memory (a guess): the rank's
    part, gradients and optimizer state must fit into memory, too.

    Args:
        task: the task, whose function ``model`` builds the model.
        config: the resolved configuration.
        world: all ranks.

    Returns:
        The whole model, before the strategy splits it over ranks.
    """
    if not config.strategy_choice.parts(world.identity.size):
        return task.model()
    with spilling(above=free_memory(world.identity.local_size) // 4):
        return task.model()


@without_growth_warnings()
def prepare_task(
    task: Task,
    model: nn.Module,
    config: TrainConfig,
    warn: Callable[[str], None] | None = None,
    callbacks: Sequence[Any] = (),
    plateau: Plateau | None = None,
) -> Run:
    """Place a task's model on this rank's device and return a run that is ready for its first step.

    Collective over all ranks.

    As ``tutti.prepare`` does for a script: broadcasts the initial weights, splits the model as the strategy says, and
    makes optimizer and data, with the options of the configuration or those of the task.

    Args:
        task: the task, for its data and loss function, and its optimizers and schedulers, if it makes some.
        model: the task's model, changed in place where the strategy splits it.
        config: the resolved configuration.
        warn: receives the text of warnings about mistakes of the run and about killed ranks; None for Python's
            ``warnings`` and stderr.
        callbacks: the task's callbacks; none where a run is prepared only to be measured.
        plateau: state of the schedule ``plateau``; None for other schedules, and where the run is not evaluated.

    Returns:
        The run, which holds model, optimizer, data and strategy.

    Raises:
        UsageError, DataError: options that do not go together, or a model or data that cannot be trained with them.
        MismatchError: models or options differ between ranks.
    """
    chosen = config.optimizer_choice if task.optimizer is None else task.optimizer(model)
    if isinstance(chosen, str):
        raise UsageError(f"Task(optimizer=…) returned the text '{chosen}'", remedy="return an optimizer of the model")
    scheduler = None if task.scheduler is None else task.scheduler(chosen)
    _check_plateaus(scheduler, task.scheduler_every)
    options = RunOptions(
        strategy=config.strategy_choice,
        workers=config.workers,
        batch_size=config.batch_size,
        collate=task.collate,
        batch_growth=config.growth,
        micro_batch=config.micro_batch,
        precision=config.precision,
        loss_scale=config.loss_scale_options,
        channels_last=task.images if config.channels_last is None else config.channels_last,
        lr_scale=config.lr_rule,
        batch_norm=config.batch_norm_options,
        identical_batches=config.identical_batches,
        clip=config.clip,
        gradient_noise=config.noise,
        noise_every=config.noise_every,
        ema=config.averaging,
        reproducible=config.reproducible,
        activation_checkpointing=config.checkpointing,
        compile=config.compile_choice,
        seed=config.seed,
        max_nonfinite=config.max_nonfinite,
        data_workers=config.data_workers,
        slow=config.slowness,
        scheduler=scheduler,
        scheduler_every=task.scheduler_every,
        callbacks=callbacks,
    )
    schedule = None if keeps_rates(task, config) else partial(make_lr_schedule, config, plateau=plateau)
    return prepare_run(model, chosen, task.train, task.loss, options, schedule, warn)


def keeps_rates(task: Task, config: TrainConfig) -> bool:
    """Return whether the task alone sets the learning rates of its own optimizer, and no schedule of the options does.

    Args:
        task: the task.
        config: the resolved configuration.
    """
    return task.optimizer is not None and config.schedule == TrainConfig.schedule


def _check_plateaus(scheduler: Any, every: str) -> None:
    """Raise UsageError for a plateau scheduler that nothing would step: ``tutti train`` has no loop of the user's."""
    given = scheduler if isinstance(scheduler, Sequence) else [scheduler]
    if any(isinstance(each, ReduceLROnPlateau) for each in given) and not every.startswith("evaluation"):
        raise UsageError(
            f"the task's ReduceLROnPlateau needs a metric, and its scheduler_every is '{every}'",
            remedy="write Task(scheduler_every='evaluation'), or 'evaluation:accuracy'",
        )
