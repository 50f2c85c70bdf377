"""Imported last by a process that forks for tests: gives its children all of its memory at once, by 2 MiB a time.

A fork copies an entry of 8 bytes for each page, 65,000 of them with torch loaded, and its end frees each one again.
That takes 20 ms, and 6 ms where the pages lie together in huge ones. Nothing changes in a process but this time.
"""

from __future__ import annotations

import ctypes
import gc

_SIZE = 2 << 20
_MADV_COLLAPSE = 25

# What was imported before the fork is nothing that a garbage collection could free.
gc.collect()
gc.freeze()
_libc = ctypes.CDLL(None)
with open("/proc/self/maps", encoding="utf-8") as maps:
    regions = [line.split() for line in maps]
for addresses, access, _, _, inode, *_ in regions:
    first, end = (int(address, 16) for address in addresses.split("-"))
    first, end = -(-first // _SIZE) * _SIZE, end // _SIZE * _SIZE
    if access == "rw-p" and inode == "0" and first < end:
        # A kernel before 6.1 refuses.
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)
