"""What a loss function returned, made uniform."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tutti.errors import UsageError
from tutti.laws.keys import mix, name_key
from tutti.types import Cell, Totals

_NOISE = name_key("gradient noise")
_MASK = (1 << 63) - 1


def read(outcome: Any, cell: Cell) -> tuple[Tensor, Tensor, Totals]:
    """The tensor to go backward from, the gradient to start with, and the totals.

    Where the cell has noise σ, each sample's loss counts z ~ N(1, σ²) times in the gradient, and once in the totals
    (Hoffer et al. 2017, arXiv 1705.08741, §4). The weights z follow from the cell's key.

    Args:
        outcome: a scalar (mean over the cell's samples), ``(sum, count)`` or ``(sum, count, metric_sums)``; in place of
            the mean or the sum perhaps one loss a sample (samples,).
        cell: what it was computed on.

    Returns:
        objective () or (samples,), its part in the step's gradient (of the same shape, so that gradients of all cells
        add up to the mean), totals with lanes (2 + metrics,) of float32, or float64 where the loss is. Of a stand-in
        part and totals are zero.

    Raises:
        UsageError: the loss function returned something else, or no loss a sample where the cell has noise.
    """
    if isinstance(outcome, Tensor) and not _by_sample(outcome, cell):
        objective = _scalar(outcome, cell)
        lanes = torch.addcmul(
            *_mean_lanes(cell.samples, _wide(objective), objective.device), objective.detach().to(_wide(objective))
        )
        return objective, _start(cell.samples * cell.weight, objective), _totals(lanes, (), cell)
    if isinstance(outcome, Tensor):
        outcome = outcome, cell.samples
    if isinstance(outcome, tuple | list) and len(outcome) in (2, 3):
        losses = outcome[0]
        objective = losses if _by_sample(losses, cell) else _scalar(losses, cell)
        sums = outcome[2] if len(outcome) == 3 else {}
        dtype = _wide(objective)
        total = objective.detach().sum() if objective.dim() else objective.detach()
        values = [total, *(torch.as_tensor(v).detach() for v in (outcome[1], *sums.values()))]
        lanes = torch.stack([v.to(objective.device, dtype) for v in values])
        start = _noisy(cell, objective) if cell.noise else _start(cell.weight, objective)
        return objective, start, _totals(lanes, tuple(sums), cell)
    raise UsageError(
        f"the loss function returned {type(outcome).__name__}",
        remedy="return a scalar (mean over the batch), (sum, count) or (sum, count, {name: sum})",
    )


def _start(factor: float, objective: Tensor) -> Tensor:
    return _filled(factor, objective.shape, objective.dtype, objective.device)


def _totals(lanes: Tensor, names: tuple[str, ...], cell: Cell) -> Totals:
    return Totals(lanes if cell.samples else torch.zeros_like(lanes), names, cell.samples)


@lru_cache(maxsize=256)
def _filled(factor: float, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``factor`` everywhere, kept because it is the same in most steps."""
    return torch.full(shape, factor, dtype=dtype, device=device)


def _noisy(cell: Cell, objective: Tensor) -> Tensor:
    """The cell's weight times z of each sample; drawn on the CPU, so that it is the same on every device."""
    generator = torch.Generator().manual_seed(mix(cell.key, _NOISE) & _MASK)
    draws = torch.randn(cell.samples, generator=generator, dtype=torch.float64)
    return draws.mul_(cell.noise).add_(1.0).mul_(cell.weight).to(objective.device, objective.dtype)


@lru_cache(maxsize=256)
def _mean_lanes(samples: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """``(0, n)`` and ``(n, 0)``: lanes of a mean loss are the first plus the second times the loss."""
    return (
        torch.tensor([0, samples], dtype=dtype, device=device),
        torch.tensor([samples, 0], dtype=dtype, device=device),
    )


def _wide(objective: Tensor) -> torch.dtype:
    return torch.float64 if objective.dtype == torch.float64 else torch.float32


def _by_sample(losses: Any, cell: Cell) -> bool:
    return isinstance(losses, Tensor) and losses.dim() == 1 and len(losses) == (cell.samples or len(losses))


def _scalar(objective: Any, cell: Cell) -> Tensor:
    if not isinstance(objective, Tensor) or objective.numel() != 1:
        shape = tuple(objective.shape) if isinstance(objective, Tensor) else type(objective).__name__
        raise UsageError(
            f"the loss is not a scalar but {shape}",
            remedy=f"reduce it by mean or sum, or return one number for each of the {cell.samples} samples",
        )
    if cell.noise:
        raise UsageError(
            "gradient noise needs the loss of each sample, and the loss function returned one number for all",
            remedy="return a 1-d tensor of one loss a sample, alone or in place of the sum; or leave the noise out",
        )
    return objective.reshape(()) if objective.dim() else objective
