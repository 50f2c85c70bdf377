"""Refuse a loss function that takes an item of an iterator for every micro-batch, and keep checks from taking any."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from tutti.errors import UsageError
from tutti.train.script_checks.watch_windows import is_watched_step
from tutti.types.micro_batch import LossFn

if TYPE_CHECKING:
    from tutti.train.run import Run

_DEPTH = 3
"""Functions that call each other which are searched for iterators (a guess)."""


class _Variable(NamedTuple):
    """A variable that holds an iterator: its name and value, and functions that read and bind it."""

    name: str
    value: Iterator[Any]
    read: Callable[[], Any]
    bind: Callable[[Any], None]


class _Unreadable(Iterator[Any]):
    """Stands for an iterator in a call that serves a check, which ends with an error in place of taking an item."""

    def __next__(self) -> Any:
        raise RuntimeError("a check cannot take an item of the script's iterator")


class _Counted(Iterator[Any]):
    """An iterator of the script that counts the items that are taken."""

    def __init__(self, of_script: Iterator[Any]) -> None:
        self._of_script, self.taken = of_script, 0

    def __next__(self) -> Any:
        self.taken += 1
        return next(self._of_script)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_script, name)


@contextmanager
def iterators_unread(function: Any) -> Iterator[None]:
    """Return a context manager within which a function can take no item of an iterator of the script.

    For a check's own call of the function: an item could not be given back. The global and enclosing variables of the
    function that hold iterators are replaced by objects whose ``next`` raises RuntimeError.

    Args:
        function: a Python function or method; functions in its variables are searched, too.
    """
    found = _iterators(function)
    for variable in found:
        variable.bind(_Unreadable())
    try:
        yield
    finally:
        for variable in found:
            variable.bind(variable.value)


class IteratorWatch:
    """Raises UsageError where a loss function takes items of one iterator for several micro-batches of a step.

    In plain PyTorch a loss function is called once a step, and ``next(weights)`` gives the next item of a schedule. On
    a rank with several micro-batches it would take as many items, and the result would depend on the number of devices.
    Checked are iterators in global and enclosing variables, in steps 1 to 5, 2ᵏ and 2ᵏ + 1, and those at the turn of an
    epoch (``WatchWindows``). A loss function that takes one item a step, and keeps it for the other micro-batches, is
    accepted. Not collective.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._steps = run, 0

    def watched(self, loss: LossFn, guarded: LossFn, micro_batches: int) -> LossFn:
        """Return a loss function that raises UsageError if its calls take items of one iterator for two micro-batches.

        To be called once in each step.

        Args:
            loss: the script's loss function, whose global and enclosing variables are searched for iterators.
            guarded: the same function with other checks around it, whose result the returned function returns.
            micro_batches: number of micro-batches of this rank in the step.

        Returns:
            A function with the arguments and the result of ``guarded``, which raises UsageError after its call.
            ``guarded`` itself in a step that is not checked, and if the rank has one micro-batch, or no iterator is
            found.
        """
        self._steps += 1
        due = is_watched_step(self._steps) or self._run.lifecycle.windows.is_open
        found = _iterators(loss) if due and micro_batches > 1 else []
        if not found:
            return guarded
        taken = set[str]()

        def watch(model: Any, batch: Any) -> Any:
            counted = [(variable, _Counted(variable.read())) for variable in found]
            for variable, stand_in in counted:
                variable.bind(stand_in)
            try:
                result = guarded(model, batch)
            finally:
                for variable, stand_in in counted:
                    # The loss function may have bound the variable anew.
                    if variable.read() is stand_in:
                        variable.bind(variable.value)
            now = {variable.name for variable, stand_in in counted if stand_in.taken}
            if again := sorted(now & taken):
                self._refuse(loss, again[0])
            taken.update(now)
            return result

        return watch

    def _refuse(self, loss: LossFn, name: str) -> None:
        code = getattr(loss, "__code__", None)
        place = "the loss function" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        raise UsageError(
            f"the loss function takes an item of the iterator {name} for every micro-batch",
            where=f"step {self._run.global_step + 1}, {place}",
            why="this rank calls it for several micro-batches in turn, and one device would take one item a step",
            remedy="take the item by run.global_step from a list, or keep it as long as run.global_step is the same; or"
            f" take as many workers as data ranks ({self._run.context.mesh.data_ranks}), and no micro_batch",
        )


def _iterators(function: Any, depth: int = _DEPTH) -> list[_Variable]:
    """Return the global and enclosing variables of a function, and of functions among them, that hold iterators."""
    if isinstance(function, MethodType):
        return _iterators(function.__func__, depth)
    if isinstance(function, partial):
        return _iterators(function.func, depth)
    if not isinstance(function, FunctionType) or not depth:
        return []
    variables: list[_Variable] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        read = partial(getattr, cell, "cell_contents")
        variables.append(_Variable(name, value, read, partial(setattr, cell, "cell_contents")))
    table = function.__globals__
    for name in function.__code__.co_names:
        if name in table:
            variables.append(_Variable(name, table[name], partial(table.get, name), partial(table.__setitem__, name)))
    found = [each for each in variables if isinstance(each.value, Iterator) and not isinstance(each.value, io.IOBase)]
    for each in variables:
        if each.value is not function:
            found += _iterators(each.value, depth - 1)
    return list({(id(each.value), each.name): each for each in found}.values())
