"""Check a configuration of ``tutti train``, and on how many devices it can run, before any rank starts. No torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti import parallel, process_context
from tutti.checkpoint.weights_source import check_source
from tutti.config.engine_config import EngineConfig
from tutti.config.gradient_noise import per_worker_option
from tutti.config.logger_config import check_packages
from tutti.config.metric_direction import split_metric
from tutti.config.module_config import SyncBatchNormConfig, WorkerBatchNormConfig, check_compiler, check_float8
from tutti.config.optimizer_config import ImportedOptimizerConfig, PlateauSchedule
from tutti.config.settings import read_file
from tutti.config.train_config import TrainConfig
from tutti.config.training_target import check_metric, split_target
from tutti.data.contract import BatchContract
from tutti.device import check_device, check_processes
from tutti.distribution import pip_install
from tutti.errors import UsageError, counted
from tutti.launcher.devices import count_accelerators
from tutti.launcher.launch import check_script
from tutti.optim.scaling import scaled
from tutti.tasks import task_registry, user
from tutti.workload.machine_file import read_machine

log = logging.getLogger("tutti.train")


def refuse_config(task: str, config: TrainConfig) -> None:
    """Raise an error for a configuration of ``tutti train`` that cannot run, before any rank is started.

    Args:
        task: name of a built-in task, or ``file.py:function`` of the user's.
        config: the configuration, whose ``devices`` is a number, not ``auto`` or a range.

    Raises:
        UsageError: an option is malformed, options exclude each other, or a package that an option needs (such as
            tensorboard) is missing.
        DataError: the task's data are missing, or a package that reads them is.
        CheckpointError: the weights of ``--init-from`` cannot be loaded.
    """
    devices = int(config.devices)
    check_device(config.device)
    check_processes(config.device, devices, "--devices")
    rule = config.lr_rule
    adaptive = rule.adaptive
    compiling = config.compile_choice
    accelerated = config.device not in ("cpu", "auto") or count_accelerators(config.device, os.environ) > 0
    choice = config.strategy_choice
    parallel.check_strategy(
        choice,
        devices,
        workers=config.workers,
        reproducible=config.reproducible,
        adaptive=adaptive,
        averaging=config.averaging is not None,
        compiled=compiling is not None,
        graphs=compiling is not None and compiling.records_graphs,
        accelerated=accelerated,
    )
    ranks = choice.data_ranks(devices)
    # Whether the batch can be divided does not depend on the number of samples, so 1 will do.
    workers = config.workers or ranks
    micro = choice.micro_batch(config.micro_batch, config.batch_size, workers)
    contract = BatchContract(1, config.batch_size, workers, ranks, micro, config.identical_batches)
    chosen = scaled(config.optimizer_choice.options, rule, config.batch_size)
    if isinstance(chosen, ImportedOptimizerConfig):
        check_script(chosen.module, module=True)
    _ = config.lr_schedule
    for slow in config.slowness:
        slow.check(devices, workers, accelerated)
    noise = config.noise
    norm = config.batch_norm_options
    if config.noise_every is not None:
        parallel.check_noise_scale(choice, devices, contract, noise is not None)
    if isinstance(norm, SyncBatchNormConfig):
        each = per_worker_option(adaptive, noise, config.noise_every)
        parallel.check_sync(choice, devices, config.reproducible, each)
        contract.check_whole()
    _ = config.loss_scale_options
    _ = config.checkpointing
    if config.precision == "fp8":
        check_float8(not accelerated, choice.shape(devices)["tensor"] > 1)
    if compiling and not accelerated:
        check_compiler(compiling.options)
    if config.machine is not None:
        read_machine(Path(config.machine))
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboard",
            remedy=f"run {pip_install('tensorboard')}, or leave it out",
        )
    check_packages(config.loggers)
    other = not isinstance(norm, WorkerBatchNormConfig)
    task_registry.check_task(task, data=config.data, model=config.model, augment=config.augment, batch_norm=other)
    if not user.is_own(task):
        # A user's task may declare the direction of its metrics, which is known only after loading it.
        _check_metrics(task_registry.held_out_values(task), config)
    # A resumed run takes its weights from its own checkpoint.
    if config.init_from is not None and config.resume is None:
        check_source(Path(config.init_from))


def _check_metrics(reported: Sequence[str], config: TrainConfig) -> None:
    """Raise UsageError unless a built-in task reports the metrics that options name, such as ``--until``."""
    averaged, schedule = config.averaging is not None, config.lr_schedule
    if isinstance(schedule, PlateauSchedule):
        check_metric(schedule.measured().name, "--schedule plateau, metric", reported, averaged)
    if config.target_text is not None:
        check_metric(split_target(config.target_text)[0], "--until", reported, averaged)
    if config.keep_best is not None and config.keep_best != "none":
        check_metric(split_metric(config.keep_best, "--keep-best")[0], "--keep-best", reported, averaged)
    config.best()
    config.target()


def refuse_trial(task: str, config: TrainConfig) -> None:
    """Check a run's configuration as ``tutti train`` checks it, for other commands that start such runs.

    ``refuse_config`` checks it for one number of devices: the one that is given, 1 for ``--devices auto``, and for a
    range the largest number with which the configuration is valid.

    Args:
        task: name of a built-in task, or ``file.py:function`` of the user's.
        config: the run's configuration.

    Raises:
        UsageError: an option is malformed, options exclude each other, or a package that an option needs is missing; no
            number of a range is valid; or ``--wait``, the time for which a run waits for another device after the loss
            of one, is given to a run that never waits (``refuse_idle_wait``).
        DataError: the task's data are missing, or a package that reads them is.
        CheckpointError: the weights of ``--init-from`` cannot be loaded.
    """
    if config.wait != TrainConfig.wait:
        refuse_idle_wait(config, config.engine())
    fixed = dataclasses.replace(config, devices="1") if config.devices == "auto" else config
    refuse_config(task, dataclasses.replace(fixed, devices=str(possible_sizes(task, fixed)[-1])))


def count_devices(config: TrainConfig, joined: process_context.Identity | None) -> int:
    """Return the number of ranks of a run, one for each device.

    It is the number of processes of a job that another launcher has started, else ``--devices``; for ``auto`` it is the
    number of accelerators of this machine, at least 1.

    Args:
        config: the configuration. Its ``devices`` may be a range such as ``2:8`` only if ``joined`` is given; the job's
            number of processes must then lie within the range.
        joined: identity of this process in the job of another launcher, such as torchrun; None without one.

    Raises:
        UsageError: ``--devices`` contradicts the job's number of processes, or is a range without a job.
    """
    if joined is None:
        if config.devices == "auto":
            found = count_accelerators(config.device, os.environ)
            log.info(
                "%d devices: --devices is auto, and there are %d accelerators for --device %s",
                found or 1,
                found,
                config.device,
            )
            return found or 1
        if config.device_range is not None:
            raise UsageError(f"--devices {config.devices} is a range", remedy="give one number, such as --devices 3")
        return int(config.devices)
    least, most = config.device_range or (joined.size, joined.size)
    plain = config.device_range is not None or config.devices in ("auto", str(joined.size))
    if not (plain and least <= joined.size <= most):
        raise UsageError(
            f"--devices is {config.devices}, but this job was started with {counted(joined.size, 'process')}",
            remedy="leave --devices out under torchrun, srun and mpirun",
        )
    return joined.size


def possible_sizes(task: str, config: TrainConfig) -> list[int]:
    """Return the numbers of devices on which a run that an engine starts (``--on``) can be started.

    An engine starts ranks on this node, over SSH, by Slurm or by Ray. ``--devices 4`` gives ``[4]``, without a check. A
    range such as ``--devices 2:8`` gives the numbers of the range for which ``refuse_config`` accepts the
    configuration.

    Args:
        task: name of a built-in task, or ``file.py:function``.
        config: the configuration, whose ``devices`` is a number or a range.

    Returns:
        The numbers in rising order; at least one.

    Raises:
        UsageError: the configuration is valid for no number of a range; the error is that of the largest number.
        DataError: for a range: the task's data are missing, or a package that reads them is.
        CheckpointError: for a range: the weights of ``--init-from`` cannot be loaded.
    """
    if config.device_range is None:
        return [int(config.devices)]
    least, most = config.device_range
    found, refusal = [], None
    for devices in range(least, most + 1):
        try:
            refuse_config(task, dataclasses.replace(config, devices=str(devices)))
            found.append(devices)
        except UsageError as error:
            refusal = error
    if refusal is not None and not found:
        raise refusal
    return found


def sets_wait(flags: Mapping[str, Any], files: Sequence[Path]) -> bool:
    """Return whether a run sets ``--wait``, the time for which it waits for another device after the loss of one.

    The run sets it by the flag, by the variable ``TUTTI_WAIT``, or by a value in a file. The default as a value in a
    file does not count, because files that tutti writes, such as a plan, state every option.

    Args:
        flags: values given by flags or ``TUTTI_*`` variables, by field of ``TrainConfig``.
        files: TOML files of ``--config``.

    Raises:
        UsageError: a file cannot be read.
    """
    return "wait" in flags or any(read_file(file).get("wait", TrainConfig.wait) != TrainConfig.wait for file in files)


def refuse_idle_wait(config: TrainConfig, engine: EngineConfig | None) -> None:
    """Raise UsageError if ``--wait``, the time to wait for another device after the loss of one, would have no effect.

    It has an effect only if an engine starts the run's ranks, and the run survives the loss of a device: with a range
    of devices such as ``2:8``, or with ``--max-restarts`` above 0. Whether ``--wait`` is given is not checked here.

    Args:
        config: the configuration.
        engine: options of ``--on``; None if no engine starts the ranks.
    """
    if engine is None or (config.device_range is None and not config.max_restarts):
        raise UsageError(
            f"--wait {config.wait} is for runs that outlive lost devices, and this run ends with its first one",
            remedy="give a range such as --devices 2:8, or leave out --wait",
        )
