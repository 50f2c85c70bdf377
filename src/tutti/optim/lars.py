"""LARS and LARC: momentum SGD with a layer-wise learning rate from the norms of weights and gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Unpack

from tutti.errors import UsageError
from tutti.native.passes import Decayed, Momentum
from tutti.optim.layerwise import LayerWise, LayerWiseArguments, RowGroup, TensorUpdate
from tutti.optim.learning_rate import momentum_correction

Denominator = Literal["sum_of_norms", "norm_of_sum"]


class LARS(LayerWise):
    """Layer-wise adaptive rate scaling. You, Gitman, Ginsburg 2017, arXiv 1708.03888, Algorithm 1, equation 6.

    For each tensor w with gradient g: ρ = τ‖w‖ / (‖g‖ + λ‖w‖ + ε); v ← m·v + γ·ρ·(g + λw); w ← w − v. ρ is 1 where ‖w‖
    or ‖g‖ is 0, and for tensors that are not adapted. A tensor is adapted unless its group's ``adapt`` is False or,
    with at most one dimension, ``adapt_1d`` is.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate γ, also for tensors that are not adapted.
        momentum: coefficient m.
        weight_decay: coefficient λ.
        trust: trust coefficient τ.
        eps: ε in the denominator.
        nesterov: w ← w − (m·v + γ·ρ·(g + λw)).
        denominator: denominator of ρ: ``sum_of_norms`` is ‖g‖ + λ‖w‖ + ε, ``norm_of_sum`` is ‖g + λw‖ + ε (optax).
        momentum_correction: v ← m·(γ ÷ γ before)·v + γ·ρ·(g + λw), which rescales a velocity from another rate (Goyal
            et al. 2017, arXiv 1706.02677, §3, remark 2). As long as γ is above 0 the steps are those of
            ``lr_in_momentum=False``.
        lr_in_momentum: False: v ← m·v + ρ·(g + λw); w ← w − γ·v (timm, apex); differs only where γ changes.
        cap: ρ ← min(ρ / γ, 1), which makes it LARC.
        shared: options of all layer-wise optimizers: ``adapt``, whether norms scale the steps; ``adapt_1d`` and
            ``decay_1d``, whether tensors of at most one dimension are adapted and decayed; ``maximize``; ``fused``,
            compiled loops on the CPU; ``norms``, which reduces sums of squares over ranks that hold slices of tensors.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        denominator: Denominator = "sum_of_norms",
        lr_in_momentum: bool = True,
        momentum_correction: bool = False,
        cap: bool = False,
        **shared: Unpack[LayerWiseArguments],
    ) -> None:
        if nesterov and momentum <= 0:
            raise UsageError("nesterov needs momentum above 0", remedy="give momentum=0.9, or leave nesterov out")
        if momentum_correction and (momentum <= 0 or not lr_in_momentum):
            raise UsageError(
                "there is nothing for momentum_correction to correct",
                why="no rate is in the velocity where momentum is 0 or lr_in_momentum is False",
                remedy="leave it out",
            )
        own = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "eps": eps,
            "nesterov": nesterov,
            "denominator": denominator,
            "lr_in_momentum": lr_in_momentum,
            "momentum_correction": momentum_correction,
            "cap": cap,
        }
        super().__init__(params, own, **shared)

    def _kind(self, row: TensorUpdate) -> bool:
        return bool(row.group["momentum"])

    def _update(self, parts: Sequence[RowGroup]) -> None:
        squares = []
        for part in parts:
            options = [Decayed(row.sign, row.decay if _joined(row) else 0.0) for row in part.rows]
            squares.append(part.passes.decayed_squares(part.params, part.grads, options))
        for part, found in zip(parts, self._whole(parts, squares), strict=True):
            rules = [_rule(row, math.sqrt(w), math.sqrt(d)) for row, (w, d) in zip(part.rows, found, strict=True)]
            buffers = part.states("momentum_buffer") if self._kind(part.rows[0]) else None
            part.passes.momentum(part.params, part.grads, buffers, rules)


class LARC(LARS):
    """Momentum SGD with a layer's rate capped at γ: LARS multiplies by γ, LARC takes the minimum.

    For each tensor w with gradient g:
    ρ = τ‖w‖ / (‖g‖ + λ‖w‖ + ε); u = min(ρ / γ, 1)·(g + λw); v ← m·v + u; w ← w − γ·v. This is NVIDIA's LARC of apex
    around ``torch.optim.SGD``, and with λ = 0 the formula of its OpenSeq2Seq. Where ‖w‖ or ‖g‖ is 0 the rate is γ.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate γ.
        momentum: coefficient m.
        weight_decay: coefficient λ.
        trust: trust coefficient τ.
        eps: ε in the denominator.
        nesterov: Nesterov momentum: w ← w − γ·(m·v + u).
        cap: False: u = ρ·(g + λw), apex's ``clip=False``; γ then multiplies.
        shared: options of all layer-wise optimizers, such as ``adapt_1d``; see ``LARS``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.02,
        eps: float = 1e-8,
        nesterov: bool = False,
        cap: bool = True,
        **shared: Unpack[LayerWiseArguments],
    ) -> None:
        super().__init__(
            params, lr, momentum, weight_decay, trust, eps, nesterov, lr_in_momentum=False, cap=cap, **shared
        )


def _joined(row: TensorUpdate) -> bool:
    return bool(row.group["denominator"] == "norm_of_sum")


def _ratio(row: TensorUpdate, weights: float, gradient: float) -> float:
    """Return ρ from ‖w‖ and ‖g‖ (or ‖g + λw‖); with ``cap``, min(ρ / γ, 1)."""
    group = row.group
    if not row.adapted or weights == 0 or gradient == 0:
        return 1.0
    below = gradient + (0.0 if _joined(row) else row.decay * weights) + group["eps"]
    ratio = float(group["trust"] * weights / below)
    if group["cap"]:
        rate = float(group["lr"])
        return min(ratio / rate, 1.0) if rate > 0 else 1.0
    return ratio


def _rule(row: TensorUpdate, weights: float, gradient: float) -> Momentum:
    group = row.group
    rate, momentum = float(group["lr"]), group["momentum"]
    inside, outside = (rate, 1.0) if group["lr_in_momentum"] else (1.0, rate)
    take = inside * _ratio(row, weights, gradient)
    keep = momentum
    if group["momentum_correction"]:
        keep *= momentum_correction(rate, float(row.state.get("velocity_lr", rate)))
        row.state["velocity_lr"] = rate
    direct = outside * take if group["nesterov"] or not momentum else 0.0
    buffered = outside * (momentum if group["nesterov"] else 1.0)
    return Momentum(row.sign, row.decay, keep, take, direct, buffered, shrink=0.0)
