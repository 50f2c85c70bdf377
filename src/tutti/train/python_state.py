"""Restore what a forward changes in Python's objects: a model's counters, and those that a loss function keeps."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tutti.nn.swap import buffers

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, buffers, children, hooks and the mode, which others restore."""
_DEPTH = 4
_SMALL = 1024
"""Most elements of a tensor that is restored by value, as a counter that is no buffer."""


@contextmanager
def python_state(parts: Sequence[nn.Module], function: Any) -> Iterator[None]:
    """Return a context manager that, at its end, restores attributes of modules and variables of a function.

    tutti calls models and loss functions within it where a call serves a check and must leave no trace. Restored are
    the Python attributes of the modules, and the variables that ``function`` reads with the objects in them. Each
    attribute or variable is bound again to the object that it had, and lists, dicts, sets and small tensors get back
    the elements that they had (a shallow copy). Modules that ``function`` reads get their buffers back.

    Args:
        parts: modules, whose submodules are included.
        function: a Python function, method or callable object; the functions that it reads are followed.
    """
    kept = _Kept()
    for part in parts:
        for module in part.modules():
            kept.attributes(module, _OF_MODULES)
    kept.function(function, _DEPTH)
    try:
        yield
    finally:
        for restore in kept.restores:
            restore()


def numbers(parts: Sequence[nn.Module]) -> dict[str, float]:
    """Return the attributes of modules that are Python ints or floats (no bools), such as counters of forwards.

    The checks for mistakes compare the values of two steps, to find counters that grow with each micro-batch.

    Args:
        parts: modules, whose submodules are read, too.

    Returns:
        Values by name ``{module}.{attribute}``.
    """
    return {
        f"{name}.{key}".removeprefix("."): value
        for part in parts
        for name, module in part.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class _Kept:
    """Collects functions that restore what each object holds now."""

    def __init__(self) -> None:
        self.restores: list[Callable[[], None]] = []
        self._seen = set[int]()

    def attributes(self, holder: Any, without: frozenset[str] = frozenset()) -> None:
        if id(holder) not in self._seen and hasattr(holder, "__dict__"):
            self._seen.add(id(holder))
            held = vars(holder)
            self._names(held, {name: value for name, value in held.items() if name not in without}, without)

    def _names(self, held: MutableMapping[str, Any], before: dict[str, Any], without: frozenset[str]) -> None:
        def restore() -> None:
            for name in [name for name in held if name not in without and name not in before]:
                del held[name]
            held.update(before)

        self.restores.append(restore)
        for value in before.values():
            self._contents(value)

    def function(self, function: Any, depth: int) -> None:
        if depth == 0 or id(function) in self._seen:
            return
        if isinstance(function, MethodType):
            if isinstance(function.__self__, nn.Module):
                self._module(function.__self__)
            self.attributes(function.__self__)
            self.function(function.__func__, depth)
        elif isinstance(function, partial):
            for each in (function.func, *function.args, *function.keywords.values()):
                self._value(each, depth)
        elif isinstance(function, FunctionType):
            self._seen.add(id(function))
            for cell in function.__closure__ or ():
                try:
                    value = cell.cell_contents
                except ValueError:
                    continue
                self.restores.append(partial(setattr, cell, "cell_contents", value))
                self._value(value, depth)
            variables = function.__globals__
            for name in function.__code__.co_names:
                if name in variables and not isinstance(variables[name], ModuleType):
                    self.restores.append(partial(variables.__setitem__, name, variables[name]))
                    self._value(variables[name], depth)
        elif callable(function):
            self._value(function, depth)

    def _value(self, value: Any, depth: int) -> None:
        kind = type(value)
        if isinstance(value, FunctionType | MethodType | partial):
            self.function(value, depth - 1)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif not isinstance(value, type | ModuleType | Tensor) and not kind.__module__.startswith(("torch", "tutti")):
            self.attributes(value)
            self.function(inspect.getattr_static(kind, "__call__", None), depth - 1)
        self._contents(value)

    def _module(self, value: nn.Module) -> None:
        """Keep a module that the function reads, such as a loss with a centre that its forward moves."""
        if id(value) in self._seen:
            return
        for slot in buffers([value], persistent=False):
            tensor = slot.get()
            self.restores.append(partial(slot.put, tensor))
            if _is_plain(tensor):
                self.restores.append(partial(_copy, tensor, tensor.detach().clone()))
        for module in value.modules():
            self.attributes(module, _OF_MODULES)

    def _contents(self, value: Any) -> None:
        kind = type(value)
        if id(value) in self._seen and kind not in (list, dict, set, deque):
            return
        if kind is list:
            self.restores.append(partial(value.__setitem__, slice(None), list(value)))
        elif kind in (dict, set, deque):
            self.restores.append(partial(_refill, value, kind(value)))
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and _is_small(value):
            self.restores.append(partial(_copy, value, value.detach().clone()))


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta
    return plain and not tensor.requires_grad


def _is_small(tensor: Tensor) -> bool:
    return _is_plain(tensor) and tensor.numel() <= _SMALL


def _copy(tensor: Tensor, value: Tensor) -> None:
    if not torch.equal(tensor, value):
        with torch.no_grad():
            tensor.copy_(value)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(before)
