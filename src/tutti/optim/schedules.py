"""Learning-rate schedules as pure functions of the step. No torch.

Every factor multiplies the initial learning rate of each parameter group, and depends only on the number of steps
taken: resuming needs no state. Of the schedule ``plateau`` this is the warm-up; evaluations change ``Plateau.factor``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tutti.config.optimizer_config import (
    SCHEDULES,
    WHOLE_RUN,
    ConstantSchedule,
    CosineSchedule,
    ExponentialSchedule,
    LinearSchedule,
    OneCycleSchedule,
    PolynomialSchedule,
    StepSchedule,
    WSDSchedule,
)
from tutti.config.spec import Duration
from tutti.errors import UsageError
from tutti.optim.learning_rate import gradual

Schedule = Callable[[int], float]


def make_schedule(
    config: ConstantSchedule, total: int | None, steps: Callable[[Duration], int], scaled: float = 1.0
) -> Schedule:
    """Return a schedule: a function from the step (0, 1, …, ``total`` - 1) to a factor on the initial learning rate.

    Args:
        config: the schedule's options; ``ConstantSchedule`` is the base class of all of
            ``tutti.config.optimizer_config.SCHEDULES``.
        total: steps in the run; None if unknown before the end of a stream.
        steps: converts a duration from the start of the run, in steps, samples or epochs, to steps.
        scaled: factor by which a scaling rule has multiplied the initial rate for the batch size; if above 1, the
            warm-up starts at the rate before that scaling, unless ``config`` says otherwise.

    Raises:
        UsageError: the schedule needs ``total``, which is None.
    """
    if total is None and isinstance(config, WHOLE_RUN):
        name = next(name for name, kind in SCHEDULES.items() if kind is type(config))
        raise UsageError(
            f"the schedule {name} decreases over the whole run, whose length is not known",
            remedy="give --steps or --samples, or the data set __len__",
        )
    warmup = steps(config.warmup_length)
    start = config.warmup_from
    if start is None:
        start = 1 / scaled if scaled > 1 else 0.0
    milestones = tuple(map(steps, config.drops))
    every = max(steps(config.interval), 1) if isinstance(config, ExponentialSchedule) else 1

    def factor(step: int) -> float:
        if step < warmup:
            # From 0, the first step would change nothing: start with the first increment.
            return gradual(step, warmup, start) if start > 0 else gradual(step + 1, warmup, 0.0)
        progress = (step - warmup) / max((total or 0) - warmup, 1)
        if isinstance(config, CosineSchedule):
            return cosine_decay(progress, config.final)
        if isinstance(config, LinearSchedule):
            return linear_decay(progress, config.final)
        if isinstance(config, StepSchedule):
            return stepped(step, milestones, config.gamma)
        if isinstance(config, PolynomialSchedule):
            return polynomial_decay(progress, config.power, config.final)
        if isinstance(config, ExponentialSchedule):
            return float(config.gamma ** (step // every))
        if isinstance(config, WSDSchedule):
            return stable_decay(step / max(total or 0, 1), config.decay, config.final, config.shape == "sqrt")
        if isinstance(config, OneCycleSchedule):
            return one_cycle(step, total or 1, config.rise, config.start, config.final)
        return 1.0

    return factor


def cosine_decay(progress: float, final: float) -> float:
    """Return a cosine decay's factor on the initial learning rate: final + (1 - final) · (1 + cos(π · progress)) / 2.

    Args:
        progress: fraction of the decay that has passed, from 0; above 1 counts as 1.
        final: factor at the end of the decay; it is 1 at the beginning.

    >>> cosine_decay(0.0, 0.0), cosine_decay(1.0, 0.1)
    (1.0, 0.1)
    """
    return final + (1 - final) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def linear_decay(progress: float, final: float) -> float:
    """Return a linear decay's factor on the initial learning rate: 1 + (final - 1) · progress.

    Args:
        progress: fraction of the decay that has passed, from 0; above 1 counts as 1.
        final: factor at the end of the decay; it is 1 at the beginning.

    >>> linear_decay(0.5, 0.0)
    0.5
    """
    return 1 + (final - 1) * min(progress, 1.0)


def polynomial_decay(progress: float, power: float, final: float) -> float:
    """Return a polynomial decay's factor on the initial learning rate: final + (1 - final) · (1 - progress)^power.

    Args:
        progress: fraction of the decay that has passed, from 0; above 1 counts as 1.
        power: exponent; 1 is a line.
        final: factor at the end of the decay; it is 1 at the beginning.

    >>> polynomial_decay(0.5, 2.0, 0.0)
    0.25
    """
    return float(final + (1 - final) * (1 - min(progress, 1.0)) ** power)


def stable_decay(progress: float, decay: float, final: float, root: bool) -> float:
    """Return warmup-stable-decay's factor on the initial learning rate after the warm-up: 1, then a fall to ``final``.

    Args:
        progress: fraction of the run that has passed, warm-up included, 0 to 1.
        decay: fraction of the run, at its end, in which the rate falls; above 0.
        final: factor at the end of the run.
        root: True: while the rate falls, the factor is 1 + (final - 1) · √x, with x the fraction of the decay that has
            passed; False: 1 + (final - 1) · x.

    >>> stable_decay(0.5, 0.5, 0.0, False), stable_decay(0.75, 0.5, 0.0, False)
    (1.0, 0.5)
    """
    fallen = min(max((progress - (1 - decay)) / decay, 0.0), 1.0)
    if fallen < 1e-12:
        return 1.0
    return 1 + (final - 1) * (math.sqrt(fallen) if root else fallen)


def one_cycle(step: int, total: int, rise: float, start: float, final: float) -> float:
    """Return the factor of a one-cycle schedule (``OneCycleLR``): a cosine from ``start`` to 1, another to ``final``.

    The factor multiplies the initial learning rate, which is the peak. It is 1 at step rise · total - 1. If that is 0
    or below, nothing rises and ``start`` has no effect.

    Args:
        step: steps taken so far, from 0.
        total: steps in the run.
        rise: fraction of the run in which the learning rate rises.
        start: factor at step 0.
        final: factor at the last step, total - 1.

    >>> one_cycle(0, 10, 0.5, 0.25, 0.0), one_cycle(4, 10, 0.5, 0.25, 0.0), one_cycle(9, 10, 0.5, 0.25, 0.0)
    (0.25, 1.0, 0.0)
    """
    top, last = rise * total - 1, total - 1
    if step <= top:
        return cosine_between(start, 1.0, step / top if top else 1.0)
    return cosine_between(1.0, final, min((step - top) / max(last - top, 1e-12), 1.0))


def cosine_between(begin: float, end: float, progress: float) -> float:
    """Return the value at ``progress`` of half a period of a cosine: end + (begin - end) · (1 + cos(π · progress)) / 2.

    Args:
        begin: value at progress 0.
        end: value at progress 1.
        progress: fraction of the half period that has passed, from 0 to 1.
    """
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * progress))


def stepped(step: int, milestones: tuple[int, ...], gamma: float) -> float:
    """Return a step decay's factor on the initial learning rate: gamma ^ (number of milestones at or before ``step``).

    Args:
        step: steps taken so far, from 0.
        milestones: steps at which the rate drops.
        gamma: factor by which the rate is multiplied at each milestone.

    >>> stepped(10, (5, 10, 20), 0.5)
    0.25
    """
    return float(gamma ** sum(step >= m for m in milestones))
