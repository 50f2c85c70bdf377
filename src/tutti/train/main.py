"""One rank of ``tutti train``: from the configuration to the run, its listeners and the training loop."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tutti.checkpoint.folder import FOLDER
from tutti.checkpoint.manifest import REMEDY
from tutti.comm.stall import TellFailures
from tutti.config.optimizer_config import PlateauSchedule
from tutti.config.train_config import TrainConfig
from tutti.data.adapt import Collate
from tutti.data.epochs import Epochs
from tutti.device import peak_memory
from tutti.errors import CheckpointError, ExitCode, Preempted, UsageError
from tutti.host_memory import peak_resident
from tutti.launcher import context, heartbeat
from tutti.launcher.context import World
from tutti.metrics.events import TensorBoard
from tutti.metrics.listener import Clock, EarlyWarnings, Listener, Listeners, RunHeader
from tutti.metrics.progress import terminal_listener
from tutti.metrics.records import RunDirectory, config_sha256
from tutti.optim.plateau import Plateau
from tutti.process_context import launch_time
from tutti.tasks import task_registry
from tutti.tasks.task import Task
from tutti.train.batch_size_schedule import model_warnings, plan_warnings
from tutti.train.evaluation import BLOCK, in_blocks
from tutti.train.header import derived, run_identity, title
from tutti.train.loop import train_loop
from tutti.train.loop_meters import Means
from tutti.train.metric_loggers import MetricLogger, make_loggers
from tutti.train.preemption import stop_on_signals
from tutti.train.run import Run
from tutti.train.run_checkpoints import Checkpoints
from tutti.train.run_state import restore_optimizers
from tutti.train.step_windows import Window, planned_windows
from tutti.train.target_watch import TargetWatch
from tutti.train.task_run import build_task_model, prepare_process, prepare_task
from tutti.train.train_plan import TrainPlan, check_evaluations, followed_by, make_lr_schedule, make_train_plan
from tutti.train.utilisation import measured_throughput
from tutti.train.warm_start import load_warm_start


@TellFailures()
def train_rank(task: str, config: TrainConfig, directory: str | None) -> int:
    """Run ``tutti train`` on this rank: build the task's model, train it and evaluate it. Collective over all ranks.

    Rank 0 reports progress on stderr and writes metrics and ``summary.json`` into ``directory``; checkpoints go there,
    too. A run that ``config.resume`` names, or that the launcher restarted, continues from its checkpoint.

    Args:
        task: name of a built-in task, or ``file.py:function``.
        config: the resolved configuration.
        directory: the run directory; rank 0's value is used on all ranks. None to write no files.

    Returns:
        0, the exit code of the process; the process group has been ended then.

    Raises:
        TuttiError: an expected failure, with its exit code.
    """
    world = context.init(config.device, config.timeout)
    threads = prepare_process(config, world)
    chosen = task_registry.load_task(task, data=config.data, model=config.model, augment=config.augment)
    config = _with_direction(config, chosen)
    _check_own(chosen, task, config)
    model = build_task_model(chosen, config, world)
    size = sum(p.numel() for p in model.parameters())
    warnings, plateau = EarlyWarnings(), _make_plateau(config, chosen)
    callbacks = [*chosen.callbacks, *make_loggers(config.loggers)]
    run = prepare_task(chosen, model, config, warnings, callbacks=callbacks, plateau=plateau)
    plan, total = make_train_plan(config, run.feed.epochs)
    held_out = _held_out(chosen, task, config)
    job = _Job(
        task, chosen, config, world, run, run_identity(task, config, run, world, size, threads), plateau, warnings
    )
    # A restart by the launcher continues like --resume.
    resumes = config.resume is not None or world.identity.attempt > 0
    directory = _agree_on_directory(run, directory)
    listeners = Listeners(())
    _warn_early(job, model, plan, total)
    try:
        with stop_on_signals(run) as reason:
            saver = _saver(job, directory)
            restored = _restore(job, saver) if saver is not None and resumes else None
            if run.feed.epochs.earlier:
                # The epochs until now had other batches: the plan and the schedule count them as they were.
                plan, total = make_train_plan(config, run.feed.epochs)
                if run.lr_schedule is not None:
                    run.lr_schedule = make_lr_schedule(config, run.feed.epochs, plateau)
            initial_weights = _warm_start(job, restored)
            clock = Clock.saved(restored or {}) if resumes else Clock(time.time())
            if world.identity.rank == 0:
                listeners, clock = _listeners(job, directory, run.global_step if resumes else None, clock)
            warnings.pass_to(listeners.warned)
            steps = total if run.adascale is None else None
            if steps is not None and not config.regime_batch:
                run.checks.planned(steps)
            windows = planned_windows(config, run, steps, directory, resumes, listeners)
            with _marking_failure(run):
                result = train_loop(
                    run,
                    plan,
                    held_out,
                    _header(job, total, steps, initial_weights),
                    listeners,
                    saver=saver,
                    means=Means.saved(restored) if restored else None,
                    windows=windows,
                    clock=clock,
                    throughput=_throughput(job, listeners),
                    watch=_watch(job, restored),
                    plateau=plateau,
                    collate=_eval_collate(chosen),
                )
            peaks = _peak_memory(run, world)
        listeners.finished(_summary(job, clock, {**result, "peak_memory": peaks}))
    except Preempted as stop:
        listeners.warned(str(stop))
        raise reason.error(stop) from None
    finally:
        listeners.close()
    for window in windows:
        _show(window, world)
    context.shutdown()
    return 0


@dataclasses.dataclass(frozen=True)
class _Job:
    """A run of a task on this rank, with what its parts share.

    Attributes:
        name: name of the built-in task, or ``file.py:function``.
        task: the task.
        config: the resolved configuration.
        world: this rank and the job.
        run: the prepared run.
        facts: the run's identity, for checkpoints and ``summary.json``; ``_warm_start`` adds an entry.
        plateau: the schedule that evaluations move; None for another one.
        warnings: receives warnings before there are listeners.
    """

    name: str
    task: Task
    config: TrainConfig
    world: World
    run: Run
    facts: dict[str, Any]
    plateau: Plateau | None
    warnings: EarlyWarnings


def _warn_early(job: _Job, model: nn.Module, plan: TrainPlan, total: int | None) -> None:
    """Warn of what model, plan and configuration together lead one to expect, before the run begins."""
    epochs, config = job.run.feed.epochs, job.config
    for text in (
        *model_warnings(epochs, model, config.batch_norm_options),
        *plan_warnings(epochs, config, total),
        *filter(None, [check_evaluations(job.task, config, plan, epochs)]),
    ):
        job.warnings(text)


def _header(job: _Job, total: int | None, steps: int | None, initial_weights: Mapping[str, str]) -> RunHeader:
    """Return the header that listeners show before the first step.

    Args:
        job: the run.
        total: steps of the whole run as the schedule counts them; None where that is unknown.
        steps: steps of the whole run; None where that is unknown, as with AdaScale.
        initial_weights: the line about a warm start, if any.
    """
    lines = {**derived(job.task, job.config, job.run, job.world, total, job.facts), **initial_weights}
    return RunHeader(title(job.name, job.config, job.run), lines, steps, _steps_per_epoch(job.run.feed.epochs))


def _throughput(job: _Job, listeners: Listeners) -> Callable[..., Any] | None:
    """Return the function that measures the use of the devices at the end, on rank 0; None on other ranks."""
    if job.world.identity.rank:
        return None
    return partial(measured_throughput, job.task, job.config, job.world, job.run, listeners.warned)


@contextmanager
def _marking_failure(run: Run) -> Iterator[None]:
    """Within the block, tell the metric loggers among the callbacks of an exception before it propagates.

    The command reports it by an exit code, without an uncaught exception that loggers could see at exit.
    """
    try:
        yield
    except Exception:
        for each in run.callbacks.own:
            if isinstance(each, MetricLogger):
                each.failed = True
        raise


def _peak_memory(run: Run, world: World) -> list[dict[str, int | None]]:
    """Return the peak memory of each rank, in bytes. Collective over all ranks: an all-gather.

    Each object has ``rank``, ``resident`` (of its process) and ``device`` (of tensors on the accelerator, or None).
    """
    on_device = peak_memory(world.device)
    mine = torch.tensor([peak_resident(), -1 if on_device is None else on_device], device=world.device)
    comm = run.context.comms.world
    rows = [row.tolist() for row in comm.all_gather(mine, "peak memory")]
    return [
        {"rank": comm.ranks[index], "resident": resident, "device": None if device < 0 else device}
        for index, (resident, device) in zip(comm.alive_ranks, rows, strict=True)
    ]


def _summary(job: _Job, clock: Clock, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``summary.json``: the run's identity, results of ``train_loop``, times and exit code."""
    declared = {"directions": dict(job.task.directions)} if job.task.directions else {}
    changes = {"changes": job.run.changes} if job.run.changes else {}
    times = {"started": clock.started, "ended": round(time.time(), 6)}
    return {**job.facts, **result, **declared, **changes, **times, "exit_code": _exit_code(result)}


def _show(window: Window, world: World) -> None:
    """Close a profile or trace; rank 0 prints its table."""
    window.close()
    if world.identity.rank == 0:
        print(window.table())


def _agree_on_directory(run: Run, directory: str | None) -> str | None:
    """Return the run directory, broadcast from rank 0; it also becomes the watchdog's directory if that is not set."""
    found = run.context.comms.world.broadcast_json(directory, 0, "run directory")
    if found is not None and heartbeat.process.directory() is None:
        heartbeat.process.report_to(Path(found).absolute() / "logs")
    return None if found is None else str(found)


def _steps_per_epoch(epochs: Epochs) -> int | None:
    """Return the number of steps of an epoch; None if epochs differ or a stream's length is unknown."""
    alike = epochs.growth is None and not epochs.earlier and epochs.first.dataset is not None
    return epochs.first.steps_per_epoch if alike else None


def _listeners(job: _Job, directory: str | None, resumed_at: int | None, clock: Clock) -> tuple[Listeners, Clock]:
    """Return the listeners of rank 0, and the clock that includes the time of earlier starts.

    Args:
        job: the run.
        directory: the run directory, in which records and TensorBoard's events are continued; None for the terminal
            alone.
        resumed_at: step from which the run continues; None for a new run.
        clock: first start and seconds of training, as the checkpoint has them.
    """
    found: list[Listener] = [terminal_listener(sys.stderr, job.config)]
    if directory:
        records = RunDirectory(directory, job.config, job.name, resumed_at, clock, launch_time(os.environ))
        clock = records.clock
        found.append(records)
        if job.config.tensorboard:
            found.append(TensorBoard(Path(directory) / "tensorboard", resumed_at or 0))
    return Listeners(found), clock


def _with_direction(config: TrainConfig, chosen: Task) -> TrainConfig:
    """Complete ``--keep-best NAME`` to ``NAME:lower`` or ``NAME:higher`` if the task declares the direction.

    Later readers of the run directory do not load the task. Raises UsageError if the direction is unknown.
    """
    best = config.best(chosen.directions)
    if best is None or best.metric not in chosen.directions:
        return config
    return dataclasses.replace(config, keep_best=f"{best.metric}:{'higher' if best.more else 'lower'}")


def _check_own(chosen: Task, task: str, config: TrainConfig) -> None:
    """Raise UsageError for an option that names what the task makes itself: its optimizer or scheduler."""
    for option, made, given in (
        ("optimizer", chosen.optimizer, config.optimizer != TrainConfig.optimizer),
        ("lr_scale", chosen.optimizer, config.lr_scale != TrainConfig.lr_scale),
        ("schedule", chosen.scheduler, config.schedule != TrainConfig.schedule),
    ):
        if made is not None and given:
            kind, flag = "scheduler" if option == "schedule" else "optimizer", option.replace("_", "-")
            raise UsageError(
                f"the task '{task}' makes its own {kind}, and --{flag} is {getattr(config, option)}",
                remedy=f"leave the option out, or {kind} out of the Task",
            )


def _held_out(chosen: Task, task: str, config: TrainConfig) -> Any:
    """Return the task's held-out samples, or None. Raises UsageError if ``--keep-best`` needs them."""
    if chosen.eval is not None:
        in_blocks(chosen.eval, BLOCK, _eval_collate(chosen), config.seed)
        return chosen.eval
    for option, needed in (
        ("--keep-best", config.best() is not None),
        ("--until", config.target_text is not None),
        ("--patience", config.patience is not None),
        (str(followed_by(chosen, config)), followed_by(chosen, config) is not None),
    ):
        if needed:
            raise UsageError(
                f"the task '{task}' has no held-out samples, which {option} needs", remedy=f"leave {option} out"
            )
    return None


def _eval_collate(chosen: Task) -> Collate | None:
    """Return the function that makes a batch of held-out samples; None for a ``DataLoader``, which has its own."""
    return None if isinstance(chosen.eval, DataLoader) else chosen.collate


def _watch(job: _Job, restored: Mapping[str, Any] | None) -> TargetWatch | None:
    """Return the watch of ``--until`` and ``--patience``, continued from the checkpoint; None without the options.

    Args:
        job: the run; it is warned if the checkpoint has watched another metric.
        restored: facts of the run's own checkpoint; None without a checkpoint.

    Raises:
        UsageError: the metric's direction is unknown.
        CheckpointError: the saved state is invalid.
    """
    metric = job.config.watched_metric(job.task.directions)
    if metric is None:
        return None
    watch = TargetWatch(metric, job.config.target(job.task.directions), job.config.patience)
    saved = (restored or {}).get("target")
    if saved is not None and not watch.load(saved):
        job.warnings(
            f"evaluations before the checkpoint are not counted: the run did not watch {metric.name} until now"
        )
    return watch


def _make_plateau(config: TrainConfig, chosen: Task) -> Plateau | None:
    """Return the schedule that evaluations move, ``--schedule plateau``; None for another schedule."""
    schedule = config.lr_schedule
    return Plateau(schedule, schedule.measured(chosen.directions)) if isinstance(schedule, PlateauSchedule) else None


def _restore(job: _Job, saver: Checkpoints) -> Mapping[str, Any] | None:
    """Continue from the run's newest checkpoint: model, task's own optimizers, schedulers, callbacks. Collective.

    Args:
        job: the run; it is warned if the checkpoint's schedule has followed another metric.
        saver: the run's checkpoints.

    Returns:
        Facts of the checkpoint; None if there is none.
    """
    run, config, plateau = job.run, job.config, job.plateau
    restored = saver.restore(config.changes)
    if restored is None:
        return None
    run.schedulers.refuse_change(config.changes)
    restore_optimizers(run, restored, config.changes)
    under_way = restored.get("epoch_under_way")
    if under_way is not None and run.data_position.epoch > under_way:
        # A checkpoint of an epoch's last step is saved before schedulers that step after epochs have stepped.
        run.schedulers.after_epoch()
    run.callbacks.load_run(restored)
    if plateau is not None:
        _load_plateau(plateau, restored.get("plateau"), job.warnings)
    return restored


def _load_plateau(plateau: Plateau, saved: Any, warn: Callable[[str], None]) -> None:
    """Continue the schedule ``plateau`` from a checkpoint, which may have none; ``warn`` is told of another metric.

    Raises CheckpointError if the saved state is invalid.
    """
    if saved is None:
        return
    try:
        loaded = plateau.load(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("the checkpoint's 'plateau' is invalid", why=repr(error), remedy=REMEDY) from error
    if not loaded:
        warn(f"the schedule plateau begins anew: the run did not follow {plateau.metric.name} until now")


def _exit_code(result: Mapping[str, Any]) -> ExitCode:
    """Return the exit code of a finished run: ``THRESHOLD`` if it has not reached its target."""
    return ExitCode.DONE if result.get("target", {"reached": True})["reached"] else ExitCode.THRESHOLD


def _warm_start(job: _Job, restored: Mapping[str, Any] | None) -> dict[str, str]:
    """Warm-start the run if ``init_from`` is set and no checkpoint was restored. Collective.

    Args:
        job: the run, whose facts get an entry ``init_from``.
        restored: facts of the run's own checkpoint, whose weights take precedence; None without a checkpoint.

    Returns:
        The header's line about the initial weights, if any.
    """
    run, config = job.run, job.config
    if config.init_from is None:
        return {}
    if restored is not None:
        return {"initial weights": f"this run's at step {run.global_step}; {config.init_from} is not read again"}
    begun = load_warm_start(run, config.init_from, config.initial_map)
    job.facts["init_from"] = begun.path
    return {"initial weights": str(begun)}


def _saver(job: _Job, directory: str | None) -> Checkpoints | None:
    """Return the run's checkpoints in the run directory; None without a directory. Collective over all ranks."""
    if directory is None:
        return None
    run, config = job.run, job.config
    kept = {**job.facts, "training_samples": run.feed.contract.dataset, "config_sha256": config_sha256(config)}
    path, best = Path(directory) / FOLDER, config.best()
    saver = Checkpoints(run, path, job.world, kept, config.keep, job.warnings, best=best)
    saver.open()
    return saver
