"""What becomes of the optimizer that a run is given: options, or one that the user made."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.errors import UsageError, did_you_mean
from tutti.optim import native
from tutti.optim.config import LayerWise as LayerWiseOptions
from tutti.optim.config import check_optimizer
from tutti.optim.factory import from_config, from_instance
from tutti.optim.layerwise import LayerWise
from tutti.optim.scaling import check_rule, scaled
from tutti.types import OptimizerFactory


def factory(optimizer: Optimizer | str, lr_scale: str, batch_size: int) -> OptimizerFactory:
    """Builds the optimizer at the rate that ``lr_scale`` gives. Raises UsageError for a rule on a made optimizer."""
    rule = check_rule(lr_scale)
    if isinstance(optimizer, Optimizer):
        if lr_scale != "none":
            raise UsageError(
                "lr_scale is for an optimizer given as text",
                why="a scheduler that you made of yours would put its own rates back",
                remedy="make it with the scaled rate: see tutti.laws.learning_rate",
            )
        return from_instance(optimizer)
    return from_config(scaled(check_optimizer(optimizer), rule, batch_size))


def same_kernels(comm: Communicator, given: Optimizer | str, made: Sequence[Optimizer]) -> None:
    """Compiled optimizer loops everywhere or nowhere, for they round differently from PyTorch's. Collective."""
    kind = given if isinstance(given, Optimizer) else check_optimizer(given)
    if comm.size == 1 or not isinstance(kind, LayerWise | LayerWiseOptions):
        return
    keys = comm.all_gather(torch.tensor([native.key()]), "compiled optimizer loops")
    if len({int(key) for key in keys}) > 1:
        for optimizer in (*made, *([given] if isinstance(given, Optimizer) else [])):
            for group in optimizer.param_groups:
                group["fused"] = False


def describe(optimizer: Optimizer | str, lr_scale: str) -> list[str]:
    """The optimizer's class and every group's settings, a line each."""
    if not isinstance(optimizer, Optimizer):
        return [f"optimizer {optimizer}, lr_scale {lr_scale}"]
    lines = [f"optimizer {type(optimizer).__name__}"]
    for number, group in enumerate(optimizer.param_groups):
        said = {key: value for key, value in sorted(group.items()) if key != "params"}
        lines.append(f"optimizer group {number} of {len(group['params'])} parameters: {said}")
    return lines


def check_fits(optimizer: Optimizer | str, model: nn.Module) -> None:
    """Raise UsageError where the optimizer has parameters, or names some, that are not the model's."""
    if isinstance(optimizer, Optimizer):
        known = {id(p) for p in model.parameters()}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer has parameters that the model does not have",
                remedy="make it of model.parameters(), and everything that is trained a part of the model",
            )
        return
    options, names = check_optimizer(optimizer), [name for name, _ in model.named_parameters()]
    for option in ("adam", "exclude"):
        usual = getattr(type(options), option, ())
        for pattern in getattr(options, option, ()):
            if pattern not in (*usual, "none") and not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"the model has no parameter '{pattern}'",
                    where=f"--optimizer {optimizer}, {option}",
                    remedy=did_you_mean(pattern, names),
                )
