"""Learning-rate schedules as pure functions of the step. No torch.

Every factor multiplies the initial learning rate of each parameter group, and is a function of the number of steps
taken alone: resuming needs no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tutti.errors import UsageError
from tutti.laws.learning_rate import gradual
from tutti.optim.config import Cosine, Linear, Step
from tutti.spec import Duration

Schedule = Callable[[int], float]


def make(config: Any, total: int | None, steps: Callable[[Duration], int], scaled: float = 1.0) -> Schedule:
    """The factor for step 0, 1, …, ``total`` - 1.

    Args:
        config: one of ``tutti.optim.config.SCHEDULES``.
        total: steps in the run; None where only the end of a stream will tell.
        steps: how many steps a duration from the beginning of the run is.
        scaled: by how much a learning-rate rule has raised the initial rate; the warm-up starts where it was before.

    Raises UsageError for a schedule that needs what is not known.
    """
    if total is None and isinstance(config, Cosine | Linear):
        raise UsageError(
            f"the schedule {type(config).__name__.lower()} falls over the whole run, whose length is not known",
            remedy="give --steps or --samples, or the data set __len__",
        )
    warmup = steps(Duration.parse(config.warmup))
    start = config.warmup_from
    if start is None:
        start = 1 / scaled if scaled > 1 else 0.0
    milestones = tuple(steps(Duration.parse(m)) for m in getattr(config, "milestones", ()))

    def factor(step: int) -> float:
        if step < warmup:
            # From nothing, the first step would be no step: it takes the first increment.
            return gradual(step, warmup, start) if start > 0 else gradual(step + 1, warmup, 0.0)
        progress = (step - warmup) / max((total or 0) - warmup, 1)
        if isinstance(config, Cosine):
            return cosine(progress, config.final)
        if isinstance(config, Linear):
            return linear(progress, config.final)
        if isinstance(config, Step):
            return stepped(step, milestones, config.gamma)
        return 1.0

    return factor


def cosine(progress: float, final: float) -> float:
    """final + (1 - final) · (1 + cos(π · progress)) / 2.

    >>> cosine(0.0, 0.0), cosine(1.0, 0.1)
    (1.0, 0.1)
    """
    return final + (1 - final) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def linear(progress: float, final: float) -> float:
    """1 + (final - 1) · progress.

    >>> linear(0.5, 0.0)
    0.5
    """
    return 1 + (final - 1) * min(progress, 1.0)


def stepped(step: int, milestones: tuple[int, ...], gamma: float) -> float:
    """gamma to the number of milestones passed.

    >>> stepped(10, (5, 10, 20), 0.5)
    0.25
    """
    return float(gamma ** sum(step >= m for m in milestones))
