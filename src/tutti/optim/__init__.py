"""Optimizers, learning-rate rules and schedules, loss scale, gradient noise.

Public names are imported lazily: ``tutti.config.optimizer_config`` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "LARS": "tutti.optim.lars",
    "LARC": "tutti.optim.lars",
    "LAMB": "tutti.optim.lamb",
    "NovoGrad": "tutti.optim.novograd",
    "Muon": "tutti.optim.muon",
    "split_groups": "tutti.optim.layerwise",
}

__all__ = [*_HOME]

if TYPE_CHECKING:
    from tutti.optim.lamb import LAMB as LAMB
    from tutti.optim.lars import LARC as LARC
    from tutti.optim.lars import LARS as LARS
    from tutti.optim.layerwise import split_groups as split_groups
    from tutti.optim.muon import Muon as Muon
    from tutti.optim.novograd import NovoGrad as NovoGrad


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tutti.optim' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(_HOME)
