"""Restore the Python objects that a forward changes: counters of a model, and values that a loss function keeps."""

from __future__ import annotations

import inspect
import operator
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tutti.comm.current_session import collectives_refused
from tutti.data.global_generators import own_generators
from tutti.nn.ac_and_compile import plain_forward
from tutti.nn.swap import buffers, copied_buffers
from tutti.nn.untraced import hook_tables
from tutti.nn.written_tensors import parameters_unwritten
from tutti.torch_compat import storage_key

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, buffers, children and the mode, which others restore, and hooks."""
_DEPTH = 4
_SMALL = 1024
"""Most elements of a tensor or array that is restored by value, as a counter that is no buffer."""
_FEW = 64
"""Most elements of a list or dict whose own elements are restored, too."""
_MISSING = object()


@contextmanager
def python_state(parts: Sequence[nn.Module], function: Any) -> Iterator[None]:
    """Return a context manager that, at its end, restores attributes of modules and variables of a function.

    tutti calls models and loss functions within it where a call serves a check and must leave no trace. Restored are
    the Python attributes and hooks of the modules; the global and enclosing variables that their forwards and
    ``function`` read, with the elements of lists, dicts, sets, and of tensors and arrays of up to 1,024 elements there;
    random generators among these; and buffers of modules that ``function`` reads.

    Args:
        parts: modules, whose submodules are included.
        function: a Python function, method or callable object; the functions that it reads are followed.
    """
    kept = PythonState(parts, function)
    try:
        yield
    finally:
        kept.restore()


@contextmanager
def trial_call(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context manager for a call of modules or of a loss function that serves a check, without gradients.

    At its end buffers, and the global random generators of Python, NumPy and PyTorch, have their former values. Python
    objects are left to ``python_state`` and ``PythonState``.

    Args:
        parts: modules that the call may run, whose submodules are included.

    Raises:
        ParameterWriteError: within the context a parameter of the modules is written.
        UsageError: within the context a collective is called, which this rank would wait in alone.
    """
    with own_generators(), torch.no_grad(), collectives_refused(), parameters_unwritten(parts), copied_buffers(parts):
        yield


def numbers(parts: Sequence[nn.Module]) -> dict[str, float]:
    """Return the attributes of modules that are Python ints or floats (no bools), such as counters of forwards.
    Args:
        parts: modules, whose submodules are read, too.

    Returns:
        Values by name ``{module}.{attribute}``.
    """
    return {
        f"{name}.{key}".removeprefix("."): value
        for part in parts
        for name, module in part.named_modules()
        for key, value in numbers_of(module).items()
    }


def numbers_of(module: nn.Module) -> dict[str, float]:
    """Return the attributes of one module that are Python ints or floats (no bools), by name; not its submodules'."""
    found = vars(module).items()
    return {key: value for key, value in found if isinstance(value, int | float) and not isinstance(value, bool)}


class Change(NamedTuple):
    """A Python object whose value has changed since a snapshot (``PythonState``) was taken.

    Attributes:
        name: ``{class}.{attribute}`` for an attribute, the variable's name for a variable or a container that it holds.
        restore: gives the object alone its former value.
        value: the present value; of a container its elements.
    """

    name: str
    restore: Callable[[], None]
    value: Any


class PythonState:
    """Snapshot of the Python objects that a model's forward and a loss function may change.

    Recorded are the Python attributes and hooks of the modules, and the variables that their forwards and ``function``
    read, with the objects in them. ``restore`` binds each attribute or variable again to the object that it had, and
    gives lists, dicts, sets, small tensors and arrays their former elements, and random generators their states.
    Modules that ``function`` reads get their buffers back.

    Args:
        parts: modules, whose submodules are included.
        function: a Python function, method or callable object; the functions that it reads are followed.
    """

    def __init__(self, parts: Sequence[nn.Module], function: Any) -> None:
        self._restores: list[Callable[[], None]] = []
        self._changes: list[Callable[[], Iterable[Change]]] = []
        # Random generators: name, object and state.
        self._generators: list[tuple[str, Any, Any]] = []
        self._seen = set[int]()
        # A script's attribute may be a view of a parameter, such as the ``weight`` that ``spectral_norm`` sets.
        self._parameters = {storage_key(p) for part in parts for p in part.parameters() if _has_storage(p)}
        for part in parts:
            for module in part.modules():
                self._attributes_and_hooks(module)
        self._function(function, _DEPTH)

    def restore(self, generators: bool = True) -> None:
        """Restore the values that all objects had when this snapshot was made.

        Args:
            generators: whether random generators in the objects get back their states, too.
        """
        for restore in self._restores:
            restore()
        for _, generator, state in self._generators if generators else ():
            _set_state(generator, state)

    def changed(self) -> list[str]:
        """Return the names of attributes and variables that have another value than when this snapshot was made.

        Buffers of modules and the states of random generators are not compared.

        Returns:
            Each name once: ``{class}.{attribute}`` for an attribute, the variable's name for a variable or a container
            that it holds. Empty if nothing has changed.
        """
        return list(dict.fromkeys(change.name for change in self.changes()))

    def drawn(self) -> list[str]:
        """Return the names of variables and attributes with a random generator that has drawn since the snapshot."""
        return [name for name, generator, state in self._generators if _digest(_state(generator)) != _digest(state)]

    def changes(self) -> list[Change]:
        """Return the objects that have another value than when this snapshot was made.

        Buffers of modules and the states of random generators are not compared.

        Returns:
            A list with a ``Change`` for each: ``name`` (``{class}.{attribute}``, or the variable's name), ``value``
            (the present one) and ``restore`` (a function that gives this object alone its former value).
        """
        return [change for changes in self._changes for change in changes()]

    def _attributes_and_hooks(self, module: nn.Module) -> None:
        """Record the attributes and hooks of a module, and the variables these and its forward read; no submodules'."""
        self._attributes(module, _DEPTH, _OF_MODULES)
        if is_of_script(type(module)):
            self._function(plain_forward(module), _DEPTH)
        for table in hook_tables(module).values():
            self._restores.append(partial(_refill, table, dict(table)))
            for hook in list(table.values()):
                if _is_hook_of_script(hook):
                    self._value(hook, _DEPTH, "a hook")

    def _attributes(self, holder: Any, depth: int, without: frozenset[str] = frozenset()) -> None:
        if id(holder) not in self._seen and hasattr(holder, "__dict__"):
            self._seen.add(id(holder))
            held = vars(holder)
            before = {name: value for name, value in held.items() if name not in without}
            self._names(held, before, without, f"{type(holder).__name__}.")
            for name, value in before.items():
                self._value(value, depth - 1, f"{type(holder).__name__}.{name}")

    def _names(self, held: MutableMapping[str, Any], before: dict[str, Any], without: frozenset[str], of: str) -> None:
        def restore() -> None:
            for name in [name for name in held if name not in without and name not in before]:
                del held[name]
            held.update(before)

        def undo(name: str) -> None:
            if name in before:
                held[name] = before[name]
            else:
                held.pop(name, None)

        def change() -> Iterator[Change]:
            for name in [name for name in {**before, **held} if name not in without]:
                if held.get(name, _MISSING) is not before.get(name, _MISSING):
                    yield Change(f"{of}{name}", partial(undo, name), held.get(name))

        self._restores.append(restore)
        self._changes.append(change)

    def _function(self, function: Any, depth: int) -> None:
        if depth == 0 or id(function) in self._seen:
            return
        if isinstance(function, MethodType):
            if isinstance(function.__self__, nn.Module):
                self._module(function.__self__)
            # Not those of tutti, which a model's replaced call leads to.
            if is_of_script(type(function.__self__)):
                self._attributes(function.__self__, depth)
            self._function(function.__func__, depth)
        elif isinstance(function, partial):
            for each in (function.func, *function.args, *function.keywords.values()):
                self._value(each, depth, "an argument")
        elif isinstance(function, FunctionType):
            self._seen.add(id(function))
            variables = function.__globals__
            # A wrapper, such as that of torch.compile, leads to the script's function; its variables are no script's.
            own = _is_module_of_script(variables.get("__name__", ""))
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                try:
                    value = cell.cell_contents
                except ValueError:
                    continue
                if own:
                    restore: Callable[[], None] = partial(setattr, cell, "cell_contents", value)
                    self._restores.append(restore)
                    self._changes.append(_rebound(name, value, partial(getattr, cell, "cell_contents", None), restore))
                self._value(value, depth, name)
            for name in function.__code__.co_names if own else ():
                if name in variables and not isinstance(variables[name], ModuleType):
                    value = variables[name]
                    restore = partial(variables.__setitem__, name, value)
                    self._restores.append(restore)
                    self._changes.append(_rebound(name, value, partial(variables.get, name), restore))
                    self._value(value, depth, name)
        elif callable(function):
            self._value(function, depth, "the loss function")

    def _value(self, value: Any, depth: int, name: str) -> None:
        kind = type(value)
        if isinstance(value, FunctionType | MethodType | partial):
            self._function(value, depth - 1)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif depth > 0 and is_of_script(kind):
            self._attributes(value, depth)
            self._function(inspect.getattr_static(kind, "__call__", None), depth - 1)
        self._contents(value, depth, name)

    def _module(self, value: nn.Module) -> None:
        """Record a module that the function reads, such as a loss with a centre that its forward moves."""
        if id(value) in self._seen:
            return
        for slot in buffers([value], persistent=False):
            tensor = slot.get()
            self._restores.append(partial(slot.put, tensor))
            if _is_plain(tensor):
                self._restores.append(partial(_copy, tensor, tensor.detach().clone()))
        for module in value.modules():
            self._attributes_and_hooks(module)

    def _contents(self, value: Any, depth: int, name: str) -> None:
        kind = type(value)
        if kind in (list, dict, set, deque):
            if id(value) in self._seen:
                return
            self._seen.add(id(value))
            before = kind(value)
            refill = partial(value.__setitem__, slice(None)) if kind is list else partial(_refill, value)
            self._record(name, value, partial(refill, before), lambda: _holds(value, before))
            if kind is not set and len(value) <= _FEW and depth > 0:
                for each in value.values() if kind is dict else value:
                    self._value(each, depth - 1, name)
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and _is_small(value):
            if storage_key(value) in self._parameters:
                return
            then = value.detach().clone()
            self._record(name, value, partial(_copy, value, then), lambda: torch.equal(value, then))
        elif kind is np.ndarray and value.size <= _SMALL and not value.dtype.hasobject and value.flags.writeable:
            array = value.copy()
            same = partial(np.array_equal, value, array, equal_nan=False)
            self._record(name, value, partial(np.copyto, value, array), same)
        elif isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
            self._generators.append((name, value, _state(value)))

    def _record(self, name: str, value: Any, restore: Callable[[], None], same: Callable[[], bool]) -> None:
        """Record an object whose contents may change: how to restore it, and how to see whether it has changed."""
        self._restores.append(restore)
        self._changes.append(lambda: () if same() else (Change(name, restore, value),))


def is_of_script(kind: type) -> bool:
    """Return whether objects of a type are a script's own, judged by the module that defines the type.

    False for types of Python's standard library, NumPy, PyTorch and tutti, and for Python modules, classes and
    tensors; True for all others, such as those of the script's other libraries, and for ``types.SimpleNamespace``.

    Args:
        kind: the type.
    """
    return kind is SimpleNamespace or (
        not issubclass(kind, type | ModuleType | Tensor) and _is_module_of_script(kind.__module__)
    )


def _is_hook_of_script(hook: Any) -> bool:
    """Return whether a hook is a function, method or object of the script, and none of PyTorch or tutti."""
    while isinstance(hook, partial):
        hook = hook.func
    is_function = isinstance(hook, FunctionType | MethodType)
    return _is_module_of_script(hook.__module__) if is_function else is_of_script(type(hook))


@cache
def _is_module_of_script(name: str) -> bool:
    root = name.split(".")[0]
    return root not in sys.stdlib_module_names - {"__main__"} and not root.startswith(("torch", "tutti", "numpy"))


def _rebound(
    name: str, value: Any, now: Callable[[], Any], restore: Callable[[], None]
) -> Callable[[], Iterable[Change]]:
    """Return a function that returns a variable's change if it has another object than ``value``."""
    return lambda: () if (found := now()) is value else (Change(name, restore, found),)


def _holds(container: Any, before: Any) -> bool:
    """Return whether a container holds the same objects as a shallow copy that was made of it."""
    if isinstance(container, set):
        return bool(container == before)
    # Without Python code for each element: the container may be a vocabulary or a list of samples.
    same = len(container) == len(before) and all(map(operator.is_, container, before))
    return same and (not isinstance(container, dict) or all(map(operator.is_, container.values(), before.values())))


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta
    return plain and not tensor.requires_grad


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) is nn.Parameter and tensor.layout == torch.strided and not tensor.is_meta


def _is_small(tensor: Tensor) -> bool:
    return _is_plain(tensor) and tensor.numel() <= _SMALL


def _copy(tensor: Tensor, value: Tensor) -> None:
    if not torch.equal(tensor, value):
        with torch.no_grad():
            tensor.copy_(value)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(before)


def _state(generator: Any) -> Any:
    """Return the state of a random generator of PyTorch, Python or NumPy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _digest(state: Any) -> bytes:
    """Return bytes by which two states of one generator can be compared."""
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)
