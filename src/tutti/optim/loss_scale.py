"""Loss scaling for float16. No torch.

Gradients below 6e-8 are zero in float16. Backward therefore starts from the loss times a scale, and the gradient is
unscaled before any other use (Micikevicius et al. 2018, arXiv 1710.03740, §3.2). A non-finite gradient shows that the
scale is too large: the step is skipped and the scale falls. Rule and numbers are those of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tutti.config.spec import Spec
from tutti.errors import UsageError

_OPTION = "--loss-scale"


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Options of dynamic loss scaling.

    Attributes:
        init: the first scale.
        growth_factor: factor on the scale after ``growth_interval`` steps in a row without an overflow.
        backoff_factor: factor on the scale after a step with an overflow.
        growth_interval: steps.
        min: lower bound of the scale; a non-finite gradient at this scale has another cause.
        max: upper bound of the scale, so that sums of squares of scaled gradients stay finite in float32.
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


class LossScale:
    """The loss scale of one run. Every rank updates its own copy by the globally reduced finite flag: all are equal.

    Args:
        value: the first scale.
        rule: options of dynamic scaling; None for a constant scale.

    Attributes:
        value: scale of the next step.
        used: scale of the previous step.
        good_steps: steps without an overflow since the scale last changed.
    """

    def __init__(self, value: float, rule: Dynamic | None = None) -> None:
        self.value = self.used = value
        self.good_steps = 0
        self._rule = rule

    @property
    def can_fall(self) -> bool:
        """Whether an overflow would lower the scale."""
        return self._rule is not None and self.value > self._rule.min

    def update(self, finite: bool) -> None:
        """Update the scale after a step; ``finite``: whether its gradient was finite."""
        self.used, rule = self.value, self._rule
        if rule is None:
            return
        if not finite:
            self.value, self.good_steps = max(self.value * rule.backoff_factor, rule.min), 0
            return
        self.good_steps += 1
        if self.good_steps == rule.growth_interval:
            self.value, self.good_steps = min(self.value * rule.growth_factor, rule.max), 0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, saved: Mapping[str, float]) -> None:
        """Restore ``state``; a constant scale is not changed.

        Raises ValueError, KeyError or TypeError if ``saved`` is not a valid state.
        """
        value, good_steps = float(saved["value"]), int(saved["good_steps"])
        if not (0 < value < math.inf and good_steps >= 0):
            raise ValueError(f"{value:g} after {good_steps} good steps")
        if self._rule is not None:
            self.value, self.good_steps = value, good_steps


def check_loss_scale(text: str) -> LossScale:
    """Parse ``--loss-scale``: a number, or ``dynamic:key=value,…``. Raises UsageError.

    >>> check_loss_scale("1024").value, check_loss_scale("dynamic:init=256").can_fall
    (1024.0, True)
    """
    try:
        value = float(text)
    except ValueError:
        spec = Spec.parse(text, _OPTION)
        rule = spec.build(spec.choose({"dynamic": Dynamic}, "loss scale"), _OPTION)
        return LossScale(rule.init, rule)
    if not 0 < value < math.inf:
        raise UsageError(f"{_OPTION} is {text}", remedy="give a number above 0, or dynamic")
    return LossScale(value)


def chosen(text: str | None, precision: str | None) -> LossScale | None:
    """Return the loss scale of a run: as given, else dynamic for fp16, else None.

    Args:
        text: ``--loss-scale``; None if not given.
        precision: ``--precision``; None: the user's own autocast decides.

    Raises:
        UsageError: ``text`` is invalid, or given with a precision other than fp16.
    """
    if text is None:
        return check_loss_scale("dynamic") if precision == "fp16" else None
    if precision not in (None, "fp16"):
        raise UsageError(
            f"{_OPTION} does nothing for {precision}",
            why="only float16's range is too small for gradients",
            remedy="leave it out, or take --precision fp16",
        )
    return check_loss_scale(text)
