"""Memory that tensors take while something is computed, and how much of it there is."""

from __future__ import annotations

import os
import re
import resource
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutti.errors import UsageError
from tutti.measure import cgroup

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class Tracker(TorchDispatchMode):
    """Counts the bytes of tensors that are made in the block, real or fake ones.

    Attributes:
        peak: the most that were there at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes that are there."""
        storages = [made() for made in list(self._made.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        for leaf in tree_leaves(result):
            if _is_plain(leaf):
                self._add(leaf, given)
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in given and key not in self._made:
            self._made[key] = weakref.ref(storage, lambda _: self._made.pop(key, None))


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not hasattr(leaf, "to_local")


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that these tensors are in, each part once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def room(processes: int) -> int:
    """Bytes of each of so many processes: its share of the host's memory, or of its control group's."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, cgroup.read().memory_bytes or total) // processes


def free(processes: int) -> int:
    """Bytes that each of so many processes may still take of the host's memory, its control group's and its own."""
    import psutil  # type: ignore[import-untyped]

    own = psutil.Process().memory_info()
    allowed = [psutil.virtual_memory().available // processes]
    if (group := cgroup.read().memory_bytes) is not None:
        # What a group uses has caches in it that are given back; what a process has is certain.
        allowed.append(group // processes - own.rss)
    if (most := resource.getrlimit(resource.RLIMIT_DATA)[0]) != resource.RLIM_INFINITY:
        allowed.append(most - getattr(own, "data", own.rss))
    return max(int(min(allowed)), 0)


def parse_bytes(text: str, option: str) -> int:
    """``16GB``, ``512MiB``, ``1e9`` as bytes. Raises UsageError.

    >>> parse_bytes("16GB", "--memory"), parse_bytes("512 MiB", "--memory")
    (16000000000, 536870912)
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?", text.strip().upper().replace("E", "e"))
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not value > 0:
        raise UsageError(f"'{text}' is no amount of memory", where=option, remedy="write 16GB or 512MiB")
    return int(value)
