"""Learning-rate rules: what an optimizer's options become at another batch than they were tuned for. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tutti.errors import UsageError
from tutti.laws import learning_rate as laws
from tutti.optim.config import SGD
from tutti.spec import Spec

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class NoRule:
    """The learning rate as it is given."""

    def factor(self, batch: int) -> float:
        """By how much the rate is multiplied at ``batch`` samples a step."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Linear(NoRule):
    """κ = batch ÷ base_batch times the rate (Goyal et al. 2017, arXiv 1706.02677).

    Attributes:
        base_batch: global batch that the rate was tuned for.
    """

    base_batch: int = 0

    def __post_init__(self) -> None:
        if self.base_batch < 1:
            raise ValueError("the rule needs base_batch=N, the global batch that the rate was tuned for")

    def factor(self, batch: int) -> float:
        return laws.linear(batch / self.base_batch)


@dataclass(frozen=True, kw_only=True)
class Sqrt(Linear):
    """√κ times the rate (Krizhevsky 2014, arXiv 1404.5997)."""

    def factor(self, batch: int) -> float:
        return laws.sqrt(batch / self.base_batch)


@dataclass(frozen=True, kw_only=True)
class AdamSqrt(Sqrt):
    """√κ times the rate, 1 - β → κ(1 - β), ε/√κ (Malladi et al. 2022, arXiv 2205.10287); for Adam's moments."""


@dataclass(frozen=True, kw_only=True)
class Adaptive(NoRule):
    """The rate of one worker's batch, times each step's gain: ``tutti.optim.adascale``."""


RULES: Mapping[str, type[Any]] = {
    "none": NoRule,
    "linear": Linear,
    "sqrt": Sqrt,
    "adam_sqrt": AdamSqrt,
    "adascale": Adaptive,
}


def check_rule(text: str) -> Any:
    """The options of ``--lr-scale``. Raises UsageError, naming the nearest name or key."""
    spec = Spec.parse(text, "--lr-scale")
    return spec.build(spec.choose(RULES, "rule"), "--lr-scale")


def check_growth(lr_scale: str, gradient_noise: str) -> None:
    """Raise UsageError for what makes no sense with a batch that grows."""
    if isinstance(check_rule(lr_scale), Adaptive):
        raise UsageError(
            "a batch that grows does not go with --lr-scale adascale",
            why="adascale measures the rate for a batch that stays N times one worker's",
            remedy="leave out one of the two",
        )
    if gradient_noise != "none":
        raise UsageError(
            "a batch that grows does not go with --gradient-noise",
            why="it grows for less noise, which would be added again",
            remedy="leave out one of the two",
        )


def scaled(optimizer: C, rule: NoRule, batch: int) -> C:
    """An optimizer's options at ``batch`` samples a step. Raises UsageError where the rule does not fit it."""
    if isinstance(rule, Adaptive) and not isinstance(optimizer, SGD):
        raise UsageError(
            f"--lr-scale adascale is a rule of SGD, and the optimizer is {type(optimizer).__name__}",
            why="its gain says what a step along the gradient is worth, which Adam and layer-wise steps are not",
            remedy="take --optimizer sgd, or another --lr-scale",
        )
    factor = rule.factor(batch)
    # Muon has a rate for what AdamW takes, too.
    changed = {name: getattr(optimizer, name) * factor for name in ("lr", "adam_lr") if hasattr(optimizer, name)}
    if isinstance(rule, AdamSqrt):
        names = ("beta1", "beta2", "eps")
        if not all(hasattr(optimizer, name) for name in names):
            raise UsageError(
                f"--lr-scale adam_sqrt is a rule of Adam, and {type(optimizer).__name__} has no β1, β2 and ε",
                remedy="take --lr-scale sqrt or linear, or --optimizer adam or adamw",
            )
        try:
            _, *values = laws.adam_sqrt(batch / rule.base_batch, *(getattr(optimizer, name) for name in names))
        except ValueError as error:
            raise UsageError(
                f"--lr-scale adam_sqrt cannot go from a batch of {rule.base_batch} to one of {batch}",
                why=str(error),
                remedy="take β nearer to 1, a base batch nearer by, or --lr-scale sqrt",
            ) from error
        changed |= dict(zip(names, values, strict=True))
    return dataclasses.replace(optimizer, **changed)  # type: ignore[type-var]
