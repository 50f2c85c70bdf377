"""Refuse steps of optimizers that ``tutti.prepare`` was not given, where the model's parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tutti.errors import UsageError, script_line
from tutti.python_compat import live_objects


def other_optimizers(given: Sequence[Optimizer], parameters: Iterable[Tensor]) -> list[Optimizer]:
    """Find the optimizers of this process that have parameters of the model and were not given to ``tutti.prepare``.

    All objects of the process are searched. To be called before tutti makes optimizers of its own.

    Args:
        given: the optimizers that ``tutti.prepare`` was given.
        parameters: the model's parameters.

    Returns:
        A list of the optimizers found, without those that share a parameter group with a given one, such as the inner
        optimizer of a wrapper.
    """
    known = {id(p) for p in parameters}
    own = {id(group) for optimizer in given for group in optimizer.param_groups}
    found = []
    for other in live_objects(Optimizer):
        groups = getattr(other, "param_groups", ())
        apart = not any(id(group) in own for group in groups) and not any(other is each for each in given)
        if apart and any(id(p) in known for group in groups for p in group["params"]):
            found.append(other)
    return found


def refuse_steps(optimizers: Iterable[Optimizer]) -> None:
    """Make the given optimizers raise UsageError in ``step``, by a step pre-hook on each.

    Called after the model has been sharded over ranks: these optimizers still hold the parameters from before, which
    are no longer trained.

    Args:
        optimizers: optimizers that ``tutti.prepare`` was not given.
    """
    for each in optimizers:
        each.register_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise UsageError(
        f"a step of an optimizer ({type(optimizer).__name__}) that tutti.prepare was not given",
        where=script_line(),
        why="the parameters that it has are sharded over devices since, so that it would train none of them",
        remedy="give tutti.prepare all optimizers in a list",
    )
