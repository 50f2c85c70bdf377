"""Identify tensors by weak references to them or their storages, and keep records of them by storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tutti.parallel.tensor.split_tensor import SplitTensor
from tutti.torch_compat import FunctionModesDisabled, view_base

_FEWEST = 256
"""Number of records from which on those of freed memory are looked for (a guess)."""
_R = TypeVar("_R")


def _own(tensor: Tensor) -> Tensor:
    """Return this rank's slice of a tensor that is split over tensor ranks; any other tensor as it is."""
    return tensor.part if isinstance(tensor, SplitTensor) else tensor


class MemoryRecords(dict[StorageWeakRef, _R]):
    """Dict from a tensor's storage (a weak reference) to a record, from which ``drop_freed`` removes freed storages.

    Call ``drop_freed`` regularly: a weak reference keeps a storage's header in memory, and with glibc before 2.38 the
    freed block between two headers is not used for another tensor of the same size, so that memory would grow with each
    intermediate result of a forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._most = _FEWEST

    def drop_freed(self) -> None:
        """Remove the entries of freed storages, if the number of entries has doubled since the last removal."""
        if len(self) >= self._most:
            for memory in [each for each in self if each.expired()]:
                del self[memory]
            self._most = max(_FEWEST, 2 * len(self))


class TensorSet:
    """Set of tensors by identity, that keeps none of them alive."""

    def __init__(self) -> None:
        self._known: dict[int, ref[Tensor]] = {}

    def __contains__(self, value: object) -> bool:
        """Return whether a value is one of the tensors."""
        found = self._known.get(id(value))
        return found is not None and found() is value

    def update(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors.

        Args:
            tensors: the tensors.
        """
        self._known.update((id(each), ref(each)) for each in tensors)

    def discard(self, values: Iterable[Any]) -> None:
        """Remove tensors, of which some may be no members.

        Args:
            values: the tensors, and other values, which are passed over.
        """
        for each in values:
            self._known.pop(id(each), None)


def memory_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's storage; if the tensor is split over ranks, to that of this rank's slice.

    None for a tensor that is not strided (sparse), or of another subclass of ``Tensor`` than ``nn.Parameter``.
    """
    own = _own(tensor)
    if type(own) not in (Tensor, nn.Parameter):
        return None
    # A mode of the script's reads would handle each of these reads of tutti's own.
    with FunctionModesDisabled():
        return StorageWeakRef(own.untyped_storage()) if own.layout == torch.strided else None


def memories_of(values: Iterable[Any]) -> set[StorageWeakRef]:
    """Return weak references to the storages of those values that are tensors, as a set; other values are ignored.

    Tensors for which ``memory_of`` returns None, such as sparse ones, are left out.
    """
    found = (memory_of(each) for each in values if isinstance(each, Tensor))
    return {memory for memory in found if memory is not None}


def fills_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has all bytes of its storage; of one split over tensor ranks this rank's slice counts."""
    own = _own(tensor)
    return own.nbytes == own.untyped_storage().nbytes()


def is_computed(tensor: Tensor) -> bool:
    """Return whether calls that autograd records have computed a tensor, which is no parameter or view of one."""
    if tensor.grad_fn is None:
        return False
    # A read that a mode of tensor parallelism sees would gather the tensor.
    with FunctionModesDisabled():
        base = view_base(tensor)
        return base is None or base.grad_fn is not None
