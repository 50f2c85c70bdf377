"""64-bit keys of random draws, hashed from the integers that a draw depends on.

Reference: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).
"""

from __future__ import annotations

import zlib

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Return an unsigned 64-bit hash of integers, in order, from which a random generator may be seeded.

    The same arguments give the same key in every process; a scalar version of ``tutti.data.keyed_random.hash64``.

    Args:
        parts: integers of any size and sign; their lowest 64 bits count.

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
    """Return the CRC-32 of a name, an unsigned 32-bit integer, equal in every process, unlike Python's own ``hash``.

    Args:
        name: any text; its UTF-8 bytes are hashed.
    """
    return zlib.crc32(name.encode())
