"""Find optimizers that ``tutti.prepare`` was not given: of sharded parameters, and of tensors outside of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, WeakSet

from torch import Tensor
from torch.optim import Optimizer

from tutti.errors import UsageError, script_line
from tutti.python_compat import LiveObjects
from tutti.torch_compat import local_tensor
from tutti.train.prepared_before import is_prepared

if TYPE_CHECKING:
    from tutti.train.run import Run

PREPARE = (
    "put the tensors into a module, and give tutti.prepare the model and the module in a list, and all optimizers in"
    " another"
)
"""How to train tensors that are not in the model."""

_OPTIMIZERS = LiveObjects(Optimizer)


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
    for other in _OPTIMIZERS.all():
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


class OtherSteps:
    """Reports each step of an optimizer that ``tutti.prepare`` was not given, on tensors that are not in a run's model.

    Such tensors, as learned weights of a loss, class centres or a discriminator, have gradients of this rank's samples
    alone, unless the script reduces them over ranks. ``look`` finds the optimizers of the process and hooks them.

    Args:
        run: the run.
        note: called before such a step with the name of the optimizer's class, and a list of those tensors that have
            gradients.
    """

    def __init__(self, run: Run, note: Callable[[str, Sequence[Tensor]], None]) -> None:
        self._run, self._note = run, note
        self._hooked = WeakSet[Optimizer]()

    def look(self) -> None:
        """Add a step pre-hook, once, to each optimizer of this process that no ``tutti.prepare`` was given.

        The hook runs before each step of such an optimizer, and looks for parameters that have gradients and are not in
        the run's model. If there are any, it calls the constructor's ``note`` with the name of the optimizer's class
        and a list of these parameters. A later call of ``look`` adds hooks to optimizers that were made since. Not
        collective.
        """
        stepping = WeakMethod(self._stepping)

        def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (method := stepping()) is not None:
                method(optimizer)

        for each in _OPTIMIZERS.all():
            if each not in self._hooked and not is_prepared(each):
                self._hooked.add(each)
                # A wrapper of an optimizer may have no hooks, nor an attribute of the base class.
                with suppress(AttributeError):
                    each.register_step_pre_hook(look)

    def _stepping(self, optimizer: Optimizer) -> None:
        run = self._run
        if run.lifecycle.in_any_update:
            return
        own = (p for part in run.replica.parts for p in part.parameters())
        known = set(map(id, [*own, *run.hooks.originals.values()]))
        members = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        # A DTensor is sharded by the script, and each rank has other rows of it.
        trained = [p for p in members if local_tensor(p) is p and p.grad is not None]
        if trained:
            self._note(type(optimizer).__name__, trained)
