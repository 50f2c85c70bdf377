"""NovoGrad: gradients normalized by a running average of their layer's norm, then momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Unpack

from tutti.native.passes import Momentum
from tutti.optim.layerwise import LayerWise, LayerWiseArguments, RowGroup, TensorUpdate


class NovoGrad(LayerWise):
    """NovoGrad: momentum on gradients that are divided by a running average of their tensor's gradient norm.

    Ginsburg et al. 2019, arXiv 1905.11286, Algorithm 1. The state is one buffer and one number a tensor: half of
    Adam's.

    For each tensor w with gradient g: v ← β2·v + (1−β2)·‖g‖², at first ‖g‖²; m ← β1·m + (g/(√v + ε) + λw), at first
    without β1·m; w ← w − γ·m. For tensors that are not adapted √v + ε is 1: momentum SGD; the paper adapts all
    (``adapt_1d=True, decay_1d=True``). A tensor is adapted unless its group's ``adapt`` is False or, with at most one
    dimension, ``adapt_1d`` is.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate γ.
        betas: decay rates β1 of m and β2 of v.
        eps: ε in the denominator.
        weight_decay: coefficient λ.
        grad_averaging: True: (1−β1) times what is added to m.
        bias_correction: True: m/(1−β1ᵗ) and v/(1−β2ᵗ) are used; together with ``first_norm`` it inflates v at first.
        normalize: ``moment``: m averages raw gradients, and m/(√v + ε) is the step (apex).
        decay: ``step``: λw is added to the step and not to m (apex, timm's ``decoupled_decay``).
        init: ``zero``: v starts at 0, so that it is (1−β2)·‖g‖² after the first step.
        shared: options of all layer-wise optimizers: ``adapt``, whether norms scale the steps; ``adapt_1d`` and
            ``decay_1d``, whether tensors of at most one dimension are adapted and decayed; ``maximize``; ``fused``,
            compiled loops on the CPU; ``norms``, which reduces sums of squares over ranks that hold slices of tensors.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
        bias_correction: bool = False,
        normalize: Literal["gradient", "moment"] = "gradient",
        decay: Literal["moment", "step"] = "moment",
        init: Literal["first_norm", "zero"] = "first_norm",
        **shared: Unpack[LayerWiseArguments],
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "bias_correction": bias_correction,
            "normalize": normalize,
            "decay": decay,
            "init": init,
        }
        super().__init__(params, own, **shared)

    def _update(self, parts: Sequence[RowGroup]) -> None:
        squares = [[[square] for square in part.passes.squares(part.grads)] for part in parts]
        for part, found in zip(parts, self._whole(parts, squares), strict=True):
            rules = [_rule(row, square) for row, (square,) in zip(part.rows, found, strict=True)]
            part.passes.momentum(part.params, part.grads, part.states("exp_avg"), rules)


def _rule(row: TensorUpdate, square: float) -> Momentum:
    group, state = row.group, row.state
    rate, (beta1, beta2) = float(group["lr"]), group["betas"]
    state["step"] = step = int(state.get("step", 0)) + 1
    if step == 1 and group["init"] == "first_norm":
        second = square
    else:
        second = beta2 * float(state.get("exp_avg_sq", 0.0)) + (1 - beta2) * square
    state["exp_avg_sq"] = second
    scale = 1.0
    if group["bias_correction"]:
        rate_of_m, second = 1 / (1 - beta1**step), second / (1 - beta2**step)
        scale = rate_of_m
    normal = _normal(row, second)
    take = 1 - beta1 if group["grad_averaging"] else 1.0
    first = group["normalize"] == "gradient"
    inside = group["decay"] == "moment"
    return Momentum(
        gradient=row.sign * (normal if first else 1.0),
        decay=row.decay if inside else 0.0,
        keep=beta1,
        take=take,
        direct=0.0,
        buffered=rate * scale * (1.0 if first else normal),
        shrink=0.0 if inside else rate * row.decay,
    )


def _normal(row: TensorUpdate, second: float) -> float:
    """Return 1/(√v + ε); 1 if the tensor is not adapted, or v is 0."""
    below = math.sqrt(second) + row.group["eps"]
    return 1 / below if row.adapted and second > 0 else 1.0
