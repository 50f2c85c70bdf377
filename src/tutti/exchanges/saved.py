"""An optimizer's state by parameter name: what a checkpoint holds, whichever rank or strategy reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.types import SavedState

Named = Sequence[tuple[str, nn.Parameter]]


def optimizer_tensors(optimizer: Optimizer, named: Named) -> dict[str, Tensor]:
    """``{parameter}/{key}`` → tensor, of everything that the optimizer keeps for these parameters; numbers as 0-d."""
    tensors = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}/{key}"] = _tensor(value)
    return tensors


def load_optimizer(optimizer: Optimizer, named: Named, saved: SavedState, group: str, prefix: str = "") -> None:
    """Give the optimizer the state that ``optimizer_tensors`` named; parameters without any start afresh."""
    keys: dict[str, list[str]] = {}
    for entry in saved.names(group):
        if entry.startswith(prefix):
            owner, _, key = entry.removeprefix(prefix).rpartition("/")
            keys.setdefault(owner, []).append(key)
    for name, parameter in named:
        if name in keys:
            optimizer.state[parameter] = {
                key: _like(saved.get(group, f"{prefix}{name}/{key}"), parameter) for key in sorted(keys[name])
            }


def mine_of(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """This rank's part of tensors that all ``ranks`` hold alike: every ``ranks``-th by size, for even writing."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))
    return {name: tensors[name] for name in ordered[rank::ranks]}


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """On the parameter's device and in its layout; step counters stay on the CPU, where optimizers want them."""
    if tensor.dim() == 0:
        return tensor.clone()
    placed = torch.empty_like(parameter, dtype=tensor.dtype)
    return placed.copy_(tensor) if tensor.shape == parameter.shape else tensor.to(parameter.device)
