"""Learning-rate rules of ``--lr-scale``, and the options that they exclude. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from tutti.config.gradient_noise import MultiplicativeNoise
from tutti.config.optimizer_config import OptimizerConfig, SGDConfig
from tutti.config.spec import Spec
from tutti.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class NoRule:
    """Rule ``none`` of ``--lr-scale``, the learning rate as given; base class of the other rules.

    Attributes:
        adaptive: whether every step's rate follows from gradients measured in that step; a constant of the class.
    """

    adaptive: ClassVar[bool] = False

    def factor(self, batch: int) -> float:
        """Return the factor on the learning rate for a global batch of ``batch`` samples: 1 for every size.

        This class is the rule ``none`` of ``--lr-scale``; rules that scale the learning rate override the method.

        Args:
            batch: samples in the global batch.
        """
        return 1.0


@dataclass(frozen=True, kw_only=True)
class LinearRule(NoRule):
    """Linear scaling of the learning rate by κ = batch ÷ base_batch (Goyal et al. 2017, arXiv 1706.02677, §2.1).

    >>> LinearRule(base_batch=256).factor(8192)
    32.0

    Attributes:
        base_batch: global batch that the rate was tuned for, in samples; must be given.

    Raises:
        ValueError: ``base_batch`` is below 1 or not given.
    """

    base_batch: int = 0

    def __post_init__(self) -> None:
        if self.base_batch < 1:
            raise ValueError("the rule needs base_batch=N, the global batch that the rate was tuned for")

    def factor(self, batch: int) -> float:
        """Return batch ÷ base batch, by which the learning rate is multiplied (Goyal et al. 2017, arXiv 1706.02677).

        Args:
            batch: samples in the global batch. The base batch, the option ``base_batch`` of ``--lr-scale``, is the size
                for which the rate was tuned.
        """
        return batch / self.base_batch


@dataclass(frozen=True, kw_only=True)
class SqrtRule(LinearRule):
    """Square-root scaling of the learning rate by √κ, κ = batch ÷ base_batch: keeps the variance of a step's noise.

    Krizhevsky 2014, arXiv 1404.5997; Hoffer et al. 2017, arXiv 1705.08741.

    >>> round(SqrtRule(base_batch=256).factor(8192), 9)
    5.656854249
    """

    def factor(self, batch: int) -> float:
        """Return √(batch ÷ base batch), by which the learning rate is multiplied (Krizhevsky 2014, arXiv 1404.5997).

        Args:
            batch: samples in the global batch. The base batch, the option ``base_batch`` of ``--lr-scale``, is the size
                for which the rate was tuned.
        """
        return math.sqrt(batch / self.base_batch)


@dataclass(frozen=True, kw_only=True)
class AdamSqrtRule(SqrtRule):
    """Square-root rule for Adam: learning rate times √κ, 1 - β times κ for both decay rates β, and ε divided by √κ.

    κ = batch ÷ base_batch. Malladi et al. 2022, arXiv 2205.10287.
    """


@dataclass(frozen=True, kw_only=True)
class AdaptiveRule(NoRule):
    """AdaScale rule: the learning rate of one logical worker's batch is multiplied by a gain measured in each step.

    A logical worker is one of N equal shares of the global batch. ``tutti.optim.adascale`` computes the gain from the
    workers' gradients; ``factor`` of this class, which is for fixed factors, returns 1.
    """

    adaptive: ClassVar[bool] = True


RULES: Mapping[str, type[NoRule]] = {
    "none": NoRule,
    "linear": LinearRule,
    "sqrt": SqrtRule,
    "adam_sqrt": AdamSqrtRule,
    "adascale": AdaptiveRule,
}


def check_rule(text: str) -> NoRule:
    """Parse ``--lr-scale``, the rule by which the global batch scales the learning rate: ``linear:base_batch=256``.

    Args:
        text: ``none``, ``linear``, ``sqrt``, ``adam_sqrt`` or ``adascale``, with options.

    Returns:
        The rule: its ``factor(batch)`` returns the factor on the learning rate, and ``adaptive`` is True for
        ``adascale`` alone. ``NoRule`` is the base class of all rules, and itself the rule ``none``.

    Raises:
        UsageError: the text is malformed, a name or key is unknown (naming the nearest), or the rule refuses a value,
            such as a missing base batch.
    """
    spec = Spec.parse(text, "--lr-scale")
    return spec.build(spec.choose(RULES, "rule"), "--lr-scale")


def usual_rule(optimizer: OptimizerConfig) -> Literal["linear", "sqrt"]:
    """Return the name of the usual rule by which an optimizer's learning rate follows the batch size.

    The name is one of ``--lr-scale``: ``linear`` for SGD (Goyal et al. 2017, arXiv 1706.02677), ``sqrt`` for all other
    optimizers, such as Adam (Malladi et al. 2022, arXiv 2205.10287).

    Args:
        optimizer: options of the optimizer, a dataclass of ``tutti.config.optimizer_config``.
    """
    return "linear" if isinstance(optimizer, SGDConfig) else "sqrt"


def check_growth(rule: NoRule, noise: MultiplicativeNoise | None) -> None:
    """Raise UsageError if ``--batch-growth`` is combined with ``--lr-scale adascale`` or with ``--gradient-noise``.

    Args:
        rule: rule of ``--lr-scale``; ``NoRule`` is the base class of all rules.
        noise: options of ``--gradient-noise``; None for no noise.
    """
    if rule.adaptive:
        raise UsageError(
            "a batch that grows cannot be combined with --lr-scale adascale",
            why="adascale measures the rate for a batch that stays N times one worker's",
            remedy="leave out one of the two",
        )
    if noise is not None:
        raise UsageError(
            "a batch that grows cannot be combined with --gradient-noise",
            why="growth lowers the noise that this option adds",
            remedy="leave out one of the two",
        )
