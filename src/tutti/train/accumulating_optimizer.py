"""Accumulating optimizers: in a custom training loop ``step()`` acts once a global batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from tutti.comm.graph_breaks import left_out_of_graphs
from tutti.config.strategy_choice import StrategyChoice
from tutti.errors import UsageError
from tutti.optim.optimizer_copy import AbsentState, inner_optimizers
from tutti.optim.several import members_of
from tutti.parallel import check_custom_loop
from tutti.torch_compat import mark_stepped, mark_wrapped_by_scheduler
from tutti.train.partial_state import PartialState, StateGuard, StatePart
from tutti.train.prepared_before import keeps_state, own_step, wrap_methods
from tutti.train.step_hooks import StepHookGuard

if TYPE_CHECKING:
    from tutti.train.run import Run


_METHODS = ("step", "zero_grad", "state_dict", "load_state_dict", "__getstate__")
"""Methods that are wrapped."""


def accumulate_steps(optimizer: Optimizer, run: Run, choice: StrategyChoice, index: int = 0) -> None:
    """Wrap methods of a script's optimizer, so that its ``step`` makes one update for each global batch.

    In a custom training loop a rank may run the loop's body for several micro-batches of a global batch, one after
    another. Wrapping is not collective, and acts on the instance alone, as PyTorch's schedulers wrap ``step``; a
    function that the script has set as a method of the instance before is called in place of the class's method. Then:

    - ``step()`` makes the update in the body of the rank's last micro-batch; in earlier bodies it does nothing. It
      first reduces gradients of a plain ``loss.backward()`` over the data ranks (collective), and performs the
      collectives of the strategy's update.
    - ``zero_grad()`` also clears ``.grad`` of the script's own parameter objects, where the optimizer has others
      (shards).
    - ``state_dict()``, ``load_state_dict()`` and copies raise UsageError where this optimizer does not hold all
      optimizer state of the rank's part of the model; reads of the attribute ``state`` raise it where another object or
      rank makes this optimizer's updates.
    - Other public methods of the script's class, such as SAM's ``first_step``, raise UsageError if they fail in an
      earlier body, under a strategy where the optimizer's parameters have gradients in the last body alone.

    Args:
        optimizer: one of the script's optimizers, which gets these methods as attributes.
        run: the run, which synchronises gradients and makes the update.
        choice: the chosen parallel strategy; decides which methods this rank can offer.
        index: the optimizer's index among those of ``tutti.prepare``.

    Raises:
        UsageError: the script has set a function as ``step``, and other objects or ranks make a part of the updates.
    """
    kind, replaced = type(optimizer), own_step(optimizer)
    if replaced:
        _check_own_step(kind, run, choice)
    own = _methods_of_script(kind) if choice.row.custom_loop else []
    before = {name: vars(optimizer).get(name) for name in (*_METHODS, *own)}

    def call(self: Optimizer, name: str, *arguments: Any, **named: Any) -> Any:
        function = before.get(name)
        return getattr(kind, name)(self, *arguments, **named) if function is None else function(*arguments, **named)

    def explained(name: str) -> Callable[..., Any]:
        def method(self: Optimizer, *arguments: Any, **named: Any) -> Any:
            with run.custom.explaining(f"{kind.__name__}.{name}()"):
                return call(self, name, *arguments, **named)

        method.__name__ = name
        return method

    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        mark_stepped(self)
        for guard in run.state_guards:
            guard.check()
        if run.stepping:
            with run.lifecycle.inputs.stepping(self):
                result: float | None = call(self, "step")
            return result
        check_custom_loop(choice, run.context.workers, run.context.mesh.data_ranks)
        loss: float | None = None
        with _stepping_by(self, step), run.model_code():
            if closure is not None:
                loss = run.custom.closures.step(index, closure, partial(call, self, "step"), replaced)
            else:
                with run.lifecycle.values.updating():
                    run.custom.update.step(index)
        return loss

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        """Clear the optimizer's gradients, and those that the script sees."""
        with run.model_code():
            call(self, "zero_grad", *([] if set_to_none else [False]))
            if choice.row.custom_loop:
                run.custom.cleared(index, set_to_none)

    step, zero_grad = left_out_of_graphs(step), left_out_of_graphs(zero_grad)
    mark_wrapped_by_scheduler(step)
    wrap_methods(optimizer, (step, zero_grad, *_state_methods(call, run, choice), *map(explained, own)))
    if not keeps_state(choice, run.context):
        _guard_state(optimizer, run, choice)


def _state_methods(call: Callable[..., Any], run: Run, choice: StrategyChoice) -> list[Callable[..., Any]]:
    """Return the wrappers of methods that read or load the optimizer's state, all of which this rank must hold.

    ``call(optimizer, name, *arguments)`` calls the method that is wrapped.
    """

    def state_dict(self: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state. Raises UsageError if it is split over ranks, logical workers or servers."""
        _check_state(run, choice, "state_dict()")
        found: dict[str, Any] = call(self, "state_dict")
        return found

    def load_state_dict(self: Optimizer, state: dict[str, Any]) -> None:
        """Load the optimizer's state. Raises UsageError if it is split over ranks, logical workers or servers."""
        _check_state(run, choice, "load_state_dict()")
        call(self, "load_state_dict", state)

    def __getstate__(self: Optimizer) -> Any:
        """Return what a copy or ``torch.save`` of the optimizer takes. Raises UsageError as ``state_dict``."""
        _check_state(run, choice, "a copy")
        return call(self, "__getstate__")

    return [state_dict, load_state_dict, __getstate__]


def _check_own_step(kind: type[Optimizer], run: Run, choice: StrategyChoice) -> None:
    """Raise UsageError for a function that the script has set as ``step`` where each rank updates a part."""
    if not keeps_state(choice, run.context):
        raise UsageError(
            f"{kind.__name__}.step is a function of the script, which cannot be combined with strategy '{choice.name}'",
            why="ranks, logical workers or servers update a part each, and the function would not see all of it",
            remedy="set it after tutti.prepare, around the step that it finds then; or take strategy='mirrored'",
        )


def _guard_state(optimizer: Optimizer, run: Run, choice: StrategyChoice) -> None:
    """Guard ``state`` and step hooks of the script's optimizer, and of optimizers in it, against reads of a part."""
    steps_here = any(optimizer is each for own in run.gradient_sync.optimizers for each in members_of(own))
    here = steps_here and choice.row.optimizer_here
    together = here and run.gradient_sync.loss_normalisation == "step" and run.context.mesh.stage == 1
    for each in (optimizer, *inner_optimizers(optimizer).values()):
        guard = _guard_parts(each, run, choice, optimizer) if here else _refuse_state(each, run, choice)
        run.state_guards += [guard, StepHookGuard(each, choice.name, _part_finder(run) if together else None)]


def _methods_of_script(kind: type[Optimizer]) -> list[str]:
    """Return the names of public methods of an optimizer's class that PyTorch's classes lack: SAM's ``first_step``."""
    bases = [each for each in kind.__mro__ if each.__module__.partition(".")[0] in ("torch", "builtins", "typing")]
    plain = {name for each in bases for name in vars(each)}
    names = {name for each in kind.__mro__ for name, value in vars(each).items() if inspect.isfunction(value)}
    return sorted(name for name in names - plain if not name.startswith("_"))


@contextmanager
def _stepping_by(optimizer: Any, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Within the block the optimizer's ``step`` is the wrapper, and not a function that the script has set around it.

    The strategy calls ``step`` for the update, and the script's function has been called already.
    """
    present = vars(optimizer).get("step")
    optimizer.step = MethodType(wrapper, optimizer)
    try:
        yield
    finally:
        optimizer.step = present


def _refuse_state(optimizer: Optimizer, run: Run, choice: StrategyChoice) -> StateGuard:
    """Guard the state of an optimizer whose updates another object makes, from which nothing can be read."""

    def refuse(given: Mapping[Tensor, Any] | None = None) -> None:
        _check_state(run, choice, "reading or writing the state")

    return StateGuard(optimizer, lambda plain: AbsentState(refuse), refuse)


def _part_finder(run: Run) -> Callable[[Tensor], bool]:
    """Return a function that returns whether an object that was a parameter before is a part of it now."""
    find = _parts(run)
    return lambda tensor: find(tensor) is not None


def _parts(run: Run) -> Callable[[Tensor], StatePart | None]:
    """Return a function that describes the part of a parameter that this rank has; it returns None for a whole one."""
    names = {id(p): name for name, p in run.hooks.originals.items()}
    specs, sharded = run.replica.specs, run.context.mesh.shard > 1

    def part_of(parameter: Tensor) -> StatePart | None:
        name = names.get(id(parameter))
        spec = None if name is None else specs.get(name)
        if name is None or spec is None or not (sharded or tuple(parameter.shape) != spec.shape):
            return None
        return StatePart(name, tuple(spec.shape), tuple(parameter.shape))

    return part_of


def _guard_parts(optimizer: Optimizer, run: Run, choice: StrategyChoice, outer: Optimizer) -> StateGuard:
    """Guard the state of an optimizer that steps here, on this rank's part or for the first of its workers.

    ``outer``: the script's optimizer that steps it, or itself.
    """
    originals, model = run.hooks.originals, run.model
    names, part_of = {id(p) for p in originals.values()}, _parts(run)

    def member(parameter: Tensor) -> Tensor:
        if id(parameter) in names:
            return parameter
        found = (name for name, p in model.named_parameters(remove_duplicate=False) if p is parameter)
        return next((originals[name] for name in found if name in originals), parameter)

    # Of several workers that train alone, the script's optimizer is the first one's.
    first = run.gradient_sync.loss_normalisation == "worker"

    def refuse() -> None:
        _check_state(run, choice, "reading or writing the state")

    return StateGuard(
        optimizer,
        lambda plain: PartialState(plain, outer, part_of, member, refuse if first else None),
        lambda given: refuse() if first else None,
    )


def _check_state(run: Run, choice: StrategyChoice, call: str) -> None:
    """Raise UsageError if the script's optimizer does not hold all optimizer state of this rank's model."""
    if not keeps_state(choice, run.context):
        raise UsageError(
            f"{call} of the optimizer after tutti.prepare cannot be combined with strategy '{choice.name}'",
            where=f"step {run.global_step}",
            why="its state is distributed over ranks, logical workers or servers",
            remedy="call run.save(folder) and run.restore(folder), which handle all of it; optimizer.param_groups has"
            " the"
            " settings; or take strategy='mirrored'",
        )
