"""Seed random generators that a data set keeps, such as ``self.rng = np.random.default_rng(0)``, for each sample."""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from tutti.data.keyed_random import hash64

_KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_MOST = 2_000
"""Largest number of objects in which generators are looked for."""
_FEW = 64
"""Largest number of elements of a list or dict in which generators are looked for: transforms, and not samples."""
_OFTEN = 8
"""First calls of ``look`` that all look; later calls look at powers of two."""
_CALLED = ("__getitem__", "__getitems__", "__call__", "__iter__")


class KeptGenerators:
    """Finds and seeds the random generators (Python's, NumPy's, PyTorch's) that a data set or its functions hold.

    Such a generator advances with every sample that is read. Each device reads other samples, so that the draws would
    depend on the number of devices. The caller calls ``look``, and then, within ``restored``,
    ``seed`` with a key of each sample before the data set makes the sample. Not collective.

    Args:
        roots: the data set, and functions that make a sample or a batch.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._found: list[Any] = []
        self._looks = 0

    def look(self) -> bool:
        """Look for random generators in the data set and its functions, at the first eight calls and calls 16, 32, ….

        Later calls look again because a data set may make a generator with its first sample; calls between do nothing.
        The other methods act on the generators that the last look has found.

        Returns:
            Whether this call has looked, and found other generators than the look before.
        """
        self._looks += 1
        if self._looks > _OFTEN and self._looks & (self._looks - 1):
            return False
        before, self._found = self._found, _generators(self._roots)
        return set(map(id, before)) != set(map(id, self._found))

    def seed(self, key: int) -> None:
        """Seed every generator that ``look`` has found, each by a hash of ``key`` and its index among them.

        To be called inside ``restored``, which gives the generators their states back.

        Args:
            key: 64-bit seed.
        """
        for place, generator in enumerate(self._found):
            _seed(generator, int(hash64(key, place)))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context manager that, at its end, restores the states of the generators that ``look`` has found."""
        states = [(generator, _state(generator)) for generator in self._found]
        try:
            yield
        finally:
            for generator, state in states:
                _restore(generator, state)

    def states(self) -> list[bytes]:
        """Return the pickled state of each generator that ``look`` has found, in order, for a comparison of states."""
        return [pickle.dumps(_state(generator)) for generator in self._found]


def _generators(roots: tuple[Any, ...]) -> list[Any]:
    """Return the generators that objects and functions reach, each once, in the order of their discovery."""
    found, seen, ahead = list[Any](), dict[int, Any](), list(roots)
    # The global generators have seeds of their own.
    of_all = [torch.default_generator, np.random.rand.__self__, random.random.__self__]  # type: ignore[attr-defined]
    while ahead and len(seen) < _MOST:
        value = ahead.pop(0)
        if id(value) in seen or any(value is each for each in of_all):
            continue
        seen[id(value)] = value
        if isinstance(value, _KINDS):
            # The system's generator has no state.
            found += [] if isinstance(value, random.SystemRandom) else [value]
        elif isinstance(value, FunctionType):
            ahead += _of_function(value)
        elif isinstance(value, MethodType | BuiltinMethodType):
            ahead += [value.__self__, getattr(value, "__func__", None)]
        elif isinstance(value, partial):
            ahead += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, Mapping):
            ahead += list(value.values())[:_FEW] if len(value) <= _FEW else []
        elif isinstance(value, list | tuple):
            ahead += value[:_FEW]
        elif isinstance(value, type):
            ahead += [each for kind in value.__mro__ for each in vars(kind).values() if isinstance(each, _KINDS)]
        elif not isinstance(value, ModuleType) and hasattr(value, "__dict__"):
            ahead += [*vars(value).values(), type(value)]
            methods = (inspect.getattr_static(type(value), name, None) for name in _CALLED)
            ahead += [method for method in methods if isinstance(method, FunctionType)]
    return found


def _of_function(function: FunctionType) -> list[Any]:
    """Return the variables that a function's code names: of functions around it and of its module."""
    around = []
    for cell in function.__closure__ or ():
        # A variable may have no value yet.
        with suppress(ValueError):
            around.append(cell.cell_contents)
    return around + [function.__globals__.get(name) for name in function.__code__.co_names]


def _seed(generator: Any, key: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(key).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(key >> 1)
    else:
        generator.seed(key & 0xFFFFFFFF)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
