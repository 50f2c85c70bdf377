"""Loss scaling for float16. No torch.

Gradients below 6e-8 are zero in float16. Backward therefore starts from the loss times a scale, and the gradient is
unscaled before any other use (Micikevicius et al. 2018, arXiv 1710.03740, §3.2). A non-finite gradient shows that the
scale is too large: the step is skipped and the scale falls. Rule and numbers are those of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tutti.config.loss_scale_config import ConstantLossScale, DynamicLossScale, LossScaleConfig


class LossScale:
    """The factor on the loss of float16 training in one run, constant or dynamic as in ``torch.amp.GradScaler``.

    Every rank updates its own copy by a flag that is reduced over all ranks; all copies are equal.

    Args:
        config: options of dynamic scaling, or a constant scale.

    Attributes:
        value: scale of the next step.
        used: scale of the step that the latest ``update`` ended; the initial scale before the first.
        good_steps: steps without an overflow since the scale last changed.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.value = self.used = config.value if isinstance(config, ConstantLossScale) else config.init
        self.good_steps = 0
        self._rule: DynamicLossScale | None = None if isinstance(config, ConstantLossScale) else config

    @property
    def can_fall(self) -> bool:
        """Whether the loss scale would fall after another overflow: it is dynamic and above its minimum.

        A non-finite gradient may then be an overflow that a smaller scale cures; otherwise it has another cause.
        """
        return self._rule is not None and self.value > self._rule.min

    def update(self, finite: bool) -> None:
        """Lower the loss scale after an overflow, or raise it after enough steps in a row without one.

        After an overflow ``value`` is multiplied by the option ``backoff_factor``, but not below ``min``; after
        ``growth_interval`` steps without one by ``growth_factor``, but not above ``max``. The attribute ``used``, the
        scale of the step that this call ends, becomes the former ``value``. A constant scale stays. Called on every
        rank at the end of each step. Not collective: the scales of all ranks stay equal because ``finite`` is equal.

        Args:
            finite: whether the step's gradient, reduced over all ranks, was finite.
        """
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
        """Return the loss scale for a checkpoint, as a dictionary.

        Keys are ``value``, the scale, and ``good_steps``, the number of steps without an overflow since it last
        changed.
        """
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, saved: Mapping[str, float]) -> None:
        """Restore the loss scale from a checkpoint; a constant scale is not changed.

        Args:
            saved: the result of ``state``: ``value`` and ``good_steps``.

        Raises:
            ValueError, KeyError, TypeError: ``saved`` is malformed.
        """
        value, good_steps = float(saved["value"]), int(saved["good_steps"])
        if not (0 < value < math.inf and good_steps >= 0):
            raise ValueError(f"{value:g} after {good_steps} good steps")
        if self._rule is not None:
            self.value, self.good_steps = value, good_steps
