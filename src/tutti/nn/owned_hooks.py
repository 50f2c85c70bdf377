"""Hooks of a run on the script's model, which outlives the run: they do not keep the run in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, cast
from weakref import ref

from torch import nn

from tutti.torch_compat import MODULE_HOOK_TABLES, accumulation_hooks


class OwnedHook:
    """Hook that calls a bound method by a weak reference, and does nothing once the method's object is gone.

    The object may refer to a run. A strong reference would let a script that keeps a model, or gives it to
    ``tutti.prepare`` again, keep each run of the model with its gradients and data: Python's garbage collector cannot
    follow a hook on a tensor. The hook is an object instead of a function, because PyTorch sets attributes on some
    hooks.

    Args:
        method: bound method, which is called with ``given`` and then with the arguments that PyTorch gives the hook.
        given: the method's first arguments.
    """

    def __init__(self, method: Callable[..., None], *given: Any) -> None:
        bound = cast(MethodType, method)
        self._owner, self._function, self._given = ref(bound.__self__), bound.__func__, given

    def __call__(self, *args: Any) -> None:
        """Call the method with the arguments that PyTorch gives the hook; returns None."""
        if (owner := self._owner()) is not None:
            self._function(owner, *self._given, *args)

    def ended(self) -> bool:
        """Return whether the object whose method this hook calls is gone, so that the hook does nothing any more."""
        return self._owner() is None


def remove_ended_hooks(model: nn.Module) -> None:
    """Remove the hooks of runs that no longer exist from a model's modules and parameters. Not collective.

    A run is part of reference cycles: one that the script has dropped exists until Python's garbage collector runs. The
    function therefore first runs the collector, if the model has hooks of a run.

    Args:
        model: the script's model, before ``tutti.prepare`` adds hooks of a new run.
    """
    if not any(_hooks_of_runs(model)):
        return
    gc.collect()
    for tables, key in [(tables, key) for tables, key, hook in _hooks_of_runs(model) if hook.ended()]:
        for table in tables:
            table.pop(key, None)


def _hooks_of_runs(model: nn.Module) -> Iterator[tuple[Sequence[dict[int, Any]], int, OwnedHook]]:
    """Yield the hooks of runs, each with the tables of its module or parameter, and its key in one of them."""
    of_modules = [[vars(m)[name] for name in MODULE_HOOK_TABLES if name in vars(m)] for m in model.modules()]
    of_parameters = [[table] for p in model.parameters() if (table := accumulation_hooks(p))]
    for tables in (*of_modules, *of_parameters):
        for table in tables:
            for key, hook in table.items():
                if isinstance(hook, OwnedHook):
                    yield tables, key, hook
