"""Keys of random draws: 64-bit mixing of what a draw may depend on.

Reference: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).
"""

from __future__ import annotations

import zlib

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """One 64-bit key from several integers, order-sensitive: ``tutti.data.hashing.hash64`` for a few scalars, fast.

    >>> mix(0, 1, 2) != mix(0, 2, 1)
    True
    """
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def name_key(name: str) -> int:
    """A 32-bit key of a name, the same in every process (Python's own ``hash`` is not)."""
    return zlib.crc32(name.encode())
