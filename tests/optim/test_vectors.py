"""Worked numbers of each optimizer and its published variants: w = [3, 4], g1 = [0.8, -0.6], so that all is visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tutti.optim import LAMB, LARC, LARS, NovoGrad

G1, G2 = [0.8, -0.6], [0.0, 2.0]
LARS_5 = {"weight_decay": 0.05, "trust": 0.001, "momentum": 0.9}
LARC_5 = {"weight_decay": 0.05, "trust": 0.02, "momentum": 0.0}
NOVO = {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.001}
APEX = {"grad_averaging": True, "bias_correction": True, "normalize": "moment", "decay": "step"}
PLAIN = {"adapt": False, "weight_decay": 0.0}

# name: optimizer, options, a gradient a step, a learning rate a step, weights after each step
VECTORS: dict[str, tuple[Any, dict[str, Any], list[list[float]], list[float], list[list[float]]]] = {
    "LARS, paper": (
        *(LARS, LARS_5, [G1, G1], [0.5, 0.25]),
        [[2.998100000, 4.000800000], [2.995440171, 4.001919928]],
    ),
    "LARS, timm": (
        *(LARS, LARS_5 | {"lr_in_momentum": False, "eps": 1e-8}, [G1, G1], [0.5, 0.25]),
        [[2.998100000, 4.000800000], [2.996295171, 4.001559928]],
    ),
    "LARS, optax": (
        *(LARS, LARS_5 | {"denominator": "norm_of_sum"}, [G1, G1], [0.5, 0.25]),
        [[2.997695912, 4.000970143], [2.994470327, 4.002328283]],
    ),
    "LARC, apex, clipped": (LARC, LARC_5, [G1], [0.5], [[2.924, 4.032]]),
    "LARC, apex, not clipped": (LARC, LARC_5, [G1], [0.05], [[2.9525, 4.02]]),
    "LARC, apex, clip=False": (LARC, LARC_5 | {"cap": False}, [G1], [0.5], [[2.962, 4.016]]),
    "LARC, OpenSeq2Seq": (LARC, LARC_5 | {"weight_decay": 0.0, "eps": 0.0}, [G1], [0.5], [[2.92, 4.06]]),
    "LAMB, paper": (LAMB, {}, [G1, G2], [0.01] * 2, [[2.963423619, 4.034090590], [2.924361703, 4.002789737]]),
    "LAMB, version 3": (
        *(LAMB, {"bias_correction": False}, [G1, G2], [0.01] * 2),
        [[2.964254677, 4.034961005], [2.924825773, 4.004104351]],
    ),
    "LAMBC": (
        *(LAMB, {"trust_clip": 1.0}, [G1, G2], [0.01] * 2),
        [[2.989700012, 4.009599983], [2.982700472, 4.003995709]],
    ),
    "LAMB, excluded": (LAMB, PLAIN, [G1], [0.01], [[2.990000, 4.010000]]),
    "LAMB, excluded, version 3": (
        *(LAMB, PLAIN | {"bias_correction": False}, [G1], [0.01]),
        [[2.968378473, 4.031621110]],
    ),
    "NovoGrad, paper": (
        *(NovoGrad, NOVO, [G1, G2], [0.01] * 2),
        [[2.991970000, 4.005960000], [2.984311580, 3.992156223]],
    ),
    "NovoGrad, apex": (
        *(NovoGrad, NOVO | APEX, [G1, G2], [0.01] * 2),
        [[2.998838629, 4.000808528], [2.998055331, 3.999351108]],
    ),
}


def stepped(
    kind: Any, options: dict[str, Any], gradients: Sequence[Sequence[float]], rates: Sequence[float]
) -> list[list[float]]:
    """The weights after each step, as one row of a matrix: vectors are not adapted."""
    weights = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    optimizer = kind([weights], **options)
    seen = []
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weights.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        seen.append(weights[0].tolist())
    return seen


@pytest.mark.parametrize("fused", [None, False], ids=["compiled", "foreach"])
@pytest.mark.parametrize("name", VECTORS)
def test_worked_numbers(name: str, fused: bool | None) -> None:
    kind, options, gradients, rates, want = VECTORS[name]
    got = stepped(kind, {**options, "fused": fused}, gradients, rates)
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-8, abs=0)


def test_dropping_bias_correction_enlarges_first_steps_of_excluded_tensors() -> None:
    """(1 − β1ᵗ) / √(1 − β2ᵗ): 3.16 at t = 1 and at most 6.57, at t = 12, with equal gradients."""
    rates = [0.01] * 20
    sizes = []
    for corrected in (True, False):
        options = PLAIN | {"bias_correction": corrected, "eps": 0.0}
        seen = torch.tensor([[3.0, 4.0], *stepped(LAMB, options, [[1.0, 1.0]] * 20, rates)])
        sizes.append(seen[:, 0].diff())
    factors = sizes[1] / sizes[0]
    assert factors[0].item() == pytest.approx(3.162278, rel=1e-4)
    assert (factors.argmax().item() + 1, factors.max().item()) == (12, pytest.approx(6.568520, rel=1e-4))
