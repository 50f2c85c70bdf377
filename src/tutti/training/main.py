"""One rank's part of ``tutti train``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti import strategies
from tutti.data.adapt import adapt
from tutti.data.epochs import Epochs
from tutti.data.source import Source
from tutti.errors import Preempted, UsageError
from tutti.measure.memory import free
from tutti.nn.spill import spilling
from tutti.optim.config import check_schedule
from tutti.optim.scaling import Adaptive, check_rule
from tutti.optim.schedules import Schedule
from tutti.optim.schedules import make as make_schedule
from tutti.spec import Duration
from tutti.state.source import FOLDER
from tutti.tasks import table
from tutti.tasks.task import Task
from tutti.training.checkpoint import Checkpoints
from tutti.training.config import TrainConfig
from tutti.training.events import TensorBoard
from tutti.training.growing import of_model, of_plan, said_elsewhere
from tutti.training.header import derived, identity, title
from tutti.training.initial import begin_with
from tutti.training.listener import Header, Listener, Listeners
from tutti.training.loop import Length, Means, Plan, train
from tutti.training.prepare import prepare
from tutti.training.profile import TABLE as PROFILE
from tutti.training.profile import Window, profiled
from tutti.training.progress import terminal_listener
from tutti.training.records import RunDirectory, config_sha256
from tutti.training.run import Run
from tutti.training.stopping import stopping
from tutti.training.trace import TABLE as TRACE
from tutti.training.trace import traced
from tutti.world import context, heartbeat
from tutti.world.context import World


def main(task: str, config: TrainConfig, directory: str | None) -> int:
    """Train this rank's part of the run; rank 0 speaks and writes into ``directory``.

    Returns:
        0. Whatever goes wrong is raised, as a TuttiError with its exit code where it was foreseen.
    """
    world = context.init(config.device, config.timeout)
    threads = prepare_process(config, world)
    chosen = table.load(task, data=config.data, model=config.model, augment=config.augment)
    model = built(chosen, config, world)
    size = sum(p.numel() for p in model.parameters())
    run = prepared(chosen, model, config, world)
    epochs = run.feed.epochs
    plan, total = _plan(config, epochs)
    run.lr_factor = _schedule(config, epochs, total)
    held_out = _held_out(chosen, task, config)
    facts = identity(task, config, run, world, size, threads)
    # An attempt that the launcher started anew continues as --resume would.
    again = config.resume is not None or world.identity.attempt > 0
    place = _place(run, directory)
    listeners = Listeners(())
    # What is to be told before anybody listens: which checkpoints were passed over, too.
    early = [*of_model(epochs, model, config.batch_norm), *of_plan(epochs, config, total)]
    try:
        with stopping(run) as reason:
            saver = _saver(run, place, world, config, facts, early.append)
            restored = saver.restore() if saver is not None and again else None
            origin = _begin(run, config, restored, facts)
            if world.identity.rank == 0:
                own = _listeners(directory, config, task, run.clock if again else None) if directory else []
                listeners = Listeners([terminal_listener(sys.stderr, config), *own])
            for text in early:
                listeners.warned(text)
            run.checks.diagnoses.tell = listeners.warned
            if run.losses is not None:
                run.losses.tell = listeners.warned
            steps = total if run.adascale is None else None
            if steps is not None and not config.regime_batch:
                run.checks.planned(steps)
            if saver is not None:
                saver.warn = listeners.warned
            windows = _windows(config, run, steps, place, again, listeners)
            lines = {**derived(chosen, config, run, world, total, facts), **origin}
            header = Header(title(task, config), lines, steps, _per_epoch(epochs))
            means = Means.saved(restored) if restored else None
            result = train(run, plan, held_out, header, listeners, saver, means, windows)
        listeners.finished({**facts, **result, "exit_code": 0})
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
    """End what is watched; rank 0 prints its table."""
    window.close()
    if world.identity.rank == 0:
        print(window.table())


def _place(run: Run, directory: str | None) -> str | None:
    """The run directory, which rank 0 knows; where the watchdog leaves what it finds, if nobody has told it."""
    place = run.setting.comms.world.broadcast_json(directory, 0, "run directory")
    if place is not None and heartbeat.process.directory() is None:
        heartbeat.process.report_to(Path(place).absolute() / "logs")
    return None if place is None else str(place)


def _schedule(config: TrainConfig, epochs: Epochs, total: int | None) -> Schedule:
    scaled = check_rule(config.lr_scale).factor(epochs.first.batch)
    return make_schedule(check_schedule(config.schedule), total, _steps(config, epochs), scaled)


def _steps(config: TrainConfig, epochs: Epochs) -> Callable[[Duration], int]:
    """How many steps a duration is, which may be counted in batches of another size.

    Regime adaptation: Hoffer et al. 2017, arXiv 1705.08741, §5. AdaScale counts the steps of one worker with its own
    batch, which those of the run are worth.
    """
    batch: int | Fraction | None = config.regime_batch
    if isinstance(check_rule(config.lr_scale), Adaptive):
        batch = Fraction(epochs.first.batch, epochs.first.workers)
    return epochs.steps if batch is None else partial(Duration.steps, dataset=epochs.first.dataset, batch=batch)


def _per_epoch(epochs: Epochs) -> int | None:
    """Steps in every epoch; None where they differ or nobody knows."""
    alike = epochs.growth is None and epochs.first.dataset is not None
    return epochs.first.steps_per_epoch if alike else None


def _listeners(directory: str, config: TrainConfig, task: str, resumed: int | None) -> list[Listener]:
    """What writes into the run directory; ``resumed`` at a step, it goes on there."""
    found: list[Listener] = [RunDirectory(directory, config, task, resumed)]
    if config.tensorboard:
        found.append(TensorBoard(Path(directory) / "tensorboard", resumed or 0))
    return found


def _windows(
    config: TrainConfig, run: Run, total: int | None, place: str | None, again: bool, listener: Listener
) -> list[Window]:
    """The steps to profile and to trace. Raises UsageError where the run is shorter; one that goes on may be."""
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
        said = f"--{name} {getattr(config, name)} needs {first + steps - 1} steps, and the run has {left}"
        if not again:
            raise UsageError(said, remedy=f"write --{name} FIRST:STEPS within the run")
        listener.warned(f"{said} left: there will be no {name}")
    return found


def _plan(config: TrainConfig, epochs: Epochs) -> tuple[Plan, int | None]:
    """How long and how often; and how many steps that is, or None where only the end of a stream will tell."""
    dataset = epochs.first.dataset

    def count(duration: Duration, option: str) -> Length:
        if duration.unit == "st" or (dataset is not None and epochs.growth is None):
            return max(1, epochs.steps(duration))
        if dataset is not None:
            # The same number of samples is another number of steps once the batch has grown.
            return Duration(max(1, round(duration.value * (dataset if duration.unit == "ep" else 1))), "sa")
        if duration.unit == "ep" and duration.value != int(duration.value):
            raise UsageError(
                f"{duration} of a stream of unknown length cannot be counted",
                where=option,
                remedy="give whole epochs, or steps (500st) or samples (20000sa)",
            )
        return duration

    length, every = config.length(), (config.every("eval_every"), config.every("checkpoint_every"))
    evaluate, save = (duration and count(duration, "how often") for duration in every)
    adaptive = isinstance(check_rule(config.lr_scale), Adaptive)
    if dataset is not None or config.regime_batch or adaptive:
        total = _steps(config, epochs)(length)
        return Plan(total, evaluate, save), total
    steps = None if length.unit == "ep" else epochs.steps(length)
    return Plan(count(length, "how long"), evaluate, save), steps


def _held_out(chosen: Task, task: str, config: TrainConfig) -> Source | None:
    """The task's held-out samples. Raises UsageError where there are none and the best is to be kept."""
    if chosen.eval is not None:
        return adapt(chosen.eval)
    if config.best() is not None:
        raise UsageError(
            f"the task '{task}' has no held-out samples to keep the best by", remedy="leave --keep-best out"
        )
    return None


def _begin(run: Run, config: TrainConfig, restored: Mapping[str, Any] | None, facts: dict[str, Any]) -> dict[str, str]:
    """A warm start where one is asked for, noted in ``facts``, and what to say of it. Collective.

    A run that goes on has its weights from its own checkpoint; one that has none yet begins as it did before.
    """
    if config.init_from is None:
        return {}
    if restored is not None:
        return {"initial weights": f"this run's at step {run.clock}; {config.init_from} is not read again"}
    facts["init_from"] = begin_with(run, config.init_from)
    return {"initial weights": facts["init_from"]}


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
    """The task's model; in files, as far as it is large, where every device keeps a part of it alone.

    A quarter of what is free is left to it (a guess): there must be room for the part, too, and for what training adds.
    """
    if not strategies.parse(config.strategy).parts(world.identity.size):
        return task.model()
    with spilling(above=free(world.identity.local_size) // 4):
        return task.model()


@said_elsewhere()
def prepared(task: Task, model: nn.Module, config: TrainConfig, world: World) -> Run:
    """The run that the configuration describes."""
    return prepare(
        model,
        config.optimizer,
        task.train,
        task.loss,
        strategy=config.strategy,
        workers=config.workers,
        batch_size=config.batch_size,
        batch_growth=config.growth(),
        micro_batch=config.micro_batch,
        precision=config.precision,
        loss_scale=config.loss_scale,
        channels_last=task.images if config.channels_last is None else config.channels_last,
        lr_scale=config.lr_scale,
        batch_norm=config.batch_norm,
        identical_batches=config.identical_batches,
        clip=config.clip,
        gradient_noise=config.gradient_noise,
        ema=config.averaging(),
        reproducible=config.reproducible,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
        seed=config.seed,
        max_nonfinite=config.max_nonfinite,
        data_workers=config.data_workers,
        slow=config.slowness(),
    )


def prepare_process(config: TrainConfig, world: World) -> int:
    """Seed PyTorch, and set the CPU threads: as asked, one in reproducible mode, else this host's cores shared out."""
    torch.manual_seed(config.seed)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = config.threads or (1 if config.reproducible else max(1, cores // world.identity.local_size))
    torch.set_num_threads(threads)
    return threads
