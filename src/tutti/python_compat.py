"""Private names of CPython that tutti uses, each with its reason, and what its garbage collector knows.

No other module of the package may use a private name; ``tests/test_python_compat.py`` touches every name of
``__all__``. This module loads no torch, for the launcher and its processes; private names of PyTorch are in
``torch_compat.py``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import random
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby, starmap
from types import (
    BuiltinFunctionType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, Generic, TypeVar

__all__ = [
    "LiveObjects",
    "PublicGeneratorState",
    "calling_frame",
    "forget_exit_handlers",
    "generator_memory",
    "holders_of",
    "import_uncollected",
    "join_threads",
    "local_variables",
    "run_exit_handlers",
]

_T = TypeVar("_T")

calling_frame = sys._getframe
"""Return the frame ``depth`` calls up the stack. Documented as specific to CPython; the public ``inspect.stack()``
reads source files at each call."""


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return the local and enclosing variables of a running function by name; empty for a module or a class body.

    Before Python 3.13 a frame keeps the dict that ``f_locals`` makes, and with it objects that the function deletes
    later. This function empties that dict, unless the script has it, too, from ``locals()``.

    Args:
        frame: frame of the function.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    table = frame.f_locals
    found = dict(table)
    # The frame, the variable here and the argument of getrefcount refer to it.
    if type(table) is dict and sys.getrefcount(table) <= 3:
        table.clear()
    return found


class PublicGeneratorState:
    """Position and words of Python's global random generator, by ``random.getstate`` and ``random.setstate``.

    ``generator_memory`` is such an object in a Python whose generator object has another memory layout than CPython's.
    """

    @property
    def raw(self) -> bytes:
        """Position and words of the generator: 625 unsigned integers of 32 bits. Assign them to set the generator.

        Setting also drops the second number of a pair of normal draws, which the generator may hold.
        """
        *words, position = random.getstate()[1]
        return array("I", (position, *words)).tobytes()

    @raw.setter
    def raw(self, state: bytes) -> None:
        position, *words = array("I", state)
        random.setstate((3, (*words, position), None))


def _generator_memory() -> Any:
    """Return the memory of Python's generator as a ctypes array, if its object has this layout."""
    public, generator = PublicGeneratorState(), random.random.__self__  # type: ignore[attr-defined]
    kind: Any = random.Random.__base__
    if sys.implementation.name != "cpython" or kind.__basicsize__ - object.__basicsize__ not in (2500, 2504):
        return public
    memory = (ctypes.c_char * 2500).from_address(id(generator) + object.__basicsize__)
    return memory if memory.raw == public.raw else public


generator_memory = _generator_memory()
"""Position and words of Python's global random generator (attribute ``raw``), for reading and writing.

The state of a ``_random.Random`` follows the head of its object. The public ``random.getstate()`` makes an int of each
word, which takes 50 times as long; it is taken where the object has another layout, which is found out once. What
``random.gauss`` keeps for its next call is an attribute of the object."""


def forget_exit_handlers() -> None:
    """Remove all functions registered with ``atexit`` from this process, without calling them.

    A forked process calls this, because it inherits its parent's functions. The public ``atexit.unregister`` removes
    one function, which the caller must have.
    """
    atexit._clear()


def run_exit_handlers() -> None:
    """Call and remove the functions registered with ``atexit``, the one registered last first.

    An exception of a function is printed to stderr and not raised, and the other functions are still called. For use
    before a process ends by ``os._exit``, which skips these functions.
    """
    atexit._run_exitfuncs()


def import_uncollected(names: Iterable[str]) -> None:
    """Import modules with Python's garbage collector suspended.

    The objects of a module stay for good, and each full collection during the import of torch visits all of them. The
    collector is on again afterwards, also after an error, if it was on before.

    Args:
        names: full names of the modules, imported in this order.

    Raises:
        ImportError: a module cannot be imported. Other errors of a module's code pass through.
    """
    with _uncollected():
        for name in names:
            importlib.import_module(name)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Return a context manager in which no garbage is collected unless by a call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def join_threads() -> None:
    """Wait until all threads but daemons and the calling one have ended, as Python does at the end of a program.

    Executors of ``concurrent.futures`` are shut down first, so that their idle threads end, too; ``Thread.join`` would
    wait forever for these. ``multiprocessing`` calls the same function in its children. To be called in the main
    thread, once, before the process ends.
    """
    threading._shutdown()  # type: ignore[attr-defined]


class LiveObjects(Generic[_T]):
    """Finds all objects of some classes in this process that the garbage collector tracks.

    The garbage collector tracks instances of Python classes and containers, but no ints or strings. ``all`` searches
    the objects of all generations of the collector, which takes a tenth of a second once PyTorch is loaded, and keeps
    weak references to the objects that it finds; one search serves all ``LiveObjects`` of the process. The next call of
    ``all`` searches only the two younger generations, which have the newer objects, unless the collector has moved
    objects into the oldest generation in between.

    Args:
        kinds: the classes; objects of their subclasses are included.
    """

    def __init__(self, *kinds: type[_T]) -> None:
        self._kinds = kinds
        self._known: dict[int, Callable[[], _T | None]] = {}
        self._moves: tuple[int, ...] = ()
        _SEARCHES.add(self)

    def all(self) -> list[_T]:
        """Return the objects of the constructor's classes that exist now, as a list in no particular order.

        The list keeps the objects alive. Objects that the garbage collector does not track are missing.
        """
        if self._moves == _collections():
            self._keep(_tracked((0, 1), self._kinds))
        if self._moves != (moves := _collections()):
            found = _tracked((0, 1, 2), tuple(kind for each in _SEARCHES for kind in each._kinds))
            for each in _SEARCHES:
                each._keep(found)
                each._moves = moves
        known = {key: item for key, reference in self._known.items() if (item := reference()) is not None}
        self._known = {key: self._known[key] for key in known}
        return list(known.values())

    def _keep(self, found: list[Any]) -> None:
        """Keep references to the objects of the own classes that do not keep them alive."""
        self._known |= {id(item): _reference(item) for item in found if issubclass(type(item), self._kinds)}


class _Unreferenced(Generic[_T]):
    """Acts as a weak reference to an object whose class has none, as those of numpy.random.

    It keeps the object until a call finds that nothing else does. An object that refers to itself stays for good.
    """

    def __init__(self, item: _T) -> None:
        self._item = item

    def __call__(self) -> _T | None:
        # One reference is this attribute, the other one the argument.
        return self._item if sys.getrefcount(self._item) > 2 else None


def _reference(item: _T) -> Callable[[], _T | None]:
    try:
        return weakref.ref(item)
    except TypeError:
        return _Unreferenced(item)


def _tracked(generations: Iterable[int], kinds: tuple[type, ...]) -> list[Any]:
    """Return the objects of some classes in generations of the garbage collector."""
    others = _objects(generations, _COMMON)
    present = {each for each in set(map(type, others)) if issubclass(each, kinds)}
    return [each for each in others if type(each) in present] if present else []


def holders_of(objects: Sequence[Any], depth: int) -> list[Any]:
    """Return lists, dicts, cells and instances of this process that refer to some objects, or to tuples of them.

    Tuples themselves, functions and classes are no results. The search takes tenths of a second once PyTorch is loaded.

    Args:
        objects: the objects.
        depth: 1: holders of the objects themselves; 2: also holders of tuples with the objects; 3: also holders of
            tuples of such tuples.
    """
    ids = frozenset(map(id, objects))
    return [each for each in _objects((0, 1, 2), _NO_HOLDERS) if _refers(each, ids, depth)]


def _refers(holder: Any, ids: frozenset[int], depth: int) -> bool:
    held = gc.get_referents(holder)
    if not ids.isdisjoint(map(id, held)):
        return True
    return depth > 1 and any(_refers(each, ids, depth - 1) for each in held if type(each) is tuple)


def _objects(generations: Iterable[int], left_out: Mapping[type, Iterable[Any]]) -> list[Any]:
    """Return the objects in generations of the garbage collector, but for those of some classes, as of tuples.

    No bytecode runs while a list of all objects exists, so that no other thread goes on meanwhile. A thread that is
    building a tuple from an iterator, as a background save does, would fail with SystemError: the collector tracks the
    tuple already, and CPython resizes no tuple to which something else refers. A collection would run finalizers.
    """
    with _uncollected():
        objects = chain(chain.from_iterable(map(gc.get_objects, generations)), (None,))
        # Runs of objects of one class: an empty tuple stands for a run that is left out.
        runs: Iterable[Any] = starmap(left_out.get, groupby(objects, type))
        return list(chain.from_iterable(runs))


def _collections() -> tuple[int, ...]:
    """Return how often the collector has moved objects into its oldest generation, or collected that."""
    return tuple(generation["collections"] for generation in gc.get_stats()[1:])


_COMMON: dict[type, Iterable[Any]] = dict.fromkeys(
    (
        *(tuple, dict, list, set, frozenset, type, property, classmethod, staticmethod, weakref.ref, NoneType),
        *(FunctionType, CellType, BuiltinFunctionType, MethodType, ModuleType, GenericAlias, UnionType),
        *(GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType, MappingProxyType),
        *(FrameType, GeneratorType, CoroutineType),
    ),
    (),
)
"""Classes of most objects of a process, which are none that are searched for: each with no objects.

Objects that code may be building without other references are among these, such as tuples.
"""
_NO_HOLDERS = {kind: none for kind, none in _COMMON.items() if kind not in (list, dict, CellType)}

_SEARCHES = weakref.WeakSet[LiveObjects[Any]]()
"""All ``LiveObjects`` of this process."""
