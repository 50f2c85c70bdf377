"""Learning-rate schedules as pure functions of the step. No torch.

Every factor multiplies the initial learning rate of each parameter group, and depends only on the number of steps
taken: resuming needs no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tutti.config.optimizer_config import CosineSchedule, LinearSchedule, StepSchedule
from tutti.config.spec import Duration
from tutti.errors import UsageError
from tutti.optim.learning_rate import gradual

Schedule = Callable[[int], float]


def make_schedule(config: Any, total: int | None, steps: Callable[[Duration], int], scaled: float = 1.0) -> Schedule:
    """Return the schedule: the factor for step 0, 1, …, ``total`` - 1.

    Args:
        config: one of ``tutti.config.optimizer_config.SCHEDULES``.
        total: steps in the run; None if unknown before the end of a stream.
        steps: converts a duration from the start of the run to steps.
        scaled: factor of the learning-rate rule on the initial rate; if above 1, the warm-up starts at the unscaled
            rate by default.

    Raises:
        UsageError: the schedule needs ``total``, which is None.
    """
    if total is None and isinstance(config, CosineSchedule | LinearSchedule):
        name = type(config).__name__.removesuffix("Schedule").lower()
        raise UsageError(
            f"the schedule {name} decreases over the whole run, whose length is not known",
            remedy="give --steps or --samples, or the data set __len__",
        )
    warmup = steps(Duration.parse(config.warmup))
    start = config.warmup_from
    if start is None:
        start = 1 / scaled if scaled > 1 else 0.0
    milestones = tuple(steps(Duration.parse(m)) for m in getattr(config, "milestones", ()))

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
        return 1.0

    return factor


def cosine_decay(progress: float, final: float) -> float:
    """Return final + (1 - final) · (1 + cos(π · progress)) / 2.

    >>> cosine_decay(0.0, 0.0), cosine_decay(1.0, 0.1)
    (1.0, 0.1)
    """
    return final + (1 - final) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def linear_decay(progress: float, final: float) -> float:
    """Return 1 + (final - 1) · progress.

    >>> linear_decay(0.5, 0.0)
    0.5
    """
    return 1 + (final - 1) * min(progress, 1.0)


def stepped(step: int, milestones: tuple[int, ...], gamma: float) -> float:
    """Return gamma to the power of the number of milestones passed.

    Args:
        step: steps taken.
        milestones: steps at which the rate drops.
        gamma: factor at each milestone.

    >>> stepped(10, (5, 10, 20), 0.5)
    0.25
    """
    return float(gamma ** sum(step >= m for m in milestones))
