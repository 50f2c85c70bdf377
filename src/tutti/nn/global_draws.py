"""Draws from the global generators of Python and NumPy within a step, keyed by micro-batch as PyTorch's own are."""

from __future__ import annotations

import ctypes
import random
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from tutti.python_compat import generator_memory

Slot: TypeAlias = tuple[int, int]
"""Logical worker (fixed share of the global batch) and index of the micro-batch within it."""

Words: TypeAlias = tuple[bytes, bytes]
"""Words and positions of Python's generator and of NumPy's."""

_SIZE = 2500
"""Bytes of words and position of a Mersenne Twister."""
_NORMALS = 4
"""Numbers that say whether half of a pair of normal draws is left, and which: of Python, then of NumPy."""
PACKED = 2 * _SIZE + 8 * _NORMALS
"""Elements of a tensor of ``GlobalDraws.packed``."""


class GeneratorStates(NamedTuple):
    """States of the global random generators of Python (``random``) and NumPy (``np.random``).

    Attributes:
        words: words and position of the Mersenne Twister of Python, and of NumPy's, as bytes.
        made_by: the key by which both generators were seeded; or else their states, as Python and NumPy return them.
        paired: whether a generator still holds the second number of a pair of normal draws, which ``words`` do not
            show.
    """

    words: Words
    made_by: Any
    paired: bool = False


class GlobalDraws:
    """Seeds the global generators of Python (``random``) and NumPy (``np.random``) by the key of each micro-batch.

    Within a step the random numbers of a micro-batch so depend on its key alone. After the step the generators get back
    their states from before the step, so that the script's draws between steps do not depend on the number of
    micro-batches.

    Seeding takes microseconds, and most scripts draw nothing. ``enter`` therefore seeds the generators only in steps
    that begin with ``begin_step(keyed=True)``, and for slots (logical worker and micro-batch) that have drawn before.
    Any other micro-batch starts from the script's own states, which are equal on all ranks of a script that seeds the
    generators.

    Args:
        always: whether to seed for every micro-batch, because several ranks compute a part of each.

    Attributes:
        late: whether code has drawn in a micro-batch for which the generators were not seeded.
    """

    _under_way: ClassVar[tuple[Words, Words] | None] = None
    """Words at the beginning of the micro-batch under way in this process, and before its step."""
    _noted: ClassVar[int] = 0
    """Number of times that draws have been noticed in this process."""

    def __init__(self, always: bool = False) -> None:
        self.late = False
        self._always, self._in_step, self._is_keyed, self._seeds = always, False, True, True
        self._drawing = set[Slot]()
        self._slot: Slot | None = None
        # States before the step, and at the beginning of the micro-batch.
        self._script: GeneratorStates | None = None
        self._begun: GeneratorStates | None = None

    def begin_step(self, keyed: bool) -> None:
        """Record the states of Python's and NumPy's global generators at the start of a step, for ``end_step``.

        Args:
            keyed: whether to seed the generators for every micro-batch of this step.
        """
        # An exception may have ended the step before.
        self.end_step()
        self._script = _states(self._script)
        self._in_step, self._is_keyed = True, keyed

    def enter(self, key: int, slot: Slot | None = None) -> None:
        """Set the states from which a micro-batch's code draws by Python's and NumPy's global generators.

        The generators are seeded by ``key`` if ``slot`` is None, the step is keyed (``begin_step``), the slot has drawn
        in an earlier step, or the object is made with ``always``. Otherwise they get the states that they had before
        the step.

        Args:
            key: 64-bit key of the micro-batch.
            slot: its logical worker (fixed share of the global batch) and its index there; None for no slot.
        """
        words = self._note()
        self._slot = slot if self._in_step else None
        self._seeds = self._slot is None or self._is_keyed or self._always or self._slot in self._drawing
        if self._seeds or self._script is None:
            self._begin(_seeded(key))
        else:
            self._restore(self._script, words)
            self._begin(self._script)

    def end_step(self) -> None:
        """Give Python's and NumPy's global generators the states that they had at the start of the step.

        Does nothing to the generators if no step is under way.
        """
        if self._in_step and self._script is not None:
            self._restore(self._script, self._note())
        self._slot, self._in_step = None, False
        self._begin(None)

    def has_drawn(self) -> bool:
        """Return whether code has drawn from Python's or NumPy's global generator since the last ``enter``.

        Seeding a generator counts, too.
        """
        return self._begun is not None and _words() != self._begun.words

    def record(self) -> GeneratorStates:
        """Return the present states of Python's and NumPy's global generators, for ``restore``."""
        return _states(self._begun)

    def restore(self, states: GeneratorStates) -> None:
        """Set Python's and NumPy's global generators back to states that ``record`` has returned.

        Args:
            states: the result of ``record``.
        """
        self._restore(states, self._note())

    def enter_block(self, key: int) -> tuple[GeneratorStates, GeneratorStates | None] | None:
        """Seed Python's and NumPy's global generators for one call of a block of the model.

        The block then draws the same numbers on whichever pipeline stage it runs.

        Args:
            key: 64-bit key of the call: of the micro-batch, the block's name and the number of the call.

        Returns:
            The argument of ``leave_block``: the states before the call, and the states at the start of the micro-batch.
            None, and no seeding, in a micro-batch for which the generators are not seeded.
        """
        if self._begun is None or not self._seeds:
            return None
        self._note()
        around = self.record(), self._begun
        self._begin(_seeded(key))
        return around

    def leave_block(self, around: tuple[GeneratorStates, GeneratorStates | None]) -> None:
        """Set Python's and NumPy's global generators back to their states from before a block's call.

        The draws of the code behind the block are then the same on a rank that has computed the block and on one that
        has not.

        Args:
            around: the result of ``enter_block``.
        """
        self._restore(around[0], self._note())
        self._begin(around[1])

    def packed(self) -> Tensor:
        """Return the states of Python's and NumPy's global generators as a uint8 tensor, for ``unpack``.

        Its shape is (``PACKED``,) = (5032,); it is on the CPU, so that ranks can send it to each other.
        """
        normals = np.zeros(_NORMALS)
        words = _words()
        if self._begun is None or words != self._begun.words or type(self._begun.made_by) is not int:
            states = _states(None).made_by
            normals[:2] = states[0][2] is not None, states[0][2] or 0.0
            normals[2:] = states[1].get("has_gauss", 0), states[1].get("gauss", 0.0)
        return torch.frombuffer(bytearray(b"".join((*words, normals.tobytes()))), dtype=torch.uint8)

    def unpack(self, packed: Tensor) -> None:
        """Set Python's and NumPy's global generators to states that ``packed`` has returned, on this or another rank.

        Args:
            packed: the result of ``packed``.
        """
        self._note()
        data = packed.numpy().tobytes()
        normals = np.frombuffer(data[2 * _SIZE :])
        if (data[:_SIZE], data[_SIZE : 2 * _SIZE]) == _words() and not (normals[0] or normals[2]):
            return
        position, *words = np.frombuffer(data[:_SIZE], np.uint32).tolist()
        random.setstate((3, (*words, position), float(normals[1]) if normals[0] else None))
        if _numpy_memory() is not None:
            numpy = np.frombuffer(data[_SIZE : 2 * _SIZE], np.uint32)
            np.random.set_state(("MT19937", numpy[:-1], int(numpy[-1]), int(normals[2]), float(normals[3])))

    def _note(self) -> Words:
        """Note whether the micro-batch has drawn so far, and return the present words."""
        words = _words()
        # A check that has called the script's code has restored the states of before the step.
        known = [each.words for each in (self._begun, self._script) if each is not None]
        if self._slot is not None and words not in known:
            self._drawing.add(self._slot)
            self.late = self.late or not self._seeds
            GlobalDraws._noted += 1
        return words

    def _restore(self, states: GeneratorStates, words: Words) -> None:
        """Give both generators earlier states.

        Args:
            states: the states.
            words: the present words.
        """
        if states.paired:
            random.setstate(states.made_by[0])
            np.random.set_state(states.made_by[1])
        elif self._begun is not None and words == self._begun.words and self._is_in_memory():
            if words != states.words:
                generator_memory.raw, _numpy_memory().raw = states.words
        elif words != states.words:
            if type(states.made_by) is int:
                _seeded(states.made_by)
            else:
                random.setstate(states.made_by[0])
                np.random.set_state(states.made_by[1])

    def _is_in_memory(self) -> bool:
        """Return whether the words are the generators' whole states, if nothing has drawn since ``enter``."""
        return self._begun is not None and not self._begun.paired and _numpy_memory() is not None

    def _begin(self, states: GeneratorStates | None) -> None:
        self._begun = states
        GlobalDraws._under_way = None
        if states is not None and self._slot is not None and self._script is not None:
            GlobalDraws._under_way = states.words, self._script.words


def draws_marker() -> int:
    """Return a hash that differs once code has drawn from Python's or NumPy's global generators, or has seeded them.

    The seeds and states that a ``GlobalDraws`` gives the generators do not change it.
    """
    words, under_way = _words(), GlobalDraws._under_way
    if under_way is not None:
        words = under_way[1] if words == under_way[0] else words
    return hash((GlobalDraws._noted, words))


class _NumPyMemory:
    """Memory of NumPy's global generator, a Mersenne Twister: its words and position."""

    owner: ClassVar[Any] = None
    memory: ClassVar[Any] = None

    @classmethod
    def find(cls, owner: Any) -> Any:
        """Return the memory as a ctypes array; None for a generator of another kind."""
        cls.owner, cls.memory = owner, None
        if type(owner) is np.random.MT19937:
            cls.memory = (ctypes.c_char * _SIZE).from_address(owner.ctypes.state_address)
        return cls.memory


def _numpy_memory() -> Any:
    owner: Any = mtrand.get_bit_generator()
    return _NumPyMemory.memory if owner is _NumPyMemory.owner else _NumPyMemory.find(owner)


def _words() -> Words:
    if (memory := _numpy_memory()) is not None:
        return generator_memory.raw, memory.raw
    bits: Any = mtrand.get_bit_generator()
    return generator_memory.raw, repr(bits.state).encode().ljust(_SIZE)


def _seeded(key: int) -> GeneratorStates:
    """Seed both generators, and return their states."""
    random.seed(key)
    if _numpy_memory() is not None:
        np.random.seed(key & 0xFFFFFFFF)
    else:
        bits: Any = mtrand.get_bit_generator()
        bits.state = type(bits)(key).state
    return GeneratorStates(_words(), key)


def _states(known: GeneratorStates | None) -> GeneratorStates:
    """Return the states of both generators; ``known`` if they have not changed since."""
    words = _words()
    if known is not None and words == known.words and not known.paired:
        return known
    states = random.getstate(), np.random.get_state(legacy=False)
    return GeneratorStates(words, states, states[0][2] is not None or bool(states[1].get("has_gauss")))
