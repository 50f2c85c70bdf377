"""Learning-rate rules: rescale an optimizer's options to another batch size than they were tuned for. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from tutti.config.optimizer_config import Betas, MuonConfig, OptimizerConfig, SGDConfig
from tutti.config.spec import Spec
from tutti.errors import UsageError
from tutti.optim import learning_rate as laws

C = TypeVar("C", bound=OptimizerConfig)


@dataclass(frozen=True, kw_only=True)
class NoRule:
    """No scaling: the learning rate as given.

    Attributes:
        adaptive: whether every step's rate follows from gradients measured in that step.
    """

    adaptive: ClassVar[bool] = False

    def factor(self, batch: int) -> float:
        """Return the factor on the learning rate at ``batch`` samples a step."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class LinearRule(NoRule):
    """Linear scaling: κ = batch ÷ base_batch times the rate (Goyal et al. 2017, arXiv 1706.02677).

    Attributes:
        base_batch: global batch that the rate was tuned for, in samples.
    """

    base_batch: int = 0

    def __post_init__(self) -> None:
        if self.base_batch < 1:
            raise ValueError("the rule needs base_batch=N, the global batch that the rate was tuned for")

    def factor(self, batch: int) -> float:
        return laws.linear_scaling(batch / self.base_batch)


@dataclass(frozen=True, kw_only=True)
class SqrtRule(LinearRule):
    """Square-root scaling: √κ times the rate (Krizhevsky 2014, arXiv 1404.5997)."""

    def factor(self, batch: int) -> float:
        return laws.sqrt_scaling(batch / self.base_batch)


@dataclass(frozen=True, kw_only=True)
class AdamSqrtRule(SqrtRule):
    """Adam's square-root rule: √κ times the rate, 1 - β → κ(1 - β), ε/√κ (Malladi et al. 2022, arXiv 2205.10287)."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveRule(NoRule):
    """AdaScale: the rate of one logical worker's batch, times each step's gain (``tutti.optim.adascale``)."""

    adaptive: ClassVar[bool] = True


RULES: Mapping[str, type[NoRule]] = {
    "none": NoRule,
    "linear": LinearRule,
    "sqrt": SqrtRule,
    "adam_sqrt": AdamSqrtRule,
    "adascale": AdaptiveRule,
}


def check_rule(text: str) -> NoRule:
    """Parse ``--lr-scale``. Raises UsageError, naming the nearest name or key."""
    spec = Spec.parse(text, "--lr-scale")
    return spec.build(spec.choose(RULES, "rule"), "--lr-scale")


def check_growth(rule: NoRule, gradient_noise: str) -> None:
    """Raise UsageError for options that contradict a growing batch."""
    if rule.adaptive:
        raise UsageError(
            "a batch that grows cannot be combined with --lr-scale adascale",
            why="adascale measures the rate for a batch that stays N times one worker's",
            remedy="leave out one of the two",
        )
    if gradient_noise != "none":
        raise UsageError(
            "a batch that grows cannot be combined with --gradient-noise",
            why="growth lowers the noise that this option adds",
            remedy="leave out one of the two",
        )


def scaled(optimizer: C, rule: NoRule, batch: int) -> C:
    """Return an optimizer's options, rescaled by ``rule``.

    Args:
        optimizer: a dataclass of ``tutti.config.optimizer_config``.
        rule: the learning-rate rule.
        batch: global batch, in samples.

    Raises:
        UsageError: the rule does not fit the optimizer, or ``batch`` is too far from the rule's base batch.
    """
    name = type(optimizer).__name__.removesuffix("Config")
    if rule.adaptive and not isinstance(optimizer, SGDConfig):
        raise UsageError(
            f"--lr-scale adascale is a rule of SGD, and the optimizer is {name}",
            why="its gain is defined for steps along the gradient, which Adam and layer-wise optimizers do not take",
            remedy="take --optimizer sgd, or another --lr-scale",
        )
    factor = rule.factor(batch)
    changed = {"lr": optimizer.lr * factor}
    if isinstance(optimizer, MuonConfig):
        # Muon has a second rate, for the parameters that AdamW updates.
        changed["adam_lr"] = optimizer.adam_lr * factor
    if isinstance(rule, AdamSqrtRule):
        if not isinstance(optimizer, Betas):
            raise UsageError(
                f"--lr-scale adam_sqrt is a rule of Adam, and {name} has no β1, β2 and ε",
                remedy=f"take --lr-scale sqrt:base_batch={rule.base_batch} or linear:base_batch={rule.base_batch}, or "
                "--optimizer adam or adamw",
            )
        try:
            _, beta1, beta2, eps = laws.adam_sqrt_scaling(
                batch / rule.base_batch, optimizer.beta1, optimizer.beta2, optimizer.eps
            )
        except ValueError as error:
            raise UsageError(
                f"--lr-scale adam_sqrt cannot go from a batch of {rule.base_batch} to one of {batch}",
                why=str(error),
                remedy="take β nearer to 1, a closer base batch, or --lr-scale sqrt",
            ) from error
        changed |= {"beta1": beta1, "beta2": beta2, "eps": eps}
    return dataclasses.replace(optimizer, **changed)  # type: ignore[arg-type]
