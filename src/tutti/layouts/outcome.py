"""What a loss function returned, made uniform."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tutti.errors import UsageError
from tutti.types import Cell, Totals


def read(outcome: Any, cell: Cell) -> tuple[Tensor, float, Totals]:
    """The tensor to go backward from, the factor on it, and the totals.

    Args:
        outcome: a scalar (mean over the cell's samples), ``(sum, count)`` or ``(sum, count, metric_sums)``.
        cell: what it was computed on.

    Returns:
        objective, its factor in the step's gradient (so that gradients of all cells add up to the mean), totals with
        lanes (2 + metrics,) of float32, or float64 where the loss is. Of a stand-in factor and totals are zero.

    Raises:
        UsageError: the loss function returned something else.
    """
    if isinstance(outcome, Tensor):
        objective = _scalar(outcome)
        lanes = torch.addcmul(
            *_mean_lanes(cell.samples, _wide(objective), objective.device), objective.detach().to(_wide(objective))
        )
        return objective, cell.samples * cell.weight, _totals(lanes, (), cell)
    if isinstance(outcome, tuple | list) and len(outcome) in (2, 3):
        objective = _scalar(outcome[0])
        sums = outcome[2] if len(outcome) == 3 else {}
        dtype = _wide(objective)
        values = [objective.detach(), *(torch.as_tensor(v).detach() for v in (outcome[1], *sums.values()))]
        lanes = torch.stack([v.to(objective.device, dtype) for v in values])
        return objective, cell.weight, _totals(lanes, tuple(sums), cell)
    raise UsageError(
        f"the loss function returned {type(outcome).__name__}",
        remedy="return a scalar (mean over the batch), (sum, count) or (sum, count, {name: sum})",
    )


def _totals(lanes: Tensor, names: tuple[str, ...], cell: Cell) -> Totals:
    return Totals(lanes if cell.samples else torch.zeros_like(lanes), names, cell.samples)


@lru_cache(maxsize=256)
def seed(factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient to start backward with: ``factor`` as a tensor, kept because it is the same in most steps."""
    return torch.tensor(factor, dtype=dtype, device=device)


@lru_cache(maxsize=256)
def _mean_lanes(samples: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """``(0, n)`` and ``(n, 0)``: lanes of a mean loss are the first plus the second times the loss."""
    return (
        torch.tensor([0, samples], dtype=dtype, device=device),
        torch.tensor([samples, 0], dtype=dtype, device=device),
    )


def _wide(objective: Tensor) -> torch.dtype:
    return torch.float64 if objective.dtype == torch.float64 else torch.float32


def _scalar(objective: Any) -> Tensor:
    if not isinstance(objective, Tensor) or objective.numel() != 1:
        shape = tuple(objective.shape) if isinstance(objective, Tensor) else type(objective).__name__
        raise UsageError(f"the loss is not a scalar but {shape}", remedy="reduce it by mean or sum")
    return objective.reshape(()) if objective.dim() else objective
