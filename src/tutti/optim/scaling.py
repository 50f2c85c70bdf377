"""Rescale an optimizer's options to another batch size than they were tuned for. No torch."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from tutti.config.lr_rule import AdamSqrtRule, NoRule
from tutti.config.optimizer_config import Betas, MuonConfig, OptimizerConfig, SGDConfig
from tutti.errors import UsageError
from tutti.optim import learning_rate as laws

C = TypeVar("C", bound=OptimizerConfig)


def scaled(optimizer: C, rule: NoRule, batch: int) -> C:
    """Return a copy of an optimizer's options, rescaled by a learning-rate rule to another batch size.

    The rule gives a factor, such as ``batch`` divided by the batch size for which the options were tuned (the rule's
    base batch), or the root of this quotient. It multiplies ``lr`` (and Muon's ``adam_lr``); ``AdamSqrtRule`` changes
    β1, β2 and ε, too.

    Args:
        optimizer: a dataclass of ``tutti.config.optimizer_config``.
        rule: the learning-rate rule; ``NoRule`` is the base class of all rules, and by itself changes nothing.
        batch: global batch, in samples.

    Raises:
        UsageError: the rule is AdaScale and the optimizer is not SGD; or the rule is Adam's square-root rule, and
            either the optimizer has no β1, β2 and ε, or κ(1 - β) is 1 or more, with κ = ``batch`` / the rule's base
            batch.
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
