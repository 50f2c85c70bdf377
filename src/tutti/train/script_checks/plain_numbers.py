"""Record the Python numbers that a script gives to PyTorch, as each data rank may have kept them of its own samples."""

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
from tutti.nn.global_draws import draws_marker
from tutti.python_compat import LiveObjects
from tutti.torch_compat import tree_leaves
from tutti.train.script_checks.followed_numbers import FollowedNumber
from tutti.train.script_checks.loss_watch import reads_values
from tutti.train.script_checks.script_source import script_values
from tutti.types.micro_batch import MicroBatch

_GENERATORS = LiveObjects[Any](random.Random, np.random.Generator, np.random.RandomState)
_LARGEST = 1024
"""Most elements of an array whose values are compared (a guess)."""
_KINDS: tuple[Any, Any] = (float, np.floating), (float, np.floating, int, np.integer)
"""Classes of numbers without and with ints."""
_NUMERIC = (*_KINDS[True], np.ndarray)
_KEYS = 1 << 33
"""Smallest key of a number; those of lines are hashes of 32 bits, or negative."""


class PlainNumber(NamedTuple):
    """A Python number, or a NumPy array, that a line of the script has passed to PyTorch.

    Attributes:
        line: the line, as ``FILE:LINE``.
        shapes: hash of the shapes of the batch and of all results of PyTorch so far in this micro-batch; of the batch
            alone for a number of samples, which may decide other shapes; 0 where they do not count, as the script had
            the number before the micro-batch.
        digest: hash of the value.
        of_samples: whether the code may have computed it from values of all samples of the present micro-batch.
    """

    line: str
    shapes: int
    digest: int
    of_samples: bool = False


class PlainNumbers:
    """Records Python numbers that data ranks compare, to find ranks that have kept values of their own samples.

    A number that a script computes by ``float``, ``math`` or NumPy from losses of earlier steps looks to PyTorch like
    any constant. Ranks compare numbers that differ only because of kept values or random draws: numbers at the same
    line of the script, if the micro-batch's tensors have had equal shapes so far and the code has read no value of a
    tensor; and numbers that the script had in variables before the micro-batch. A number counts as kept if its line had
    other numbers in earlier steps, if it had this one after a read of a tensor's value, or if the line is new at the
    turn of an epoch. Nothing is compared if a generator of Python or NumPy has drawn since the watched step before.
    ``CrossStepWatch``, a torch-function mode, makes the calls. Not collective.
    """

    def __init__(self) -> None:
        self._comparable = self._drawn = self._drew = self._turn = False
        # Hashes of the shapes of the batch and of all results so far, and of the batch alone.
        self._shapes = self._shapes_of_batch = 0
        # Numbers that the script had before the code for the present micro-batch, by identity.
        self._there: dict[int, Any] = {}
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
        """Begin a global batch: forget the numbers and objects that losses of the batch before depend on.

        Called for every global batch; ``begin_watched`` follows for those of which calls of PyTorch are recorded.
        """
        self._reached, self._named = set(), {}

    def begin_watched(self, turn: bool) -> None:
        """Begin a global batch whose calls of PyTorch are recorded; to be called after ``begin_batch``.

        The numbers recorded in the last such batch join those of earlier ones, with which numbers of this batch are
        compared. The states of Python's and NumPy's generators are recorded, to find out whether code draws from them.

        Args:
            turn: whether the batch is at the turn of an epoch, where numbers of new lines count as kept, too.
        """
        self._turn = turn
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
        """Begin a micro-batch of a global batch whose Python numbers are recorded to compare them over ranks.

        Args:
            micro_batch: the micro-batch; the numbers of one without samples are not compared.
            batch: its samples; numbers are not compared if a leaf is no tensor.
        """
        leaves = tree_leaves(batch)
        self._comparable = bool(micro_batch.samples) and all(isinstance(each, Tensor) for each in leaves)
        self._shapes = hash(tuple(tuple(each.shape) for each in leaves if isinstance(each, Tensor)))
        self._shapes_of_batch = self._shapes
        self._there = {id(each): each for each in script_values() if _has_identity(each)}

    def note(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any, samples: bool) -> None:
        """Record, right after a call of PyTorch, whether its result reveals values to the script, or else its shapes.

        Once a call has revealed values, the Python numbers that the script makes in this micro-batch are no longer
        compared over ranks, as they may come from these values. Numbers are compared only after equal shapes.

        Args:
            name: the function's name; functions that read metadata alone, such as ``size``, must not be passed.
            args, kwargs: its arguments.
            result: what it has returned.
            samples: whether the result depends on samples. If it does not, and reveals values, it counts as a random
                draw.
        """
        if reads_values(name, args, kwargs, result):
            self._comparable, self._drawn = False, self._drawn or not samples
        else:
            made = (tuple(each.shape) for each in tree_leaves(result) if isinstance(each, Tensor))
            self._shapes = hash((self._shapes, *made))

    def number(self, value: Any, with_ints: bool, of_samples: bool) -> PlainNumber | None:
        """Record a number among the arguments of a call of PyTorch, with the script's line that makes the call.

        Args:
            value: an argument of any type; numbers and small arrays are recorded, bools are not.
            with_ints: whether the function takes ints as values, as additions do. False where its ints are sizes or
                indices; ints are then not recorded.
            of_samples: whether the code has read values of all samples of this micro-batch, and no others.

        Returns:
            The number with its line, for ``reach`` once a loss depends on it. None if ``value`` is not recorded. None
            also if ranks cannot compare the number, as it may come from this micro-batch's samples: the script did not
            have it before the micro-batch, and its code has read values of a tensor there that are not of all samples,
            or the batch has leaves that are no tensors. A float after values of all samples has ``of_samples`` set.
        """
        is_number = isinstance(value, _KINDS[with_ints]) and not isinstance(value, bool | FollowedNumber)
        digest = plain_digest(value) if is_number or isinstance(value, np.ndarray) else None
        if digest is None:
            return None
        line, known = script_line(), self._there.get(id(value)) is value
        if not (self._comparable or known):
            self._read_here.setdefault(line, set()).add(digest)
            is_value = of_samples and not isinstance(value, int | np.integer)
            return PlainNumber(line, self._shapes_of_batch, digest, of_samples=True) if is_value else None
        self._here.setdefault(line, set()).add(digest)
        # A number from before depends on no shape of this micro-batch.
        return PlainNumber(line, 0 if known and (self._turn or not self._comparable) else self._shapes, digest)

    def number_of_samples(self, value: float) -> PlainNumber:
        """Return the record of a Python number that was computed from values of all samples of the micro-batch.

        The record has the script's present line; ``reach`` takes it once a loss depends on the number.

        Args:
            value: the number.
        """
        return PlainNumber(script_line(), self._shapes_of_batch, name_key(repr([float(value)])), of_samples=True)

    def reach(self, numbers: Iterable[PlainNumber]) -> None:
        """Record that a loss of this step depends on numbers, which ``rows`` then returns for a comparison over ranks.

        Args:
            numbers: results of the method ``number`` in this step.
        """
        self._reached.update(numbers)

    def note_state(self, name: str, value: Any, reached: bool) -> None:
        """Record a Python object that has changed since the first step, to be compared over ranks.

        Args:
            name: the object, for an error message; equal on all ranks.
            value: its value; ranks compare its hash by ``plain_digest``. A value without a hash, as it is no number,
                array or container of numbers, is not recorded.
            reached: whether the loss depends on it.
        """
        if (digest := plain_digest(value)) is not None:
            self._named[name] = digest, reached

    def digests(self) -> set[int]:
        """Return a hash of each recorded Python number or object on which a loss of this step depends, as a set.

        Ranks compare them: a difference shows that a rank has kept values of its own samples.
        """
        named = {digest for digest, reached in self._named.values() if reached}
        return named.union(each.digest for each in self._reached)

    def rows(self) -> list[tuple[int, int, bool]]:
        """Return what ranks compare: a row for each Python number on which losses of this step depend, and each object.

        Numbers are those that were given to ``reach``, objects those that were given to ``note_state`` in this step.

        Returns:
            A list of tuples (key, digest, flag); empty if this process has drawn from a random generator since the
            watched step before. Of a number: key is a hash of the script's line and of the shapes seen before it in the
            micro-batch; digest, a hash of its value; flag, whether it counts as kept from earlier steps (the line has
            had numbers in earlier watched steps, but not this one; or it had this one there after a read of values), or
            is of the present samples. Of an object: a hash of its name; a hash of its value; whether the loss depends
            on it.
        """
        if not (self._reached or self._named) or self._drew or self._drawn or self._has_drawn():
            return []
        rows = [(_key(each), each.digest, self._is_kept(each)) for each in self._reached]
        return rows + [(_key(PlainNumber(name, 0, 0)), *pair) for name, pair in self._named.items()]

    def line(self, key: int) -> str:
        """Return the script's line, as ``FILE:LINE``, or the name of the object that a row of ``rows`` describes.

        An empty text if this rank has recorded no such number or object.

        Args:
            key: the first element of a tuple that ``rows`` has returned on this rank or another one.
        """
        named = (PlainNumber(name, 0, 0) for name in self._named)
        return next((each.line for each in chain(self._reached, named) if _key(each) == key), "")

    def _is_kept(self, number: PlainNumber) -> bool:
        if number.of_samples:
            return True
        before = self._before.get(number.line)
        is_new = self._turn if before is None else number.digest not in before
        return is_new or number.digest in self._read_before.get(number.line, ())

    def _has_drawn(self) -> bool:
        known = self._generators or []
        return _states(known) != self._states_before or len(_live_generators()) != len(known)


def _has_identity(value: Any) -> bool:
    """Return whether a value is a number or a small array that is an object of its own, unlike small ints."""
    if not isinstance(value, _NUMERIC) or isinstance(value, bool | FollowedNumber):
        return False
    if isinstance(value, np.ndarray):
        return value.size <= _LARGEST
    return isinstance(value, _KINDS[False]) or abs(value) > 256


def is_number_key(key: int) -> bool:
    """Return whether a row that ranks compare is of a Python number or object (``PlainNumbers.rows``), or of a tensor.

    Args:
        key: the row's first element, an int that is at least 2³³ for numbers and objects, and smaller for the tensors
            of ``CrossStepWatch``.
    """
    return key >= _KEYS


def is_key_of_samples(key: int) -> bool:
    """Return whether a row that ranks compare is of a number that was computed from the present samples.

    Args:
        key: the row's first element.
    """
    return key >= 2 * _KEYS


def plain_digest(value: Any) -> int | None:
    """Return a hash of a number, an array or a container of numbers; None for everything else.

    Containers are lists, tuples, deques and dicts, also nested. An array or container is hashed if it has 1 to 1,024
    elements, all of them numbers.

    Args:
        value: the object.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.size <= _LARGEST else None
    leaves, keys = tree_leaves(list(value) if isinstance(value, deque) else value), ""
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        leaves, keys = tree_leaves(list(value.values())), repr(list(value))
    numbers = [each for each in leaves if isinstance(each, _KINDS[True])]
    is_plain = 0 < len(leaves) == len(numbers) <= _LARGEST
    return name_key(keys + repr(list(map(float, numbers)))) if is_plain else None


def _key(number: PlainNumber) -> int:
    return (1 + number.of_samples) * _KEYS + mix(name_key(number.line), number.shapes) % _KEYS


def generator_states() -> list[Any]:
    """Return the states of all generators of Python and NumPy in this process, to compare them with later ones.

    A search of all objects of the process, which takes a tenth of a second at first (``LiveObjects``).
    """
    return _states(_live_generators())


def _live_generators() -> list[Any]:
    """Return the generators of Python and NumPy that this process has made, besides the global ones."""
    return [each for each in _GENERATORS.all() if not isinstance(each, random.SystemRandom)]


def _states(generators: Iterable[Any]) -> list[Any]:
    return [draws_marker(), *(pickle.dumps(_state(each)) for each in generators)]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    is_old = isinstance(generator, np.random.RandomState)
    return generator.get_state(legacy=False) if is_old else generator.bit_generator.state
