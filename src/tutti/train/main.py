"""One rank of ``tutti train``: from the configuration to the run, its listeners and the training loop."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti import parallel
from tutti.checkpoint.weights_source import FOLDER
from tutti.comm.stall import TellFailures
from tutti.config.spec import Duration
from tutti.config.train_config import TrainConfig
from tutti.data.epochs import Epochs
from tutti.device import is_accelerator, usable_cores
from tutti.errors import ExitCode, Preempted, UsageError, counted
from tutti.host_memory import free_memory
from tutti.launcher import context, heartbeat
from tutti.launcher.context import World
from tutti.metrics.events import TensorBoard
from tutti.metrics.listener import Clock, EarlyWarnings, Listener, Listeners, RunHeader
from tutti.metrics.profile import TABLE as PROFILE
from tutti.metrics.progress import terminal_listener
from tutti.metrics.records import RunDirectory, config_sha256
from tutti.metrics.trace import TABLE as TRACE
from tutti.nn.init_on_disk import spilling
from tutti.optim.schedules import Schedule, make_schedule
from tutti.process_context import launch_time
from tutti.tasks import task_registry
from tutti.tasks.task import Task
from tutti.train.batch_size_schedule import model_warnings, plan_warnings, without_growth_warnings
from tutti.train.evaluation import BLOCK, in_blocks
from tutti.train.header import derived, run_identity, title
from tutti.train.loop import Length, TrainPlan, train_loop
from tutti.train.loop_meters import Means
from tutti.train.metric_loggers import MetricLogger
from tutti.train.preemption import stop_on_signals
from tutti.train.prepare import prepare_run
from tutti.train.run import Run
from tutti.train.run_checkpoints import Checkpoints
from tutti.train.run_options import RunOptions
from tutti.train.step_windows import Window, profiled, traced
from tutti.train.target_watch import TargetWatch
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
    model = built(chosen, config, world)
    size = sum(p.numel() for p in model.parameters())
    warnings = EarlyWarnings()
    run = prepared(chosen, model, config, world, warnings, callbacks=chosen.callbacks)
    epochs = run.feed.epochs
    plan, total = _plan(config, epochs)
    held_out = _held_out(chosen, task, config)
    facts = run_identity(task, config, run, world, size, threads)
    # A restart by the launcher continues like --resume.
    again = config.resume is not None or world.identity.attempt > 0
    place = _place(run, directory)
    listeners = Listeners(())
    for text in (*model_warnings(epochs, model, config.batch_norm_options), *plan_warnings(epochs, config, total)):
        warnings(text)
    try:
        with stop_on_signals(run) as reason:
            saver = _saver(run, place, world, config, facts, warnings)
            restored = saver.restore(config.changes) if saver is not None and again else None
            if restored is not None:
                run.callbacks.load_run(restored)
            if run.feed.epochs.earlier:
                # The epochs until now had other batches: the plan and the schedule count them as they were.
                epochs = run.feed.epochs
                plan, total = _plan(config, epochs)
                run.lr_schedule = _schedule(config, epochs)
            origin = _begin(run, config, restored, facts)
            clock = Clock.saved(restored or {}) if again else Clock(time.time())
            if world.identity.rank == 0:
                listeners, clock = _listeners(directory, config, task, run.clock if again else None, clock)
            warnings.pass_to(listeners.warned)
            steps = total if run.adascale is None else None
            if steps is not None and not config.regime_batch:
                run.checks.planned(steps)
            windows = _windows(config, run, steps, place, again, listeners)
            lines = {**derived(chosen, config, run, world, total, facts), **origin}
            header = RunHeader(title(task, config), lines, steps, _per_epoch(epochs))
            means = Means.saved(restored) if restored else None
            watch = _watch(config, chosen, restored, warnings)
            worth = partial(measured_throughput, chosen, config, world, run, listeners.warned)
            first = worth if world.identity.rank == 0 else None
            try:
                result = train_loop(run, plan, held_out, header, listeners, saver, means, windows, clock, first, watch)
            except Exception:
                # The command tells of it by an exit code, without an uncaught exception that loggers could see at exit.
                for each in run.callbacks.own:
                    if isinstance(each, MetricLogger):
                        each.failed = True
                raise
        declared = {"directions": dict(chosen.directions)} if chosen.directions else {}
        times = {"started": clock.started, "ended": round(time.time(), 6)}
        changes = {"changes": run.changes} if run.changes else {}
        listeners.finished({**facts, **result, **declared, **changes, **times, "exit_code": _exit_code(result)})
    except Preempted as stop:
        listeners.warned(str(stop))
        raise reason.error(stop) from None
    finally:
        listeners.close()
    for window in windows:
        _show(window, world)
    context.shutdown()
    return 0


def _show(window: Window, world: World) -> None:
    """Close a profile or trace; rank 0 prints its table."""
    window.close()
    if world.identity.rank == 0:
        print(window.table())


def _place(run: Run, directory: str | None) -> str | None:
    """Return the run directory, broadcast from rank 0; it also becomes the watchdog's directory if that is not set."""
    place = run.context.comms.world.broadcast_json(directory, 0, "run directory")
    if place is not None and heartbeat.process.directory() is None:
        heartbeat.process.report_to(Path(place).absolute() / "logs")
    return None if place is None else str(place)


def _schedule(config: TrainConfig, epochs: Epochs) -> Schedule:
    total = _plan(config, epochs)[1]
    scaled = config.lr_rule.factor(epochs.first.batch)
    return make_schedule(config.lr_schedule, total, _steps(config, epochs), scaled)


def _steps(config: TrainConfig, epochs: Epochs) -> Callable[[Duration], int]:
    """Return the function from a duration to steps, which may count batches of another size than the run's.

    Regime adaptation: Hoffer et al. 2017, arXiv 1705.08741, §5. AdaScale counts scale-invariant steps: those of one
    worker with its own share of the batch.
    """
    batch: int | Fraction | None = config.regime_batch
    if config.lr_rule.adaptive:
        batch = Fraction(epochs.first.batch, epochs.first.workers)
    return epochs.steps if batch is None else partial(Duration.steps, dataset=epochs.first.dataset, batch=batch)


def _per_epoch(epochs: Epochs) -> int | None:
    """Return the number of steps of an epoch; None if epochs differ or a stream's length is unknown."""
    alike = epochs.growth is None and not epochs.earlier and epochs.first.dataset is not None
    return epochs.first.steps_per_epoch if alike else None


def _listeners(
    directory: str | None, config: TrainConfig, task: str, resumed_at: int | None, clock: Clock
) -> tuple[Listeners, Clock]:
    """Return the listeners of rank 0, and the clock that includes the time of earlier starts.

    Args:
        directory: the run directory, in which records and TensorBoard's events are continued; None for the terminal
            alone.
        config: the configuration.
        task: name of the task.
        resumed_at: step from which the run continues; None for a new run.
        clock: first start and seconds of training, as the checkpoint has them.
    """
    found: list[Listener] = [terminal_listener(sys.stderr, config)]
    if directory:
        records = RunDirectory(directory, config, task, resumed_at, clock, launch_time(os.environ))
        clock = records.clock
        found.append(records)
        if config.tensorboard:
            found.append(TensorBoard(Path(directory) / "tensorboard", resumed_at or 0))
    return Listeners(found), clock


def _windows(
    config: TrainConfig, run: Run, total: int | None, place: str | None, again: bool, listener: Listener
) -> list[Window]:
    """Return the windows of steps to profile and to trace.

    Args:
        config: the configuration.
        run: the run.
        total: steps of the run; None if unknown.
        place: the run directory; None for no windows.
        again: whether the run is resumed.
        listener: is warned if a resumed run has too few steps left.

    Raises:
        UsageError: a fresh run has too few steps.
    """
    found = []
    for name, watch, table_ in (("profile", profiled, PROFILE), ("trace", traced, TRACE)):
        asked = config.window(name)
        if asked is None or place is None:
            continue
        first, steps = asked
        left = math.inf if total is None else total - run.clock
        if first + steps - 1 <= left:
            found.append(Window(run, watch, Path(place) / name, table_, first, steps))
            continue
        message = f"--{name} {getattr(config, name)} needs {counted(first + steps - 1, 'step')}, and the run has {left}"
        if not again:
            raise UsageError(message, remedy=f"write --{name} FIRST:STEPS within the run")
        listener.warned(f"{message} left: there will be no {name}")
    return found


def _plan(config: TrainConfig, epochs: Epochs) -> tuple[TrainPlan, int | None]:
    """Return the plan of lengths and intervals, and the total of steps (None for a stream of unknown length).

    Raises UsageError for epochs that round to no step.
    """
    dataset = epochs.first.dataset

    def count(duration: Duration, option: str) -> Length:
        if duration.unit == "st" or (dataset is not None and epochs.growth is None and not epochs.earlier):
            return max(1, epochs.steps(duration))
        if epochs.earlier and duration.unit == "ep" and duration.value == int(duration.value):
            return duration
        if dataset is not None:
            # As samples: the number of steps in an epoch changes when the batch size grows.
            return Duration(max(1, round(duration.value * (dataset if duration.unit == "ep" else 1))), "sa")
        if duration.unit == "ep" and duration.value != int(duration.value):
            raise UsageError(
                f"{duration} of a stream of unknown length cannot be counted",
                where=option,
                remedy="give whole epochs, or steps (500st) or samples (20000sa)",
            )
        return duration

    length, every = config.length, (config.eval_interval, config.checkpoint_interval)
    evaluate, save = (duration and count(duration, "how often") for duration in every)
    adaptive = config.lr_rule.adaptive
    if dataset is not None or config.regime_batch or adaptive:
        steps_of = _steps(config, epochs)
        total = steps_of(length)
        if not total:
            least = 1 / steps_of(Duration(1, "ep"))
            raise UsageError(
                f"{length.value:g} epochs are less than half a step, so that the run would train nothing",
                where="--epochs or --duration",
                remedy=f"give --steps 1, or at least {least:.2g} epochs",
            )
        return TrainPlan(total, evaluate, save), total
    steps = None if length.unit == "ep" else epochs.steps(length)
    return TrainPlan(count(length, "how long"), evaluate, save), steps


def _with_direction(config: TrainConfig, chosen: Task) -> TrainConfig:
    """Complete ``--keep-best NAME`` to ``NAME:lower`` or ``NAME:higher`` if the task declares the direction.

    Later readers of the run directory do not load the task. Raises UsageError if the direction is unknown.
    """
    best = config.best(chosen.directions)
    if best is None or best.metric not in chosen.directions:
        return config
    return dataclasses.replace(config, keep_best=f"{best.metric}:{'higher' if best.more else 'lower'}")


def _held_out(chosen: Task, task: str, config: TrainConfig) -> Any:
    """Return the task's held-out samples, or None. Raises UsageError if ``--keep-best`` needs them."""
    if chosen.eval is not None:
        in_blocks(chosen.eval, BLOCK, None, config.seed)
        return chosen.eval
    for option, needed in (
        ("--keep-best", config.best() is not None),
        ("--until", config.target_text is not None),
        ("--patience", config.patience is not None),
    ):
        if needed:
            raise UsageError(
                f"the task '{task}' has no held-out samples, which {option} needs", remedy=f"leave {option} out"
            )
    return None


def _watch(
    config: TrainConfig, chosen: Task, restored: Mapping[str, Any] | None, warn: Callable[[str], None]
) -> TargetWatch | None:
    """Return the watch of ``--until`` and ``--patience``, continued from the checkpoint; None without the options.

    Args:
        config: the configuration.
        chosen: the task, which may declare the metric's direction.
        restored: facts of the run's own checkpoint; None without a checkpoint.
        warn: is told if the checkpoint has watched another metric.

    Raises:
        UsageError: the metric's direction is unknown.
        CheckpointError: the saved state is invalid.
    """
    metric = config.watched_metric(chosen.directions)
    if metric is None:
        return None
    watch = TargetWatch(metric, config.target(chosen.directions), config.patience)
    saved = (restored or {}).get("target")
    if saved is not None and not watch.load(saved):
        warn(f"evaluations before the checkpoint are not counted: the run did not watch {metric.name} until now")
    return watch


def _exit_code(result: Mapping[str, Any]) -> ExitCode:
    """Return the exit code of a finished run: ``THRESHOLD`` if it has not reached its target."""
    return ExitCode.DONE if result.get("target", {"reached": True})["reached"] else ExitCode.THRESHOLD


def _begin(run: Run, config: TrainConfig, restored: Mapping[str, Any] | None, facts: dict[str, Any]) -> dict[str, str]:
    """Warm-start the run if ``init_from`` is set and no checkpoint was restored. Collective.

    Args:
        run: the run.
        config: the configuration.
        restored: facts of the run's own checkpoint, whose weights take precedence; None without a checkpoint.
        facts: gets an entry ``init_from``.

    Returns:
        The header's line about the initial weights, if any.
    """
    if config.init_from is None:
        return {}
    if restored is not None:
        return {"initial weights": f"this run's at step {run.clock}; {config.init_from} is not read again"}
    begun = load_warm_start(run, config.init_from, config.initial_map)
    facts["init_from"] = begun.path
    return {"initial weights": str(begun)}


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
    saver = Checkpoints(run, Path(place) / FOLDER, world, kept, config.keep, warn, best=config.best())
    saver.open()
    return saver


def built(task: Task, config: TrainConfig, world: World) -> nn.Module:
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
    if not parallel.parse_strategy(config.strategy).parts(world.identity.size):
        return task.model()
    with spilling(above=free_memory(world.identity.local_size) // 4):
        return task.model()


@without_growth_warnings()
def prepared(
    task: Task,
    model: nn.Module,
    config: TrainConfig,
    world: World,
    warn: Callable[[str], None] | None = None,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Place a task's model on this rank's device and return a run that is ready for its first step.

    Collective over all ranks.

    As ``tutti.prepare`` does for a script: broadcasts the initial weights, splits the model as the strategy says, and
    makes optimizer and data, all with the options of the configuration.

    Args:
        task: the task, for its data and loss function.
        model: the task's model, changed in place where the strategy splits it.
        config: the resolved configuration.
        world: unused; the ranks are those of ``tutti.init``.
        warn: receives the text of warnings about mistakes of the run and about killed ranks; None for Python's
            ``warnings`` and stderr.
        callbacks: the task's callbacks; none where a run is prepared only to be measured.

    Returns:
        The run, which holds model, optimizer, data and strategy.

    Raises:
        UsageError, DataError: options that do not go together, or a model or data that cannot be trained with them.
        MismatchError: models or options differ between ranks.
    """
    options = RunOptions(
        strategy=config.strategy,
        workers=config.workers,
        batch_size=config.batch_size,
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
        callbacks=callbacks,
    )
    schedule = partial(_schedule, config)
    return prepare_run(model, config.optimizer_choice, task.train, task.loss, options, schedule, warn)


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
