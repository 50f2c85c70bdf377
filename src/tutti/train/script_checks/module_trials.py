"""Refuse modules whose output depends on Python numbers that another logical worker's micro-batch has left in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tutti.torch_compat import functorch_level, in_backward, tree_leaves, tree_map_only
from tutti.train.script_checks.in_place_updates import MicroBatchKey
from tutti.train.script_checks.loss_watch import WatchHook
from tutti.train.script_checks.python_state import PythonState, is_of_script, trial_call
from tutti.types.replica_runner import ReplicaRunner

if TYPE_CHECKING:
    from tutti.train.run import Run

_Values: TypeAlias = dict[nn.Module, dict[str, Any]]
_PLAIN = int | float | str
"""Types of the attributes that are compared; bools are ints."""


class ModuleTrials:
    """Finds modules of the script whose output depends on numbers that another worker's micro-batch has changed.

    A count of forwards, or a rate that grows with them, would have another value if each logical worker (fixed share of
    the global batch) had a device of its own. If a module has other numbers or texts than it would have for a worker
    alone, its forward is computed without gradients: with the values that the worker would have, with the present ones,
    and where the outputs differ once more with the former, to leave out modules that draw by themselves. No call leaves
    a trace. Numbers on which no output depends, such as a count for a log, are allowed. A module with submodules is
    tried only where the model's forward sends nothing to other ranks.

    ``TUTTI_DIAGNOSTICS=off`` does not turn the trials off: in a custom loop no other check sees such numbers, and the
    updates would be wrong.

    Args:
        run: the run.
        aside: returns a context manager in which calls of PyTorch are not followed by other checks.
        refuse: raises the error, given the first sentence of its message.
    """

    def __init__(
        self, run: Run, aside: Callable[[], AbstractContextManager[None]], refuse: Callable[[str], None]
    ) -> None:
        self._run, self._aside, self._refuse = run, aside, refuse
        self._begun: _Values = {}
        self._left: _Values = {}
        # The values that each worker would have on a device of its own.
        self._own: dict[MicroBatchKey, _Values] = {}
        self._key: MicroBatchKey | None = None
        self._hooks: dict[nn.Module, RemovableHandle] = {}
        self._trying = False

    def begin_batch(self) -> None:
        """Record the numbers and texts in the script's modules before a global batch. Not collective.

        A value that the script has written between two global batches, after the code of the last micro-batch, counts
        for every logical worker (fixed share of the global batch) as one that the worker itself has left. A value that
        the body of a custom loop for that micro-batch has written after its backward counts likewise.
        """
        modules = {module for part in self._run.replica.parts for module in part.modules()}
        self._begun = {module: _values(module) for module in modules if is_of_script(type(module))}
        for own in self._own.values():
            for module, now in self._begun.items():
                left = self._left.get(module, {})
                written = {name: value for name, value in now.items() if left.get(name) != value}
                own[module] = {**own.get(module, now), **written}

    def begin(self, key: MicroBatchKey) -> None:
        """Begin a micro-batch: let each module with other values than its worker's own be tried in its next forward.

        A logical worker's own values are those that its micro-batches and the script have left in the module. The trial
        runs in a forward pre-hook. It calls ``refuse`` of the constructor if the module's output with its present
        values differs from that with the worker's own.

        Args:
            key: the micro-batch's logical worker (fixed share of the global batch); where several ranks share a
                worker, also the micro-batch's index in it.
        """
        self._key = key
        for module, own in self._own.setdefault(key, dict(self._begun)).items():
            if _differing(own, _values(module)):
                self._hooks[module] = module.register_forward_pre_hook(WatchHook(self._try), with_kwargs=True)

    def note(self) -> None:
        """Record the Python numbers and texts that the code for the micro-batch has left in the modules so far.

        ``end`` keeps them as the values of the micro-batch's logical worker. Called before each check of the loss, and
        after the code for a micro-batch that is not the rank's last one in the global batch. A later call replaces the
        record.
        """
        self._left = {module: _values(module) for module in self._begun}

    def end(self) -> None:
        """End a micro-batch: keep the modules' values at the last ``note`` as its worker's own, and remove the hooks.

        The values are Python numbers and texts in attributes; the hooks are those that ``begin`` has put on modules to
        try their forwards. Values of modules with such a hook are left out: the trial has recorded the values that the
        logical worker (fixed share of the global batch) would have left on a device of its own.
        """
        if self._key is not None:
            self._own[self._key] |= {m: values for m, values in self._left.items() if m not in self._hooks}
        for hook in self._hooks.values():
            hook.remove()
        self._key, self._hooks = None, {}

    def forget(self) -> None:
        """Drop the recorded numbers and texts of all modules, once the run checks no further micro-batches."""
        self._begun, self._left, self._own = {}, {}, {}

    def _try(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        run = self._run
        collective = run.context.comms.model.size > 1 or bool(run.replica.sharded) or run.feed.workers_as_one
        outside = not torch.is_grad_enabled() or functorch_level() is not None or in_backward()
        if self._key is None or self._trying or outside:
            return
        if collective and next(module.children(), None) is not None:
            return
        own, now = self._own[self._key][module], _values(module)
        self._trying, depends = True, False
        try:
            value = partial(_output, run.replica, module, args, kwargs)
            with self._aside():
                first, self._own[self._key][module] = value(own)
                depends = not _equal(first, value(now)[0]) and _equal(first, value(own)[0])
        except Exception:
            # The forward may need gradients, or write parameters.
            self._own[self._key][module] = now
        finally:
            self._trying = False
        if depends:
            name, changed = type(module).__name__, _differing(own, now)
            self._refuse(f"the output of {name} depends on what another micro-batch has left in {name}.{changed[0]}")


def _values(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN) and name != "training"}


def _differing(own: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name, value in own.items() if now.get(name, value) != value]


def _output(
    replica: ReplicaRunner, module: nn.Module, args: Any, kwargs: Any, values: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return a forward's results and the attributes afterwards, from these values; and leave everything as it was."""
    draws, state = replica.draws, PythonState((), module.forward)
    with ExitStack() as stack:
        stack.callback(state.restore)
        stack.callback(setattr, draws, "moment", draws.moment)
        stack.callback(setattr, draws, "state", draws.state)
        stack.enter_context(trial_call([module]))
        vars(module).update(values)
        given, named = tree_map_only(Tensor, torch.clone, (args, kwargs))
        found = tree_leaves(module.forward(*given, **named))
        return [each.clone() if isinstance(each, Tensor) else each for each in found], _values(module)


def _equal(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or bool(a == b)
        for a, b in zip(some, others, strict=True)
    )
