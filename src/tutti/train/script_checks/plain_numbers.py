"""Python numbers that a script gives to PyTorch, which each data rank may have kept of its own samples."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tutti.comm.random_keys import mix, name_key
from tutti.errors import script_line
from tutti.python_compat import live_objects
from tutti.torch_compat import tree_leaves
from tutti.train.script_checks.followed_numbers import FollowedNumber
from tutti.train.script_checks.loss_watch import reads_values
from tutti.types.micro_batch import MicroBatch

_GENERATORS = random.Random, np.random.Generator, np.random.RandomState
_LARGEST = 1024
"""Most elements of an array whose values are compared (a guess)."""
_KINDS: tuple[Any, Any] = (float, np.floating), (float, np.floating, int, np.integer)
"""Classes of numbers without and with ints."""
_KEYS = 1 << 33
"""Smallest key of a number; those of lines are hashes of 32 bits, or negative."""


class PlainNumber(NamedTuple):
    """A Python number, or an array, that a line of the script gives to PyTorch.

    Attributes:
        line: the line, as ``FILE:LINE``.
        shapes: hash of the shapes of the batch and of all results before, in this micro-batch.
        digest: hash of the value.
    """

    line: str
    shapes: int
    digest: int


class PlainNumbers:
    """Records the numbers of a step that can differ between data ranks for one reason: ranks have kept other values.

    A number that a script computes from losses of earlier steps by ``float``, ``math``, NumPy or in an ``if`` is a
    plain number, like any constant. Two ranks whose tensors have had equal shapes so far in their micro-batches, and
    whose code has read no value of a tensor there, know nothing else of their samples. Their numbers at one line are
    then constants, draws, or kept. A number counts as kept if the line has had other ones in earlier steps, or this one
    after a read, and no generator of Python or NumPy has drawn since the watched step before. ``KeptValues``, a
    torch-function mode, makes the calls. Not collective.
    """

    def __init__(self) -> None:
        self._comparable = self._drawn = self._drew = False
        self._shapes = 0
        # By line the digests of numbers of earlier watched steps and of this one; and of those after reads.
        self._before, self._here = dict[str, set[int]](), dict[str, set[int]]()
        self._read_before, self._read_here = dict[str, set[int]](), dict[str, set[int]]()
        self._reached = set[PlainNumber]()
        # Digests of Python objects by name, and whether the loss depends on them.
        self._named = dict[str, tuple[int, bool]]()
        # Generators and their states when the watched step before, and this one, have begun.
        self._generators: list[Any] | None = None
        self._states_before, self._states = list[Any](), list[Any]()

    def begin_batch(self) -> None:
        """Begin a global batch, watched or not."""
        self._reached, self._named = set(), {}

    def begin_watched(self) -> None:
        """Begin a global batch that is watched."""
        for before, here in ((self._before, self._here), (self._read_before, self._read_here)):
            for line, digests in here.items():
                before.setdefault(line, set()).update(digests)
            here.clear()
        self._drew, self._drawn = self._drawn, False
        if self._generators is None:
            self._generators = _live_generators()
            self._states = _states(self._generators)
        self._states_before, self._states = self._states, _states(self._generators)

    def begin(self, micro_batch: MicroBatch, batch: Any) -> None:
        """Begin a micro-batch; numbers are compared if its samples are tensors, whose shapes are all that is known."""
        leaves = tree_leaves(batch)
        self._comparable = bool(micro_batch.samples) and all(isinstance(each, Tensor) for each in leaves)
        self._shapes = hash(tuple(tuple(each.shape) for each in leaves if isinstance(each, Tensor)))

    def note(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any, samples: bool) -> None:
        """Record what a call of PyTorch has told the script of its samples, right after the call.

        Args:
            name: the function's name; of no function that reads metadata.
            args, kwargs: its arguments.
            result: what it has returned.
            samples: whether the result depends on samples.
        """
        if reads_values(name, args, kwargs, result):
            self._comparable, self._drawn = False, self._drawn or not samples
        else:
            made = (tuple(each.shape) for each in tree_leaves(result) if isinstance(each, Tensor))
            self._shapes = hash((self._shapes, *made))

    def number(self, value: Any, with_ints: bool) -> PlainNumber | None:
        """Return a number among the arguments of a call, if ranks are to compare it once a loss depends on it.

        Args:
            value: an argument of any type.
            with_ints: whether ints are values, and not sizes or indices.
        """
        is_number = isinstance(value, _KINDS[with_ints]) and not isinstance(value, bool | FollowedNumber)
        digest = plain_digest(value) if is_number or isinstance(value, np.ndarray) else None
        if digest is None:
            return None
        line = script_line()
        if not self._comparable:
            self._read_here.setdefault(line, set()).add(digest)
            return None
        self._here.setdefault(line, set()).add(digest)
        return PlainNumber(line, self._shapes, digest)

    def reach(self, numbers: Iterable[PlainNumber]) -> None:
        """Record numbers on which a loss depends."""
        self._reached.update(numbers)

    def note_state(self, name: str, value: Any, reached: bool) -> None:
        """Record a Python object that has changed since the first step; see ``KeptValues.note_state``."""
        if (digest := plain_digest(value)) is not None:
            self._named[name] = digest, reached

    def digests(self) -> set[int]:
        """Return the hashes of the numbers and objects on which losses of this step depend."""
        named = {digest for digest, reached in self._named.values() if reached}
        return named.union(each.digest for each in self._reached)

    def rows(self) -> list[tuple[int, int, bool]]:
        """Return a row for each number and object: key of its line or name, hash of its value, and whether it is kept.

        Empty if this process has drawn random numbers since the watched step before.
        """
        if not (self._reached or self._named) or self._drew or self._drawn or self._has_drawn():
            return []
        rows = [(_key(each), each.digest, self._is_kept(each)) for each in self._reached]
        return rows + [(_key(PlainNumber(name, 0, 0)), *pair) for name, pair in self._named.items()]

    def line(self, key: int) -> str:
        """Return the line, or the object's name, of a row; an empty text if this rank has no such row."""
        named = (PlainNumber(name, 0, 0) for name in self._named)
        return next((each.line for each in chain(self._reached, named) if _key(each) == key), "")

    def _is_kept(self, number: PlainNumber) -> bool:
        before = self._before.get(number.line)
        is_new = before is not None and number.digest not in before
        return is_new or number.digest in self._read_before.get(number.line, ())

    def _has_drawn(self) -> bool:
        known = self._generators or []
        return _states(known) != self._states_before or len(_live_generators()) != len(known)


def is_number_key(key: int) -> bool:
    """Return whether the key of a row is that of a number, and not of a line of ``KeptValues``, which is smaller."""
    return key >= _KEYS


def plain_digest(value: Any) -> int | None:
    """Return a hash of a number, an array of numbers or a container of numbers; None of other and of large objects."""
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.size <= _LARGEST else None
    leaves, keys = tree_leaves(list(value) if isinstance(value, deque) else value), ""
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        leaves, keys = tree_leaves(list(value.values())), repr(list(value))
    numbers = [each for each in leaves if isinstance(each, _KINDS[True])]
    is_plain = 0 < len(leaves) == len(numbers) <= _LARGEST
    return name_key(keys + repr(list(map(float, numbers)))) if is_plain else None


def _key(number: PlainNumber) -> int:
    return _KEYS + mix(name_key(number.line), number.shapes) % _KEYS


def generators_hash() -> int:
    """Return a hash of the states of Python's and NumPy's global generators."""
    return hash((random.getstate(), repr(np.random.get_state(legacy=False)["state"])))


def _live_generators() -> list[Any]:
    """Return the generators of Python and NumPy that this process has made, besides the global ones."""
    found = [each for kind in _GENERATORS for each in live_objects(kind)]
    return [each for each in found if not isinstance(each, random.SystemRandom)]


def _states(generators: Iterable[Any]) -> list[Any]:
    return [generators_hash(), *(pickle.dumps(_state(each)) for each in generators)]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    is_old = isinstance(generator, np.random.RandomState)
    return generator.get_state(legacy=False) if is_old else generator.bit_generator.state
