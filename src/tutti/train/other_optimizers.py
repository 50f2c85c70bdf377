"""Refuse steps of optimizers that ``tutti.prepare`` was not given, where the model's parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.python_compat import live_objects
from tutti.train.gradient_origin import script_line


def refuse_other_optimizers(given: Sequence[Optimizer], originals: Iterable[Tensor]) -> None:
    """Let every other living optimizer of these parameters raise UsageError in its next step.

    The model has other parameter objects now, or gradients that are not whole. Optimizers that share groups with a
    given one, such as the inner one of a wrapper, may step.

    Args:
        given: the optimizers of ``tutti.prepare``.
        originals: the model's parameters as they were before.
    """
    known = {id(p) for p in originals}
    own = {id(group) for optimizer in given for group in optimizer.param_groups}
    for other in live_objects(Optimizer):
        groups = getattr(other, "param_groups", ())
        apart = not any(id(group) in own for group in groups) and not any(other is each for each in given)
        if apart and any(id(p) in known for group in groups for p in group["params"]):
            other.register_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise UsageError(
        f"a step of an optimizer ({type(optimizer).__name__}) that tutti.prepare was not given",
        where=script_line(),
        why="the parameters that it has are sharded over devices since, so that it would train none of them",
        remedy="give tutti.prepare all optimizers in a list",
    )
