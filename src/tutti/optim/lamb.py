"""LAMB: Adam's direction, scaled for each layer to the norm of its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Unpack

from tutti.native.passes import AdamCoefficients, AdamStep
from tutti.optim.layerwise import LayerWise, LayerWiseArguments, RowGroup, TensorUpdate


class LAMB(LayerWise):
    """Layer-wise adaptive moments. You et al. 2020, arXiv 1904.00962, Algorithm 2.

    For each tensor w with gradient g, in step t:
    m ← β1·m + (1−β1)·g; v ← β2·v + (1−β2)·g²; m̂ = m/(1−β1ᵗ), v̂ = v/(1−β2ᵗ); u = m̂/(√v̂ + ε) + λw;
    w ← w − γ·ρ·u with ρ = φ(‖w‖)/‖u‖, φ(z) = min(max(z, φ_min), φ_max). ρ is 1 where a norm is 0, and for tensors that
    are not adapted, which leaves AdamW. A tensor is adapted unless its group's ``adapt`` is False or, with at most one
    dimension, ``adapt_1d`` is.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate γ.
        betas: decay rates β1 and β2 of the averages of g and g².
        eps: ε in the denominator.
        weight_decay: coefficient λ.
        bias_correction: False: m̂ = m, v̂ = v (the paper's version 3, cybertronai). Tensors that are not adapted then
            take up to 6.6 times larger steps at first.
        grad_averaging: False: m ← β1·m + g.
        phi_min, phi_max: bounds on ‖w‖ in ρ (cybertronai's ``clamp_value``).
        trust_clip: largest ρ; 1 is timm's LAMBC.
        decoupled_decay: True: u without λw, and w ← w − γ·λ·w beside it (timm).
        max_grad_norm: clip the gradient to this norm over all parameters (apex and timm: 1). Under tutti that is the
            norm of the whole model's gradient.
        shared: options of all layer-wise optimizers: ``adapt``, whether norms scale the steps; ``adapt_1d`` and
            ``decay_1d``, whether tensors of at most one dimension are adapted and decayed; ``maximize``; ``fused``,
            compiled loops on the CPU; ``norms``, which reduces sums of squares over ranks that hold slices of tensors.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        phi_min: float = 0.0,
        phi_max: float | None = None,
        trust_clip: float | None = None,
        decoupled_decay: bool = False,
        max_grad_norm: float | None = None,
        **shared: Unpack[LayerWiseArguments],
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "phi_min": phi_min,
            "phi_max": phi_max,
            "trust_clip": trust_clip,
            "decoupled_decay": decoupled_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, own, **shared)

    def _update(self, parts: Sequence[RowGroup]) -> None:
        norm = self._gradient_norm(parts)
        moments = [(part.states("exp_avg"), part.states("exp_avg_sq")) for part in parts]
        rules = [[_rule(row, norm) for row in part.rows] for part in parts]
        found = [
            part.passes.adam_squares(part.params, part.grads, *own, rule)
            for part, own, rule in zip(parts, moments, rules, strict=True)
        ]
        whole = self._whole(parts, found)
        for part, own, rule, squares in zip(parts, moments, rules, whole, strict=True):
            steps = [_step(*of) for of in zip(part.rows, rule, squares, strict=True)]
            part.passes.adam_step(part.params, *own, steps)

    def _gradient_norm(self, parts: Sequence[RowGroup]) -> float:
        """Return the norm of the whole gradient; 0 if no group sets ``max_grad_norm``."""
        if all(group["max_grad_norm"] is None for group in self.param_groups):
            return 0.0
        if self.grad_norm is not None:
            return self.grad_norm
        squares = [[[square] for square in part.passes.squares(part.grads)] for part in parts]
        return math.sqrt(sum(square for part in self._whole(parts, squares) for (square,) in part))


@lru_cache(maxsize=16)
def _corrections(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    return 1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)


def _rule(row: TensorUpdate, norm: float) -> AdamCoefficients:
    group, state = row.group, row.state
    state["step"] = step = int(state.get("step", 0)) + 1
    beta1, beta2 = group["betas"]
    scale1, scale2 = _corrections(beta1, beta2, step) if group["bias_correction"] else (1.0, 1.0)
    most = group["max_grad_norm"]
    gradient = row.sign * (most / norm if most is not None and norm > most else 1.0)
    take1 = 1 - beta1 if group["grad_averaging"] else 1.0
    decay = 0.0 if group["decoupled_decay"] else row.decay
    return AdamCoefficients(gradient, beta1, take1, beta2, 1 - beta2, scale1, scale2, group["eps"], decay)


def _step(row: TensorUpdate, rule: AdamCoefficients, squares: Sequence[float]) -> AdamStep:
    group = row.group
    rate = float(group["lr"])
    shrink = rate * row.decay if group["decoupled_decay"] else 0.0
    return AdamStep(
        rule.scale1, rule.scale2, rule.eps, rule.decay, rate * _ratio(row, *map(math.sqrt, squares)), shrink
    )


def _ratio(row: TensorUpdate, weights: float, direction: float) -> float:
    """Return ρ from ‖w‖ and ‖u‖."""
    group = row.group
    bounded = max(weights, group["phi_min"])
    if group["phi_max"] is not None:
        bounded = min(bounded, group["phi_max"])
    if not row.adapted or bounded == 0 or direction == 0:
        return 1.0
    ratio = float(bounded / direction)
    return ratio if group["trust_clip"] is None else min(ratio, group["trust_clip"])
