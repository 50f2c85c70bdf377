"""Formulas of learning-rate scaling by batch size, warm-up and momentum correction; and what writes ``group["lr"]``.

Symbols: κ = current batch ÷ the batch that the rate was tuned for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

Group: TypeAlias = dict[str, Any]


def adam_sqrt_scaling(kappa: float, beta1: float, beta2: float, eps: float) -> tuple[float, float, float, float]:
    """Apply Adam's square-root rule to a batch κ times as large: rate × √κ, 1 - β → κ(1 - β), ε/√κ.

    Malladi et al. 2022, arXiv 2205.10287: the moments average over as many samples as before.

    Args:
        kappa: κ, the current batch divided by the batch that the rate was tuned for.
        beta1, beta2, eps: β1, β2 and ε at the batch that the rate was tuned for.

    Returns:
        A tuple (factor on the rate, β1, β2, ε) for the current batch.

    Raises:
        ValueError: κ(1 - β) is 1 or more, so that a moment would forget everything; take a closer base batch.

    >>> [round(value, 12) for value in adam_sqrt_scaling(4, 0.9, 0.999, 1e-8)]
    [2.0, 0.6, 0.996, 5e-09]
    """
    betas = [1 - kappa * (1 - beta) for beta in (beta1, beta2)]
    if min(betas) <= 0:
        raise ValueError(f"κ(1 - β) is {max(1 - beta for beta in betas):g}, and should be below 1")
    return math.sqrt(kappa), betas[0], betas[1], eps / math.sqrt(kappa)


def gradual(step: int, length: int, start: float) -> float:
    """Return start + step · (1 - start) / length: equal increments, from ``start`` at step 0 to 1 at step ``length``.

    With ``start`` = 1/k it is the gradual warm-up from η to kη (Goyal et al. 2017, arXiv 1706.02677, §2.2).

    Args:
        step: steps taken, at most ``length``; the result is not clamped.
        length: steps of the warm-up, at least 1.
        start: factor at step 0.

    >>> [round(0.8 * gradual(i, 60, 1 / 8), 9) for i in (0, 30, 59)]
    [0.1, 0.45, 0.788333333]
    """
    return start + step * (1 - start) / length


def momentum_correction(new: float, old: float) -> float:
    """Return η_new / η_old, the factor on SGD's velocity when the learning rate changes from one step to the next.

    It applies to a velocity v ← m·v + η·g, which includes the rate (Goyal et al. 2017, arXiv 1706.02677, §3, remark 2).
    The velocity of ``torch.optim.SGD`` does not include the rate, and needs no correction.

    Args:
        new: learning rate η_new of this step.
        old: learning rate η_old of the step before; 0 gives 1.

    >>> 0.9 * momentum_correction(0.2, 0.1) * 1.0 + 0.2 * 1.0
    2.0
    """
    return new / old if old else 1.0


def set_learning_rates(groups: Iterable[Group], factor: float | None) -> None:
    """Set each parameter group's learning rate to ``factor`` × its initial one, in place.

    The initial rate is the group's entry ``initial_lr``; where a group has none, its present rate becomes this entry.
    Called right before each update of a run with a schedule of its own.

    Args:
        groups: parameter groups of an optimizer.
        factor: factor on the initial rates; None changes nothing.

    >>> group = {"lr": 0.5}
    >>> for factor in (0.5, 0.2): set_learning_rates([group], factor)
    >>> group
    {'lr': 0.1, 'initial_lr': 0.5}
    """
    if factor is None:
        return
    for group in groups:
        initial: Any = group.setdefault("initial_lr", group["lr"])
        group["lr"] = initial * factor


def multiply_learning_rates(groups: Iterable[Group], factor: float) -> list[tuple[Group, Any]]:
    """Multiply each parameter group's learning rate by ``factor`` in place; a group that occurs twice counts once.

    Called around an update of a run without a schedule of its own, with the factor of the epoch's phase of
    ``--batch-growth``; ``restore_learning_rates`` follows.

    Args:
        groups: parameter groups; their entry ``initial_lr`` stays.
        factor: factor on each group's ``lr``.

    Returns:
        A list with a pair for each changed group: the group, and the learning rate that it had before; empty for a
        factor of 1.
    """
    if factor == 1:
        return []
    before: list[tuple[Group, Any]] = []
    for group in {id(group): group for group in groups}.values():
        before.append((group, group["lr"]))
        group["lr"] = before[-1][1] * factor
    return before


def restore_learning_rates(before: Iterable[tuple[Group, Any]]) -> None:
    """Set the learning rates of parameter groups back to their values before ``multiply_learning_rates``.

    Args:
        before: (group, its learning rate) pairs, the result of ``multiply_learning_rates``.
    """
    for group, rate in before:
        group["lr"] = rate
