"""Counter-based random numbers, keyed by their purpose: equal on every device, in any order, after any resume.

The bits are a hash of the keys, such as (seed, epoch, sample), instead of a hidden state that advances. One step of the
hash is that of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA,
figure 17), which passes BigCrush. Not for cryptography.
"""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Key: TypeAlias = int | np.integer[Any] | NDArray[np.integer[Any]]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = 0xFFFFFFFFFFFFFFFF


def hash64(*keys: Key) -> NDArray[np.uint64]:
    """Hash each combination of ``keys`` to 64 well-mixed bits; order and number of the keys matter.

    h₀ = 0, hᵢ₊₁ = splitmix64(hᵢ XOR keyᵢ), so that ``hash64(seed)`` is SplitMix64's first output for that seed. Source:
    Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", figure 17. Not for cryptography.

    Args:
        keys: integers, or integer arrays that broadcast together; taken modulo 2⁶⁴.

    Returns:
        uint64, of the keys' broadcast shape (0-dimensional for scalars).

    Raises:
        TypeError: a key is not an integer.

    >>> hex(hash64(0))
    '0xe220a8397b1dcdaf'
    >>> hash64(7, np.arange(3)).shape
    (3,)
    """
    mixed: Any = np.uint64(0)
    with np.errstate(over="ignore"):
        for key in keys:
            mixed = (mixed ^ _bits(key)) + _GOLDEN
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
            mixed = mixed ^ (mixed >> np.uint64(31))
    return np.asarray(mixed, dtype=np.uint64)


def uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert 64 random bits each to a number in [0, 1), by the 53 highest of the bits: ⌊bits / 2¹¹⌋ · 2⁻⁵³.

    Args:
        bits: uint64 of any shape, such as a result of ``hash64``.

    Returns:
        float64 of the same shape.

    >>> float(uniform(np.asarray(2**63, dtype=np.uint64)))
    0.5
    """
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def _bits(key: Key) -> Any:
    if isinstance(key, np.ndarray):
        if key.dtype.kind not in "iu":
            raise TypeError(f"keys are integers, not {key.dtype}")
        return key.astype(np.uint64)
    return np.uint64(operator.index(key) & _MASK)
