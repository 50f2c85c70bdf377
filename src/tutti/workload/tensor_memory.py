"""Measure the memory of tensors during a computation, and the memory that is available."""

from __future__ import annotations

import os
import re
import resource
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from tutti.errors import UsageError
from tutti.torch_compat import TorchDispatchMode, storage_key, tree_leaves
from tutti.workload import cgroup

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class Tracker(TorchDispatchMode):
    """Within the block, count the bytes of new tensors' storages, real or fake.

    Attributes:
        peak: the largest number of bytes alive at once; may be reset.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes alive now."""
        storages = [made() for made in list(self._made.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        for leaf in tree_leaves(result):
            if _is_plain(leaf):
                self._add(leaf, given)
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, tensor: Tensor, given: set[int]) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key not in given and key not in self._made:
            self._made[key] = weakref.ref(storage, lambda _: self._made.pop(key, None))


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not hasattr(leaf, "to_local")


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage once."""
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def room(processes: int) -> int:
    """Return the bytes for each of ``processes`` processes: an equal share of the node's memory, or of its cgroup's."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, cgroup.read_limits().memory_bytes or total) // processes


def free_memory(processes: int) -> int:
    """Return the bytes that each of ``processes`` processes can still allocate.

    The smallest of the node's available memory, the control group's limit and RLIMIT_DATA.
    """
    import psutil  # type: ignore[import-untyped]

    own = psutil.Process().memory_info()
    allowed = [psutil.virtual_memory().available // processes]
    if (group := cgroup.read_limits().memory_bytes) is not None:
        # A group's usage includes reclaimable caches; a process's resident memory does not.
        allowed.append(group // processes - own.rss)
    if (most := resource.getrlimit(resource.RLIMIT_DATA)[0]) != resource.RLIM_INFINITY:
        allowed.append(most - getattr(own, "data", own.rss))
    return max(int(min(allowed)), 0)


def parse_bytes(text: str, option: str) -> int:
    """Parse ``16GB``, ``512MiB`` or ``1e9`` as bytes. Raises UsageError.

    >>> parse_bytes("16GB", "--memory"), parse_bytes("512 MiB", "--memory")
    (16000000000, 536870912)
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?", text.strip().upper().replace("E", "e"))
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not value > 0:
        raise UsageError(f"'{text}' is not an amount of memory", where=option, remedy="write 16GB or 512MiB")
    return int(value)
