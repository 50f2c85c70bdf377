"""Find tensors, such as a teacher's averages, that the code for one micro-batch changes and the next one reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tutti.errors import script_line
from tutti.nn.script_mode import DRAWS, acts_by_element
from tutti.nn.written_tensors import ASSIGN_DATA, DATA, METADATA, may_write
from tutti.train.script_checks.storage_records import MemoryRecords

REPLACING = frozenset(("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "__setitem__")) | {
    name for name in DRAWS if name.endswith("_")
}
"""Names of functions in place that write values which do not depend on the former ones."""
_REPEATABLE = frozenset(("clamp_", "clamp_min_", "clamp_max_", "clip_", "hardtanh_", "relu_"))
"""Functions in place that change nothing when they are called again."""
_Memory: TypeAlias = StorageWeakRef | None


class MicroBatchKey(NamedTuple):
    """Identity of the micro-batch on which a value depends.

    Attributes:
        worker: index of its logical worker, a fixed share of the global batch.
        micro: index of the micro-batch in its worker; in keys of ``micro_batch_key`` 0, unless ranks share workers.
        moved: True if the code for the micro-batch has changed an earlier value in place, False if it has computed the
            value from the samples.
        by_number: True for a Python number of all samples of the present micro-batch, where that of the micro-batch
            given by ``worker`` and ``micro`` has another one.
    """

    worker: int
    micro: int
    moved: bool = False
    by_number: bool = False


class _Former(NamedTuple):
    """A tensor before a call that may write it: the object, its memory and a copy of its values."""

    tensor: Tensor
    memory: StorageWeakRef
    values: Tensor


class InPlaceUpdates:
    """Finds tensors whose values after a step depend on the number of micro-batches for which a script's code has run.

    The code moves such a tensor: it writes new values that depend on the former ones, or after it has read these, as
    for an average of weights, a factor that decays, or parameters with an optimizer of their own. Values that are
    replaced before a read (a copy of the weights) do not count, nor do clamps: to repeat them changes nothing.
    ``CrossWorkerWatch``, a torch-function mode, calls ``begin_batch`` for each global batch, ``begin`` for each of its
    micro-batches, and ``former`` and ``note`` before and after each call of a PyTorch function in the code for the
    micro-batch. Not collective.

    Args:
        memory_of: returns the storage of a tensor, or None for a tensor that is not followed.

    Attributes:
        follows: whether the last call given to ``note`` has written the run's weights, or a function of them by
            element, into a tensor from before the micro-batch, such as a teacher's average. True also where this has
            changed no value, as before the first update.
    """

    def __init__(self, memory_of: Callable[[Tensor], _Memory]) -> None:
        self._memory_of = memory_of
        self._moved: dict[StorageWeakRef, tuple[MicroBatchKey, str]] = {}
        # Memory of tensors that the present micro-batch's code has made, and the older memory they are computed from.
        self._sources = MemoryRecords[frozenset[StorageWeakRef]]()
        self._own: set[StorageWeakRef] = set()
        # Memory of the run's parameters, and of what the present micro-batch's code has made of them by element.
        self._weights: set[StorageWeakRef] = set()
        # Memory that the present micro-batch's code has read.
        self._read = MemoryRecords[None]()
        self.follows = False

    def begin_batch(self) -> None:
        """Forget all tensors that the micro-batches of the previous global batch have moved, before the next batch.

        A tensor is moved if the code for a micro-batch changes it as a function of its former values, or after a read.
        What a script writes between two global batches is the same for every micro-batch.
        """
        self._moved, self._sources, self._own = {}, MemoryRecords(), set()

    def begin(self, own: set[StorageWeakRef], weights: set[StorageWeakRef]) -> None:
        """Begin a micro-batch of this rank: forget the tensors that code for the previous one has made and read.

        Tensors that the code has moved (changed as a function of their former values, or after a read) stay recorded
        until ``begin_batch``.

        Args:
            own: storages of the batches and of the run's model, which never count as moved: other checks follow them.
            weights: the part of ``own`` that holds the model's parameters.
        """
        self._sources, self._own, self._read, self._weights = MemoryRecords(), own, MemoryRecords(), weights

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Delete the records of writes to tensors whose values the run has just replaced, such as by its update.

        The tensors no longer count as changed in place by the code for a micro-batch.

        Args:
            tensors: the tensors.
        """
        for tensor in tensors if self._moved else ():
            if (memory := self._memory_of(tensor)) is not None:
                self._moved.pop(memory, None)

    def last_writer(self, tensor: Tensor) -> tuple[MicroBatchKey, str] | None:
        """Return the latest micro-batch of this global batch whose code has moved a tensor's storage; None if none has.

        To move is to change as a function of the former values, or after a read.

        Args:
            tensor: any tensor.

        Returns:
            A pair: the micro-batch, and the script's line that moved the values, as text for an error.
        """
        memory = self._memory_of(tensor) if self._moved else None
        return None if memory is None else self._moved.get(memory)

    def former(self, func: Any, args: Sequence[Any]) -> list[_Former]:
        """Copy the values of the tensors that a call of a PyTorch function may write in place, before the call is made.

        Tensors in memory that the code for this micro-batch has made, and in the storages ``own`` that ``begin`` was
        given, are left out.

        Args:
            func: the function of PyTorch.
            args: its positional arguments, of which the first may be a list of tensors.

        Returns:
            One entry for each such tensor: the tensor itself, its storage and a copy of its values; to be passed to
            ``note`` after the call. Empty for a function that writes none of its arguments.
        """
        if not may_write(func) or func == DATA or not args:
            return []
        first = args[0] if isinstance(args[0], list | tuple) else args[:1]
        pairs = [(each, self._memory_of(each)) for each in first if isinstance(each, Tensor)]
        return [
            _Former(each, memory, each.detach().clone())
            for each, memory in pairs
            if memory is not None and memory not in self._own and memory not in self._sources
        ]

    def note(
        self,
        key: MicroBatchKey,
        func: Any,
        name: str,
        args: Sequence[Any],
        made: Sequence[Tensor],
        former: Sequence[_Former],
    ) -> bool:
        """Record which tensors a call of a PyTorch function has read, made and moved, right after the call.

        A tensor of ``former`` is moved if its values have changed (beyond rounding), and the new ones depend on the
        former ones, or the code for this micro-batch has read these. A tensor whose values the call has replaced
        otherwise, all of them, is no longer recorded as moved.

        Args:
            key: the micro-batch whose code makes the call.
            func, name: the function of PyTorch, and its name.
            args: values of all arguments, positional and named; tensors in nested lists and tuples count.
            made: the tensors among the results of the call.
            former: the result of the method ``former`` for this call.

        Returns:
            Whether the call has moved an average of the run's weights that the code for another micro-batch of this
            global batch has moved before.
        """
        replaces = name in REPLACING or name in _REPEATABLE or func == ASSIGN_DATA
        read = {m for each in _tensors(args[1:] if replaces else args) if (m := self._memory_of(each)) is not None}
        sources = frozenset[StorageWeakRef]().union(
            *(self._sources.get(memory, frozenset(() if memory in self._own else (memory,))) for memory in read)
        )
        for tensor in made:
            memory = self._memory_of(tensor)
            if memory is not None and memory not in read and all(memory != each.memory for each in former):
                self._sources.setdefault(memory, sources)
        of_weights = not self._weights.isdisjoint(read) and (func == ASSIGN_DATA or acts_by_element(func))
        if of_weights:
            self._weights |= {memory for each in made if (memory := self._memory_of(each)) is not None} - self._own
        again, self.follows = False, of_weights and bool(former)
        for each in former:
            now = self._memory_of(each.tensor)
            if now is None:
                continue
            depends = each.memory in sources or each.memory in self._read
            if depends and not _is_close(each.values, each.tensor.detach()):
                again |= of_weights and self._moved.get(each.memory, (key, ""))[0] != key
                self._moved[now] = key, script_line()
            elif (
                not depends
                and fills_tensor(name, args)
                and each.tensor.nbytes == each.tensor.untyped_storage().nbytes()
            ):
                self._moved.pop(now, None)
        if func not in METADATA:
            # A view reads no values.
            self._read |= dict.fromkeys(read - {self._memory_of(each) for each in made})
        self._sources.drop_freed()
        self._read.drop_freed()
        return again


def fills_tensor(name: str, args: Sequence[Any]) -> bool:
    """Return whether a function that replaces values of a tensor replaces all of them.

    False only for an assignment to a part of the tensor, such as ``t[0] = 1``.

    Args:
        name: the function's name, one of those that replace values, such as ``copy_`` or ``__setitem__``.
        args: its positional arguments. The result for ``__setitem__`` is True only if the second one, the index, is
            ``...`` or ``:``.
    """
    return name != "__setitem__" or args[1] is ... or (isinstance(args[1], slice) and args[1] == slice(None))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_close(before: Tensor, now: Tensor) -> bool:
    """Return whether values are equal but for rounding, also where they have moved to another device or dtype."""
    if before.shape != now.shape:
        return False
    before = before.to(now.device)
    if not (before.is_floating_point() and now.is_floating_point()):
        return before.dtype == now.dtype and torch.equal(before, now)
    narrow = max((before.dtype, now.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    return torch.allclose(before.to(narrow), now.to(narrow), rtol=8 * torch.finfo(narrow).eps, atol=0, equal_nan=True)
