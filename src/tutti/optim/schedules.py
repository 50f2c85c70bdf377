"""Learning-rate schedules as pure functions of the step. No torch.

Every factor multiplies the initial learning rate of each parameter group, and is a function of the number of steps
taken alone: resuming needs no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tutti.optim.config import Cosine, Linear, Step
from tutti.spec import Duration

Schedule = Callable[[int], float]


def make(config: Any, total: int, dataset: int, batch: int) -> Schedule:
    """The factor for step 0, 1, …, ``total`` - 1.

    Args:
        config: one of ``tutti.optim.config.SCHEDULES``.
        total: steps in the run.
        dataset, batch: samples in an epoch and in a global batch, which durations are counted in.
    """
    warmup = Duration.parse(config.warmup).steps(dataset, batch)
    start = config.warmup_from
    milestones = tuple(Duration.parse(m).steps(dataset, batch) for m in getattr(config, "milestones", ()))

    def factor(step: int) -> float:
        if step < warmup:
            return warm_up(step, warmup, start)
        progress = (step - warmup) / max(total - warmup, 1)
        if isinstance(config, Cosine):
            return cosine(progress, config.final)
        if isinstance(config, Linear):
            return linear(progress, config.final)
        if isinstance(config, Step):
            return stepped(step, milestones, config.gamma)
        return 1.0

    return factor


def warm_up(step: int, length: int, start: float) -> float:
    """Equal increments from ``start`` to 1 over ``length`` steps; 1 is reached after the last of them.

    Goyal et al. 2017, arXiv 1706.02677, §2.2.

    >>> [warm_up(i, 4, 0.0) for i in range(4)]
    [0.25, 0.5, 0.75, 1.0]
    """
    return start + (1 - start) * (step + 1) / length


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
