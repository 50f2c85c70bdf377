"""Measure the memory of tensors during a computation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from tutti.torch_compat import TorchDispatchMode, is_dtensor, storage_key, tree_leaves


class Tracker(TorchDispatchMode):
    """Context manager that counts the bytes of tensor storages that operators create in its block.

    Real and fake tensors count, ``DTensor``s do not; results that share the storage of an argument, such as views, do
    not count again.

    Attributes:
        peak: the largest number of bytes that were alive at once after an operator, so far; the caller may set it to
            ``now`` or 0 to measure anew.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes, now, of the tensor storages that operators have made in the tracker's ``with`` block and still live.

        A tracker is the context manager that counts them. Storages that were made before the block do not count.
        """
        storages = [made() for made in list(self._made.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        # Counting all storages takes longer than most operators, and no view or write in place makes them more.
        if any([self._add(leaf, given) for leaf in tree_leaves(result) if _is_plain(leaf)]):
            self.peak = max(self.peak, self.now)
        return result

    def _add(self, tensor: Tensor, given: set[int]) -> bool:
        """Keep a tensor's storage if the operator has made it, and return whether it has."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in given or key in self._made:
            return False
        self._made[key] = weakref.ref(storage, lambda _: self._made.pop(key, None))
        return True


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not is_dtensor(leaf)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind some tensors; a storage that several tensors share counts once.

    Args:
        tensors: tensors on any devices; a view counts with its whole storage.
    """
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())
