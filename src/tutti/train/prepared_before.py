"""Models and optimizers of an earlier ``tutti.prepare``: which of them a second call may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from tutti.config.strategy_choice import StrategyChoice
from tutti.errors import UsageError
from tutti.nn.owned_hooks import remove_ended_hooks
from tutti.torch_compat import is_wrapped_by_scheduler
from tutti.types.run_context import RunContext

_models: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_optimizers: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
_wrapped: WeakKeyDictionary[Optimizer, list[str]] = WeakKeyDictionary()


def check_earlier(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that no earlier ``tutti.prepare`` has split the model or the optimizers' state over ranks.

    Removes the methods that the earlier run has set on the optimizer instances (``wrap_methods``), and restores the
    script's, and the hooks of runs that no longer exist. No collective: every rank comes to the same result.

    Args:
        model: the script's model.
        optimizers: the script's optimizers.

    Raises:
        UsageError: the earlier run has split the model, or the state of an optimizer.
    """
    for module in model.modules():
        if module in _models:
            _refuse("the model", "numbers", _models[module])
    for optimizer in optimizers:
        if optimizer in _optimizers:
            _refuse(f"the {type(optimizer).__name__}", "moments", _optimizers[optimizer])
    for optimizer in optimizers:
        for name in _wrapped.pop(optimizer, ()):
            before = getattr(vars(optimizer).pop(name, None), "tutti_before", None)
            if before is not None:
                setattr(optimizer, name, before)
    # The methods kept the run.
    remove_ended_hooks(model)


def own_step(optimizer: Optimizer) -> bool:
    """Return whether the script has set a function as ``step`` of the optimizer instance, in place of the class's.

    False for a scheduler's wrapper of the class's ``step``.

    Args:
        optimizer: one of the script's optimizers, before ``wrap_methods``.
    """
    present = vars(optimizer).get("step")
    if is_wrapped_by_scheduler(present):
        present = getattr(present, "__wrapped__", None)
    return present is not None and present is not type(optimizer).step


def is_prepared(optimizer: Optimizer) -> bool:
    """Return whether an earlier ``tutti.prepare`` was given the optimizer and has wrapped its methods.

    Args:
        optimizer: any optimizer of the process.
    """
    return optimizer in _wrapped


def wrap_methods(optimizer: Optimizer, wrappers: Sequence[Callable[..., Any]]) -> None:
    """Replace methods of an optimizer instance by functions of the same names, which ``check_earlier`` removes.

    ``check_earlier`` runs before another run is prepared with the same optimizer, and restores the script's methods.

    Args:
        optimizer: one of the script's optimizers; its class stays.
        wrappers: the functions, each with the ``__name__`` of the method that it replaces. They get the optimizer as
            their first argument, as methods do, and themselves call the method that they replace.
    """
    for wrapper in wrappers:
        name = wrapper.__name__
        # In the function, and not in a global table, which would keep an optimizer that its own method refers to.
        wrapper.tutti_before = vars(optimizer).get(name)  # type: ignore[attr-defined]
        setattr(optimizer, name, MethodType(wrapper, optimizer))
        _wrapped.setdefault(optimizer, []).append(name)


def note_prepared(
    model: nn.Module, optimizers: Sequence[Optimizer], choice: StrategyChoice, run_context: RunContext
) -> None:
    """Record the model and optimizers of a run that has split parameters or optimizer state over ranks.

    ``check_earlier`` then refuses a later ``tutti.prepare`` of the same model or optimizers, of which this rank holds
    only a part. Does nothing where each rank holds the whole model and its optimizer state.

    Args:
        model: the script's model.
        optimizers: the script's optimizers.
        choice: the strategy.
        run_context: the run's device mesh and number of logical data-parallel workers.
    """
    mesh = run_context.mesh
    if mesh.stage > 1 or mesh.tensor > 1 or mesh.shard > 1:
        _models.update(dict.fromkeys(filter(_has_numbers, model.modules()), choice.name))
    if not keeps_state(choice, run_context):
        _optimizers.update(dict.fromkeys(optimizers, choice.name))


def _has_numbers(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers of its own; models may share others, such as activations."""
    return bool([*module.parameters(recurse=False), *module.buffers(recurse=False)])


def keeps_state(choice: StrategyChoice, run_context: RunContext) -> bool:
    """Return whether the script's optimizer object holds all optimizer state of this rank's part of the model.

    False where the state is sharded over ranks, lies on parameter servers, or belongs to several data-parallel workers
    that this rank computes one after another, each with its own state.

    Args:
        choice: the strategy.
        run_context: the run's device mesh and number of logical data-parallel workers.
    """
    if not choice.row.optimizer_here:
        return False
    if choice.row.local_steps:
        return run_context.workers == run_context.mesh.data_ranks
    return choice.row.own_copies or run_context.mesh.size == 1


def _refuse(subject: str, what: str, strategy: str) -> None:
    raise UsageError(
        f"{subject} was given to an earlier tutti.prepare with strategy {strategy}",
        why=f"since then this rank has only a part of its {what}, and this run would start from different ones",
        remedy="take strategy='mirrored'; or build both again and load with run.restore for the same data set, or "
        "init_from=… for the weights only",
    )
