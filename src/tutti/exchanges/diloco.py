"""Every worker trains a copy by itself; every H steps an outer optimizer steps along their mean change.

DiLoCo: Douillard et al. 2023, arXiv 2311.08105, Algorithm 1. The inner optimizer is the one that the run is given (the
paper: AdamW), whose state stays with the worker; the outer one is SGD with Nesterov's momentum. Memory beside that of
``local_sgd``: two copies of the parameters a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.exchanges.config import DiLoCoConfig
from tutti.exchanges.periodic import Periodic
from tutti.exchanges.saved import mine_of
from tutti.types import Agreed, GradSink, OptimizerFactory, Replica, SavedState, Setting, Tick, Update

_PARAMETER, _MOMENTUM = "outer/parameter/", "outer/momentum/"


class DiLoCo(Periodic):
    """The exchange of ``diloco``. Every rank makes the same outer update, from the same mean: no message more."""

    def __init__(self, config: DiLoCoConfig, setting: Setting) -> None:
        super().__init__(config, setting)
        self._options = config

    def attach(self, replica: Replica, make_optimizer: OptimizerFactory) -> GradSink:
        sink = super().attach(replica, make_optimizer)
        self._outer = [p.data.clone() for _, p in self._trained]
        self._velocities = [torch.zeros_like(outer) for outer in self._outer]
        return sink

    def update(self, agreed: Agreed, tick: Tick) -> Update:
        """As ``Periodic.update``; where workers part after synchronous steps, the outer parameters begin there."""
        updated = super().update(agreed, tick)
        if tick.clock + 1 == self._post:
            torch._foreach_copy_(self._outer, next(iter(self._copies.values())))
        return updated

    def state(self) -> dict[str, dict[str, Tensor]]:
        """As ``Periodic.state``, with the outer optimizer's parameters and momentum among what is the workers'."""
        state, comm = super().state(), self._setting.comms.replica
        names = [name for name, _ in self._trained]
        outer = {_PARAMETER + name: t for name, t in zip(names, self._outer, strict=True)}
        outer |= {_MOMENTUM + name: t for name, t in zip(names, self._velocities, strict=True)}
        return {**state, "workers": {**state["workers"], **mine_of(outer, comm.rank, comm.size)}}

    def load(self, saved: SavedState) -> None:
        """As ``Periodic.load``; where there is no outer optimizer, it begins at the merged model, at rest."""
        super().load(saved)
        names = saved.names("workers")
        for (name, _), outer, velocity in zip(self._trained, self._outer, self._velocities, strict=True):
            if _MOMENTUM + name in names:
                outer.copy_(saved.get("workers", _PARAMETER + name))
                velocity.copy_(saved.get("workers", _MOMENTUM + name))
            else:
                outer.copy_(saved.get("model", name))
                velocity.zero_()

    def _write(self, means: Sequence[Tensor]) -> None:
        options = self._options
        outer_step(self._outer, means, self._velocities, options.outer_lr, options.outer_momentum, options.nesterov)
        super()._write(self._outer)


def outer_step(
    parameters: Sequence[Tensor],
    means: Sequence[Tensor],
    velocities: Sequence[Tensor],
    lr: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """One outer update in place: Δ = θ - mean(θᵢ); v ← μ·v + Δ; θ ← θ - γ·(Δ + μ·v), without Nesterov θ ← θ - γ·v.

    Args:
        parameters: θ, what all workers began this round with.
        means: of the workers' parameters now.
        velocities: v.
        lr, momentum: γ and μ; 1 and 0 leave the average of the workers.
    """
    thetas, moved = list(parameters), list(velocities)
    changes = torch._foreach_sub(thetas, list(means))
    torch._foreach_mul_(moved, momentum)
    torch._foreach_add_(moved, changes)
    if nesterov:
        torch._foreach_add_(changes, moved, alpha=momentum)
    torch._foreach_sub_(thetas, changes if nesterov else moved, alpha=lr)
