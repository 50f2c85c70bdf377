"""Length of ``tutti train``, intervals of its evaluations and checkpoints, and its learning-rate schedule, in steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TypeAlias

from tutti.config.optimizer_config import PlateauSchedule
from tutti.config.spec import Duration
from tutti.config.train_config import TrainConfig
from tutti.data.epochs import Epochs
from tutti.errors import UsageError
from tutti.optim.plateau import Plateau
from tutti.optim.schedules import Schedule, make_schedule
from tutti.tasks.task import Task
from tutti.train.run import Run

Length: TypeAlias = int | Duration
"""Steps; or samples or whole epochs, where their number of steps is not known beforehand (streams, growing batches)."""


@dataclass(frozen=True)
class TrainPlan:
    """Length of training, and intervals of evaluations and checkpoints.

    A length or interval is a number of steps (int), or a ``Duration`` in samples or whole epochs where the number of
    steps in it is not known beforehand: for streams and growing batches.

    Attributes:
        total: length of the run.
        evaluate: interval of evaluations; None: only at the end.
        save: interval of checkpoints; None: never.
    """

    total: Length
    evaluate: Length | None = None
    save: Length | None = None


def passed(length: Length, run: Run) -> int:
    """Return how many whole intervals of ``length`` the run has trained so far, counted from its first start.

    Args:
        length: an interval: a number of steps, or a ``Duration`` in samples or epochs.
        run: the run; steps, samples and epochs before a resume count, too.
    """
    if isinstance(length, int):
        return run.global_step // length
    return int((run.data_position.epoch if length.unit == "ep" else run.samples) // length.value)


def ended(length: Length, run: Run) -> bool:
    """Return whether the run has trained for ``length``, counted from its first start.

    A length in steps counts the schedule's steps (``Run.progress``), which differ from steps of the run with AdaScale.

    Args:
        length: length of training in steps (an int), samples or epochs (a ``Duration``).
        run: the run.
    """
    return run.progress >= length if isinstance(length, int) else passed(length, run) > 0


class Due:
    """Callable without arguments that tells after each step whether a periodic event, such as an evaluation, is due.

    The result is True when a further whole interval has been trained since the previous call, and at the end of the
    run. Must be called once after each step. Not collective.

    Args:
        every: the interval in steps, samples or epochs; None: only at the end.
        total: length of the run.
        run: the run, which may be resumed.
    """

    def __init__(self, every: Length | None, total: Length, run: Run) -> None:
        self._every, self._total, self._run = every, total, run
        self._count = 0 if every is None else passed(every, run)

    def __call__(self) -> bool:
        """Return whether the periodic event is due after the last training step; must be called exactly once a step.

        The event is due when a whole interval has passed since the last call, or the run has ended.
        """
        before, self._count = self._count, 0 if self._every is None else passed(self._every, self._run)
        return self._count > before or ended(self._total, self._run)


def make_train_plan(config: TrainConfig, epochs: Epochs) -> tuple[TrainPlan, int | None]:
    """Return the length of training and the intervals of evaluations and checkpoints, and the total number of steps.

    Args:
        config: the configuration.
        epochs: global batches of all epochs.

    Returns:
        A pair: a ``TrainPlan``, and the run's number of steps as its learning-rate schedule counts them (with AdaScale
        scale-invariant steps, with ``regime_batch`` steps of that batch size); None if the length is in epochs of a
        stream of unknown length.

    Raises:
        UsageError: the length of the run is less than half a step; or a length or interval is a part of an epoch of
            unknown length.
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


def followed_by(task: Task, config: TrainConfig) -> str | None:
    """Return the option by which evaluations change the learning rate, for messages; None if none does.

    Args:
        task: the task, which may make schedulers that evaluations step.
        config: the configuration.
    """
    if isinstance(config.lr_schedule, PlateauSchedule):
        return "--schedule plateau"
    if task.scheduler is not None and task.scheduler_every.startswith("evaluation"):
        return f"Task(scheduler_every='{task.scheduler_every}')"
    return None


def check_evaluations(task: Task, config: TrainConfig, plan: TrainPlan, epochs: Epochs) -> str | None:
    """Check that evaluations come early and often enough to change the learning rate, where the rate follows them.

    The rate follows evaluations with ``--schedule plateau``, and where the task's scheduler steps at evaluations. An
    evaluation at the end of the run does not count, because no step follows it.

    Args:
        task: the task, which may make schedulers that evaluations step.
        config: the configuration.
        plan: length of training and interval of evaluations.
        epochs: global batches of all epochs.

    Returns:
        A warning's text where ``--schedule plateau`` has at most ``patience`` + 1 evaluations before the end, too few
        to lower the rate. Otherwise None; also where the rate does not follow evaluations, and where one of the run's
        length and the interval of evaluations is in steps and the other in epochs of unknown length.

    Raises:
        UsageError: the rate follows evaluations, and none comes before the end of the run.
    """
    option, schedule = followed_by(task, config), config.lr_schedule
    if option is None:
        return None
    late = UsageError(
        f"{option} follows evaluations, and the run ends before or at its first one",
        where=f"--eval-every {config.eval_every}",
        remedy="evaluate more often, such as --eval-every 100st, or take another schedule",
    )
    if plan.evaluate is None:
        raise late
    lengths = [_comparable(length, epochs) for length in (plan.total, plan.evaluate)]
    if lengths[0][1] != lengths[1][1]:
        return None
    # An evaluation at the end of the run comes too late to change a rate.
    before_end = math.ceil(lengths[0][0] / lengths[1][0]) - 1
    if not before_end:
        raise late
    if isinstance(schedule, PlateauSchedule) and before_end <= schedule.patience + 1:
        return (
            f"--schedule plateau cannot lower the rate: it waits for {schedule.patience + 1} evaluations without a"
            f" better {schedule.metric} after the first, and the run has {before_end} before its end"
        )
    return None


def _comparable(length: Length, epochs: Epochs) -> tuple[float, str]:
    """Return a length in steps, with its unit; in epochs if it is of a stream of unknown length."""
    if isinstance(length, int):
        return length, "st"
    unknown = epochs.first.dataset is None and length.unit == "ep"
    return (length.value, "ep") if unknown else (epochs.steps(length), "st")


def make_lr_schedule(config: TrainConfig, epochs: Epochs, plateau: Plateau | None = None) -> Schedule:
    """Return the function from a step to the factor on the initial learning rate, for the whole run.

    Args:
        config: the configuration, which names the schedule and the length of the run.
        epochs: global batches of all epochs.
        plateau: state of the schedule ``plateau``, whose factor multiplies that of the warm-up; None for other
            schedules, and for a run without evaluations.

    Returns:
        A function from the number of steps so far (an int from 0) to the factor (a float).

    Raises:
        UsageError: the length of the run is less than half a step; a length is a part of an epoch of unknown length; or
            the schedule decreases over the whole run, and the run's number of steps is unknown.
    """
    total = make_train_plan(config, epochs)[1]
    scaled = config.lr_rule.factor(epochs.first.batch)
    schedule = make_schedule(config.lr_schedule, total, _steps(config, epochs), scaled)
    return schedule if plateau is None else lambda step: schedule(step) * plateau.factor


def _steps(config: TrainConfig, epochs: Epochs) -> Callable[[Duration], int]:
    """Return the function from a duration to steps, which may count batches of another size than the run's.

    Regime adaptation: Hoffer et al. 2017, arXiv 1705.08741, §5. AdaScale counts scale-invariant steps: those of one
    worker with its own share of the batch.
    """
    batch: int | Fraction | None = config.regime_batch
    if config.lr_rule.adaptive:
        batch = Fraction(epochs.first.batch, epochs.first.workers)
    return epochs.steps if batch is None else partial(Duration.steps, dataset=epochs.first.dataset, batch=batch)
