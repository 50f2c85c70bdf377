"""Optimizers from options, and from an optimizer that the user made. Fused kernels where they exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti import optim
from tutti.errors import UsageError
from tutti.optim import config as options
from tutti.optim.layerwise import LayerWise
from tutti.types import OptimizerFactory

Named = Sequence[tuple[str, nn.Parameter]]


def from_config(config: Any) -> OptimizerFactory:
    """A factory of the optimizer that these options are of, over all trainable parameters."""

    def make(named: Named) -> Optimizer | None:
        trainable = [(name, p) for name, p in named if p.requires_grad]
        return _make(config, trainable) if trainable else None

    return make


def _make(config: Any, named: Named) -> Optimizer:
    arguments = asdict(config)
    for prefix in ("", "adam_"):
        if f"{prefix}beta1" in arguments:
            arguments[f"{prefix}betas"] = arguments.pop(f"{prefix}beta1"), arguments.pop(f"{prefix}beta2")
    if isinstance(config, options.Muon):
        return optim.Muon(named, adam_names=arguments.pop("adam"), **arguments)
    if isinstance(config, options.LayerWise):
        kind = getattr(optim, type(config).__name__)
        made: Optimizer = kind(optim.split_groups(named, arguments.pop("exclude")), **arguments)
        return made
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for _, p in named)
    plain: dict[type, Callable[..., Optimizer]] = {
        options.SGD: torch.optim.SGD,
        options.Adam: torch.optim.Adam,
        options.AdamW: torch.optim.AdamW,
    }
    return plain[type(config)]([p for _, p in named], **arguments, fused=fused)


def from_instance(optimizer: Optimizer) -> OptimizerFactory:
    """A factory that gives the user's own optimizer back where it fits, and others like it where it does not.

    The first call over exactly the optimizer's parameters returns the optimizer itself. Another call (a stage that
    holds only some of them; one optimizer a worker) builds one of the same class with the same groups and settings.
    """
    groups = [(_settings(g), list(g["params"])) for g in optimizer.param_groups]
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
            own.update(_settings(theirs))

    if isinstance(original, LayerWise) and isinstance(built, LayerWise):
        built.norms = original.norms
    built.register_step_pre_hook(follow)
    return built


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says of each of its parameters alike."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
