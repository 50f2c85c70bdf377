"""Options of loss scaling for float16. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from tutti.config.spec import Spec
from tutti.errors import UsageError

_OPTION = "--loss-scale"


@dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """Options of dynamic loss scaling, as of ``torch.amp.GradScaler``.

    Attributes:
        init: the first scale.
        growth_factor: factor on the scale after ``growth_interval`` steps in a row without an overflow.
        backoff_factor: factor on the scale after a step with an overflow.
        growth_interval: number of optimizer steps without an overflow after which the scale grows.
        min: lower bound of the scale; a non-finite gradient at this scale has another cause.
        max: upper bound of the scale, so that sums of squares of scaled gradients stay finite in float32.

    Raises:
        ValueError: not 0 < ``min`` ≤ ``init`` ≤ ``max`` < ∞, ``growth_factor`` or ``growth_interval`` is below 1, or
            ``backoff_factor`` is not between 0 and 1.
    """

    init: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min: float = 1.0
    max: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.min <= self.init <= self.max < math.inf:
            raise ValueError(f"0 < min ≤ init ≤ max is not true of {self.min:g}, {self.init:g}, {self.max:g}")
        if not self.growth_factor >= 1:
            raise ValueError(f"growth_factor is {self.growth_factor:g}, must be at least 1")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"backoff_factor is {self.backoff_factor:g}, must be between 0 and 1")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval is {self.growth_interval}, must be at least 1")


@dataclass(frozen=True)
class ConstantLossScale:
    """Options of constant loss scaling: the loss is multiplied by ``value`` in every step.

    Attributes:
        value: the factor, which is not checked here.
    """

    value: float


LossScaleConfig: TypeAlias = DynamicLossScale | ConstantLossScale


def check_loss_scale(text: str) -> LossScaleConfig:
    """Parse ``--loss-scale``, the factor on the loss in float16: a constant number, or ``dynamic:key=value,…``.

    Args:
        text: a number above 0; or ``dynamic`` with the keys ``init``, ``min`` and ``max`` (first, least and largest
            scale), and ``growth_factor``, ``growth_interval`` (steps) and ``backoff_factor`` as in
            ``torch.amp.GradScaler``.

    Returns:
        The number as ``ConstantLossScale``, or the options of ``dynamic`` as ``DynamicLossScale``.

    Raises:
        UsageError: the number is not finite and above 0, the text is malformed, a name or key is unknown (naming the
            nearest), a value is no number, or as ``DynamicLossScale`` raises it.

    >>> check_loss_scale("1024"), check_loss_scale("dynamic:init=256").init
    (ConstantLossScale(value=1024.0), 256.0)
    """
    try:
        value = float(text)
    except ValueError:
        spec = Spec.parse(text, _OPTION)
        return spec.build(spec.choose({"dynamic": DynamicLossScale}, "loss scale"), _OPTION)
    if not 0 < value < math.inf:
        raise UsageError(f"{_OPTION} is {text}", remedy="give a number above 0, or dynamic")
    return ConstantLossScale(value)


def choose_loss_scale(text: str | None, precision: str | None) -> LossScaleConfig | None:
    """Return the options of a run's loss scale: as given, else dynamic for fp16, else None for no loss scale.

    Args:
        text: ``--loss-scale``, a number or ``dynamic:key=value,…``; None if not given.
        precision: ``--precision``, such as ``fp16``; None: the user's own autocast decides.

    Returns:
        A ``ConstantLossScale`` with its ``value``, or a ``DynamicLossScale`` with the options of
        ``torch.amp.GradScaler``; None for no loss scale.

    Raises:
        UsageError: ``text`` is given with a precision other than fp16, or as ``check_loss_scale`` raises it.
    """
    if text is None:
        return DynamicLossScale() if precision == "fp16" else None
    if precision not in (None, "fp16"):
        raise UsageError(
            f"{_OPTION} does nothing for {precision}",
            why="only float16's range is too small for gradients",
            remedy="leave it out, or take --precision fp16",
        )
    return check_loss_scale(text)
