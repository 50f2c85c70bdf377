"""Optimizers from options, and from an optimizer that the user made. PyTorch's fused kernels where they exist."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.optim.config import SGD, AdamW
from tutti.types import OptimizerFactory

Named = Sequence[tuple[str, nn.Parameter]]


def from_config(config: Any) -> OptimizerFactory:
    """A factory of ``torch.optim.SGD``, ``Adam`` or ``AdamW`` with these options over all trainable parameters."""

    def make(named: Named) -> Optimizer | None:
        trainable = [p for _, p in named if p.requires_grad]
        if not trainable:
            return None
        fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in trainable)
        if isinstance(config, SGD):
            return torch.optim.SGD(
                trainable,
                lr=config.lr,
                momentum=config.momentum,
                dampening=config.dampening,
                weight_decay=config.weight_decay,
                nesterov=config.nesterov,
                fused=fused,
            )
        kind = torch.optim.AdamW if isinstance(config, AdamW) else torch.optim.Adam
        betas = (config.beta1, config.beta2)
        return kind(trainable, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay, fused=fused)

    return make


def from_instance(optimizer: Optimizer) -> OptimizerFactory:
    """A factory that gives the user's own optimizer back where it fits, and others like it where it does not.

    The first call over exactly the optimizer's parameters returns the optimizer itself. Another call (a stage that
    holds only some of them; one optimizer a worker) builds one of the same class with the same groups and settings.
    """
    groups = [({k: v for k, v in g.items() if k != "params"}, list(g["params"])) for g in optimizer.param_groups]
    known = set(inspect.signature(type(optimizer)).parameters)
    defaults = {k: v for k, v in optimizer.defaults.items() if k in known}
    given = {id(p) for _, members in groups for p in members}
    handed_out = False

    def make(named: Named) -> Optimizer | None:
        nonlocal handed_out
        here = {id(p) for _, p in named}
        if not handed_out and given <= here:
            handed_out = True
            return optimizer
        if optimizer.state:
            raise UsageError(
                "an optimizer that has already stepped cannot be rebuilt for this strategy",
                remedy="call tutti.prepare before the first optimizer step",
            )
        subset = [{**settings, "params": [p for p in members if id(p) in here]} for settings, members in groups]
        subset = [group for group in subset if group["params"]]
        return _following(optimizer, type(optimizer)(subset, **defaults), here) if subset else None

    return make


def _following(original: Optimizer, built: Optimizer, here: set[int]) -> Optimizer:
    """``built``, which takes over what the user or a scheduler sets in ``original``'s groups before each step."""
    pairs = [group for group in original.param_groups if any(id(p) in here for p in group["params"])]

    def follow(*_: Any) -> None:
        for own, theirs in zip(built.param_groups, pairs, strict=True):
            own.update({key: value for key, value in theirs.items() if key != "params"})

    built.register_step_pre_hook(follow)
    return built
