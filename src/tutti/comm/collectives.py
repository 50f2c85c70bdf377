"""Public collectives, matched by name: ``tutti.allreduce``, ``tutti.allgather`` and so on, and their async forms.

Calls with one name belong together, in whatever order ranks make them; calls without a name are matched by the order
of such calls. Where ranks' calls of a name differ in kind, dtype, shape or arguments nothing is sent, every rank raises
MismatchError with both calls, and the job goes on. Functions that wait are differentiable; asynchronous ones, and those
that write in place, are not. Every function raises UsageError, and sends nothing, for an argument that is no tensor
where a tensor is expected, for a tensor on the meta device, and within ``collectives_refused``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from tutti.comm.collective_call import CollectiveCall, ReduceOperation
from tutti.comm.collective_engine import default_session
from tutti.comm.collective_execution import finish_reduction, scale
from tutti.comm.collective_session import CollectiveHandle, CollectiveSession
from tutti.comm.object_codec import decode_object, encode_or_error
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.torch_compat import TorchDispatchMode

AVERAGE, SUM = ReduceOperation.AVERAGE, ReduceOperation.SUM

_REAL = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"))
_COMPLEX = frozenset(("complex64", "complex128"))
_REDUCED = {
    ReduceOperation.AVERAGE: _REAL - {"bool"} | _COMPLEX,
    ReduceOperation.SUM: _REAL | _COMPLEX,
    ReduceOperation.MIN: _REAL,
    ReduceOperation.MAX: _REAL,
    ReduceOperation.PRODUCT: _REAL,
    ReduceOperation.ADASUM: _REAL,
}
"""Dtypes that an operation is defined for and that PyTorch computes with; others would fail in the engine."""


class ProcessSet:
    """An ordered set of ranks that perform collectives among themselves.

    Args:
        ranks: global ranks of the members, in any order; the set has them in increasing order.

    Attributes:
        ranks: global ranks of the members.
        process_set_id: number of the set; None before ``add_process_set``; 0 for the set of all ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks: tuple[int, ...] | None = tuple(sorted(int(rank) for rank in ranks))
        self.process_set_id: int | None = None

    @classmethod
    def of_all_ranks(cls) -> ProcessSet:
        """Return a new process set (ordered set of ranks for collectives) of all ranks of the job, with number 0.

        Collectives accept it without ``add_process_set``. Its members are those of the job at the time of use, so that
        it may be made before ``tutti.init``.
        """
        process_set = cls(())
        process_set._ranks, process_set.process_set_id = None, 0
        return process_set

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members of the process set, in increasing order; a new list.

        For the set of all ranks, raises UsageError before ``tutti.init``.
        """
        return list(range(context.size())) if self._ranks is None else list(self._ranks)

    def size(self) -> int:
        """Return the number of ranks that are members of the process set, an ordered set of ranks for collectives.

        For the set of all ranks, raises UsageError before ``tutti.init``.
        """
        return len(self.ranks)

    def included(self) -> bool:
        """Return whether this process's rank is a member of the process set. Local.

        Members may call collectives on the set, once all ranks have registered it by ``add_process_set``.

        Raises UsageError before ``tutti.init``.
        """
        return context.rank() in self.ranks

    def rank(self) -> int:
        """Return the index of this process in the process set, from 0; not its global rank.

        Raises:
            UsageError: this process is no member, or ``tutti.init`` was not called.
        """
        if not self.included():
            raise UsageError(f"rank {context.rank()} is not in {self}", remedy="check included() first")
        return self.ranks.index(context.rank())

    def __repr__(self) -> str:
        ranks = self.ranks if self._ranks is not None or context.is_initialized() else "all"
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks})"


all_ranks = ProcessSet.of_all_ranks()
"""The process set of all ranks."""

_current: list[CollectiveSession] = []
_refused = ContextVar("collectives_refused", default=False)


def use_session(session: CollectiveSession | None) -> None:
    """Make all later collectives of this process (``tutti.allreduce`` …) use the given session.

    A session is a namespace in which the ranks' calls are matched by name. Local; every rank must select its part of
    the same session.

    Args:
        session: the session; None: the default session.
    """
    _current[:] = [session] if session is not None else []


class _RefuseCollectives(TorchDispatchMode):
    """Dispatch mode that raises UsageError for PyTorch's own collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _refusal()
        return func(*args, **(kwargs or {}))


def _refusal() -> UsageError:
    return UsageError(
        "the script calls a collective within a call that not all ranks make",
        remedy="call it outside of the model and the loss function",
    )


@contextmanager
def collectives_refused() -> Iterator[None]:
    """Return a context manager within which collectives raise UsageError, tutti's public ones and PyTorch's.

    Use it around a function of a user's script that one rank calls alone, where a collective would wait for the other
    ranks for ever. Affects only the thread that enters the block; other threads may call collectives.
    """
    before = _refused.set(True)
    try:
        with _RefuseCollectives():  # type: ignore[no-untyped-call]
            yield
    finally:
        _refused.reset(before)


def _session() -> CollectiveSession:
    if _refused.get():
        raise _refusal()
    return _current[-1] if _current else default_session()


def _number(process_set: ProcessSet) -> int:
    if not isinstance(process_set, ProcessSet):
        raise UsageError(
            f"process_set is of type {type(process_set).__name__}",
            remedy="give the ProcessSet that add_process_set returned",
        )
    number = process_set.process_set_id
    if number is None or number not in _session().sets:
        raise UsageError(f"{process_set} is not known", remedy="call add_process_set on every rank first")
    if context.rank() not in _session().sets[number]:
        raise UsageError(f"rank {context.rank()} is not in {process_set}", remedy="call it on the members alone")
    return number


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _where(kind: str, name: str | None) -> str:
    """Name the rank and the call for an error message."""
    return f"rank {context.rank()}, {kind} " + (f"'{name}'" if name is not None else "without a name")


def _submit(
    kind: str,
    inputs: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    outputs: list[Tensor] | None = None,
    convert: Callable[[Any], Any] | None = None,
    shapes: Sequence[torch.Size] | None = None,
    **given: Any,
) -> CollectiveHandle:
    """Describe a collective of ``inputs`` and hand it to the engine."""
    number, session = _number(process_set), _session()
    _refuse_sparse(kind, inputs, name)
    devices = {device.type for device in {tensor.device for tensor in inputs}}
    if len(devices) > 1:
        raise UsageError(
            f"tensors of one {kind} are on {' and '.join(sorted(devices))}",
            where=_where(kind, name),
            remedy="move them together",
        )
    dtypes = tuple([_name_of(tensor.dtype) for tensor in inputs])
    if (reduced := _REDUCED.get(given.get("op", ""))) is not None and not reduced.issuperset(dtypes):
        raise UsageError(
            f"Tensor type {next(dtype for dtype in dtypes if dtype not in reduced)} is not supported by {given['op']}",
            where=_where(kind, name),
            remedy="convert the tensor, or use another operation",
        )
    # Of several places that are one in memory, a copy into the tensor would leave any one.
    if outputs is not None and any(not tensor.is_contiguous() and 0 in tensor.stride() for tensor in outputs):
        raise UsageError(
            "Tensor is required to be contiguous where the result is written into an expanded tensor",
            where=_where(kind, name),
            remedy="clone it first",
        )
    inputs = _without_graph(inputs)
    call = CollectiveCall(
        kind=kind,
        name=name if name is not None else session.name(number, "call"),
        unnamed=name is None,
        process_set=number,
        shapes=tuple([tensor.shape for tensor in inputs] if shapes is None else shapes),
        dtypes=dtypes,
        device=next(iter(devices), "cpu"),
        **given,
    )
    return session.submit(CollectiveHandle(call, session, inputs, outputs, convert))


def _check_tensors(kind: str, values: Sequence[Any], name: str | None) -> None:
    """Raise UsageError for values that are no tensors."""
    for value in values:
        if not isinstance(value, Tensor):
            raise UsageError(
                f"this collective takes tensors, and was given a value of type {type(value).__name__}",
                where=_where(kind, name),
                remedy="give torch.tensor(…), or use allgather_object or broadcast_object",
            )


def _refuse_sparse(kind: str, tensors: Sequence[Tensor], name: str | None) -> None:
    """Raise UsageError for tensors that are not dense, at which the engine would fail with all later collectives."""
    _check_tensors(kind, tensors, name)
    for tensor in tensors:
        if tensor.is_meta:
            raise UsageError(
                "a tensor on the meta device has no values",
                where=_where(kind, name),
                remedy="move the model to a device by to_empty(), and initialise it",
            )
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"a tensor of layout {str(tensor.layout).removeprefix('torch.')} cannot be given to this collective",
                where=_where(kind, name),
                remedy="use allreduce or sparse_allreduce_async for sparse COO tensors, or to_dense()",
            )


def _without_graph(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def _first(results: list[Any]) -> Any:
    return results[0]


# --- all-reduce ----------------------------------------------------------------------------------------------------


def _allreduce(
    tensors: Sequence[Tensor],
    op: str,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    outputs: list[Tensor] | None,
    convert: Callable[[Any], Any] | None,
) -> CollectiveHandle:
    op = ReduceOperation(op)
    if op == ReduceOperation.ADASUM:
        _number(process_set)
        size = process_set.size()
        if size & (size - 1):
            raise UsageError(
                f"Adasum needs a power of two of ranks, not {size}",
                where=_where("allreduce", name),
                remedy="use sum or average, or a process set",
            )
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise UsageError("Adasum needs floating point tensors", where=_where("allreduce", name), remedy="use sum")
    return _submit(
        "allreduce",
        tensors,
        name,
        process_set,
        outputs=outputs,
        convert=convert,
        op=op.value,
        prescale=float(prescale),
        postscale=float(postscale),
    )


def allreduce_async(
    tensor: Tensor,
    op: str = AVERAGE,
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = all_ranks,
    in_place: bool = False,
) -> CollectiveHandle:
    """Start an all-reduce of one tensor; ``wait()`` of the returned handle returns the result.

    Collective over ``process_set``; does not block, but a process's first collective waits for rank 0's first; not
    differentiable. Each result is postscale · op(prescale · tensor) over the ranks, with averages of integers
    truncated.

    Args:
        tensor: of equal shape and dtype on all ranks; must not be changed before ``wait``.
        op: ``average``, ``sum``, ``min``, ``max``, ``product`` or ``adasum``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        prescale: factor on the tensors before the reduction.
        postscale: factor on the result after it.
        process_set: ranks that take part; default: all ranks.
        in_place: write the result into ``tensor``, which must not be used before ``wait`` and which ``wait`` returns;
            default: ``wait`` returns a new tensor.

    Returns:
        Handle with ``wait``, and ``done``, which does not block: whether the call has ended or failed. ``wait`` raises
        MismatchError where ranks' calls differ, and PeerError where a rank has ended, left or is late.

    Raises:
        UsageError: ``op`` is not defined for the dtype, or ``adasum`` for this number of ranks (a power of two is
            needed); the tensor is sparse, or with ``in_place`` expanded (several of its elements share memory);
            ``process_set`` is not registered, or this rank is no member of it; or ``tutti.init`` was not called.
        ValueError: ``op`` is no such operation.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    _check_tensors("allreduce", [tensor], name)
    outputs = [tensor.detach()] if in_place else None
    convert = (lambda _: tensor) if in_place else _first
    return _allreduce([tensor], op, name, prescale, postscale, process_set, outputs, convert)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    op: str = AVERAGE,
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = all_ranks,
    in_place: bool = False,
) -> CollectiveHandle:
    """Start an all-reduce of several tensors as one call; ``wait()`` returns the list of results.

    Collective over ``process_set``; does not block, but a process's first collective waits for rank 0's first; not
    differentiable. Each result is postscale · op(prescale · tensor) over the ranks, with averages of integers
    truncated.

    Args:
        tensors: the same number on all ranks, each of equal shape and dtype on all ranks; must not be changed before
            ``wait``.
        op: ``average``, ``sum``, ``min``, ``max``, ``product`` or ``adasum``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        prescale: factor on the tensors before the reduction.
        postscale: factor on the result after it.
        process_set: ranks that take part; default: all ranks.
        in_place: write the results into ``tensors``, which must not be used before ``wait`` and which ``wait`` returns;
            default: ``wait`` returns new tensors.

    Returns:
        Handle with ``wait``, and ``done``, which does not block: whether the call has ended or failed. ``wait`` raises
        MismatchError where ranks' calls differ, and PeerError where a rank has ended, left or is late.

    Raises:
        UsageError: ``op`` is not defined for the dtype, or ``adasum`` for this number of ranks (a power of two is
            needed); a tensor is sparse, or with ``in_place`` expanded (several of its elements share memory); tensors
            are on devices of several types; ``process_set`` is not registered, or this rank is no member of it; or
            ``tutti.init`` was not called.
        ValueError: ``op`` is no such operation.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    tensors = list(tensors)
    _check_tensors("allreduce", tensors, name)
    outputs = _without_graph(tensors) if in_place else None
    convert = (lambda _: tensors) if in_place else None
    return _allreduce(tensors, op, name, prescale, postscale, process_set, outputs, convert)


def allreduce(
    tensor: Tensor,
    op: str = AVERAGE,
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = all_ranks,
) -> Tensor:
    """All-reduce: return postscale · op(prescale · tensor) over the ranks, equal on all of them.

    Collective over ``process_set``; blocks. Averages of integers are truncated. Differentiable for sum and average: the
    gradient is all-reduced by the same operation and factors. Sparse tensors are summed or averaged by an all-gather of
    their indices and values, without a gradient.

    Args:
        tensor: of equal shape and dtype on all ranks.
        op: ``average``, ``sum``, ``min``, ``max``, ``product`` or ``adasum``; the gradient exists for the first two.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        prescale: factor on the tensor before the reduction.
        postscale: factor on the result after the reduction.
        process_set: ranks that take part; default: all ranks.

    Returns:
        A new tensor of the shape and dtype of ``tensor``; sparse where ``tensor`` is.

    Raises:
        UsageError: ``op`` is not defined for the dtype or, with another operation than sum and average, for a sparse
            tensor; ``adasum`` for a number of ranks that is no power of two; ``process_set`` is not registered, or this
            rank is no member of it; or ``tutti.init`` was not called. In the backward: ``op`` has no gradient.
        ValueError: ``op`` is no such operation.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    if isinstance(tensor, Tensor) and tensor.is_sparse:
        return sparse_allreduce_async(
            tensor, op, name, prescale=prescale, postscale=postscale, process_set=process_set
        )()
    given = (op, name, float(prescale), float(postscale), process_set)
    return _differentiable(_AllReduce, given, [tensor])[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    op: str = AVERAGE,
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = all_ranks,
) -> list[Tensor]:
    """All-reduce several tensors as one call: return postscale · op(prescale · tensor) over the ranks for each tensor.

    Collective over ``process_set``; blocks until all tensors are reduced. Averages of integers are truncated.
    Differentiable for sum and average: the gradients are all-reduced by the same operation and factors.

    Args:
        tensors: the same number on all ranks, each of equal shape and dtype on all ranks.
        op: ``average``, ``sum``, ``min``, ``max``, ``product`` or ``adasum``; the gradient exists for the first two.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        prescale: factor on the tensors before the reduction.
        postscale: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        The reductions, new tensors in the order of ``tensors``, equal on all ranks.

    Raises:
        UsageError: ``op`` is not defined for the dtype, or ``adasum`` for this number of ranks (a power of two is
            needed); a tensor is sparse, or tensors are on devices of several types; ``process_set`` is not registered,
            or this rank is no member of it; or ``tutti.init`` was not called.
        ValueError: ``op`` is no such operation.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    given = (op, name, float(prescale), float(postscale), process_set)
    return _differentiable(_AllReduce, given, list(tensors))


def sparse_allreduce_async(
    tensor: Tensor,
    op: str = AVERAGE,
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = all_ranks,
) -> Callable[[], Tensor]:
    """Start to sum or average sparse tensors by gathering indices and values; return a function that awaits the result.

    Collective over ``process_set``: one all-gather of indices and values, before which shapes, dtypes, operation and
    factors of the ranks are compared. Does not block, but a process's first collective waits for rank 0's first; not
    differentiable. The values are equal to those of ``allreduce`` of the dense tensors, with averages of integers
    truncated.

    Args:
        tensor: sparse COO tensor, of equal shape and dtype on all ranks; must not be changed before the result is
            there.
        op: ``average`` or ``sum``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        prescale: factor on the tensors before the reduction.
        postscale: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        A function that blocks until the all-gather is complete and returns the reduction, sparse and coalesced. It
        raises MismatchError where ranks' calls differ, and PeerError where a rank is lost or late.

    Raises:
        UsageError: ``op`` is another operation or not defined for the dtype; the tensor is not sparse; ``process_set``
            is not registered, or this rank is no member of it; or ``tutti.init`` was not called.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    if op not in (AVERAGE, SUM):
        raise UsageError(
            f"sparse tensors cannot be reduced with {op}",
            where=_where("allreduce", name),
            remedy="use sum or average, or to_dense()",
        )
    _check_tensors("allreduce", [tensor], name)
    if not tensor.is_sparse:
        raise UsageError(
            f"the tensor has layout {tensor.layout}, and no sparse COO layout",
            where=_where("allreduce", name),
            remedy="use allreduce",
        )
    tensor = tensor.detach().coalesce()
    base = name if name is not None else _session().name(_number(process_set), "sparse")
    rows = [tensor.indices().t().contiguous(), scale(tensor.values(), prescale)]
    handle = _submit(
        "allgather",
        rows,
        f"{base}.sparse",
        process_set,
        shapes=[each.shape[1:] for each in rows],
        extents=tuple(len(each) for each in rows),
        # The gather itself uses none of these: they are for the comparison of the ranks' calls.
        op=op,
        prescale=float(prescale),
        postscale=float(postscale),
        sparse_shape=tuple(tensor.shape),
    )
    reduction = CollectiveCall("allreduce", base, op=op, postscale=float(postscale))

    def wait() -> Tensor:
        indices, values = handle.wait()
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
        values = finish_reduction(total.values(), reduction, process_set.size())
        return torch.sparse_coo_tensor(total.indices(), values, tensor.shape, check_invariants=False, is_coalesced=True)

    return wait


# --- gathers, broadcast, all-to-all, reduce-scatter ------------------------------------------------------------------


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, *, process_set: ProcessSet = all_ranks
) -> CollectiveHandle:
    """Start an all-gather of several tensors as one call; ``wait()`` returns the list of results.

    Collective over ``process_set``; does not block, but a process's first collective waits for rank 0's first; not
    differentiable. Each result is the concatenation of the ranks' tensors along the first dimension, in rank order.

    Args:
        tensors: the same number on all ranks, each (rows, …), with trailing dimensions and dtype that are equal on all
            ranks. A scalar counts as one row. They must not be changed before ``wait``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle with ``wait``, and ``done``, which does not block: whether the call has ended or failed. ``wait`` raises
        MismatchError where ranks' calls differ, and PeerError where a rank has ended, left or is late.

    Raises:
        UsageError: a tensor is sparse; tensors are on devices of several types; ``process_set`` is not registered, or
            this rank is no member of it; or ``tutti.init`` was not called.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    _check_tensors("allgather", tensors, name)
    rows = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    return _submit(
        "allgather",
        rows,
        name,
        process_set,
        shapes=[tensor.shape[1:] for tensor in rows],
        extents=tuple(len(tensor) for tensor in rows),
    )


def allgather_async(
    tensor: Tensor, name: str | None = None, *, process_set: ProcessSet = all_ranks
) -> CollectiveHandle:
    """Start an all-gather of one tensor; ``wait()`` of the returned handle returns the result, a new tensor.

    Collective over ``process_set``; does not block, but a process's first collective waits for rank 0's first; not
    differentiable. The result is the concatenation of the ranks' tensors along the first dimension, in rank order.

    Args:
        tensor: (rows, …); trailing dimensions and dtype are equal on all ranks. A scalar counts as one row. It must not
            be changed before ``wait``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle with ``wait``, and ``done``, which does not block: whether the call has ended or failed. ``wait`` raises
        MismatchError where ranks' calls differ, and PeerError where a rank has ended, left or is late.

    Raises:
        UsageError: a tensor is sparse; ``process_set`` is not registered, or this rank is no member of it; or
            ``tutti.init`` was not called.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    handle = grouped_allgather_async([tensor], name, process_set=process_set)
    handle.convert = _first
    return handle


def allgather(tensor: Tensor, name: str | None = None, *, process_set: ProcessSet = all_ranks) -> Tensor:
    """All-gather: concatenate the ranks' tensors along the first dimension, whose size may differ between ranks.

    Collective over ``process_set``; blocks. Differentiable: this rank's gradient is its rows of the average of the
    ranks' gradients, for which backward performs an all-reduce and an all-gather of the numbers of rows.

    Args:
        tensor: (rows, …); trailing dimensions and dtype are equal on all ranks. A scalar counts as one row.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.

    Returns:
        A new tensor of shape (sum of the ranks' rows, …), in rank order, equal on all ranks.

    Raises:
        UsageError: the tensor is sparse; ``process_set`` is not registered, or this rank is no member of it; or
            ``tutti.init`` was not called.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    return _differentiable(_AllGather, (name, process_set), [tensor])[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, *, process_set: ProcessSet = all_ranks
) -> list[Tensor]:
    """All-gather several tensors as one call: concatenate the ranks' tensors along the first dimension, for each.

    Collective over ``process_set``; blocks. Differentiable: this rank's gradients are its rows of the average of the
    ranks' gradients, for which backward performs an all-reduce and an all-gather of the numbers of rows.

    Args:
        tensors: the same number on all ranks, each (rows, …), with trailing dimensions and dtype that are equal on all
            ranks. A scalar counts as one row.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.

    Returns:
        For each of ``tensors`` a new tensor of shape (sum of the ranks' rows, …), in rank order, equal on all ranks.

    Raises:
        UsageError: a tensor is sparse; tensors are on devices of several types; ``process_set`` is not registered, or
            this rank is no member of it; or ``tutti.init`` was not called.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    return _differentiable(_AllGather, (name, process_set), list(tensors))


def grouped_broadcast_async(
    tensors: Sequence[Tensor],
    root: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = all_ranks,
    in_place: bool = False,
) -> CollectiveHandle:
    """Start a broadcast of several tensors from rank ``root`` as one call; ``wait()`` returns the list of results.

    Collective over ``process_set``; does not block, but a process's first collective waits for rank 0's first; not
    differentiable.

    Args:
        tensors: the same number on all ranks, each of equal shape and dtype on all ranks; the values of ``root`` count.
        root: global rank of the source; a member of ``process_set``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.
        in_place: write the results into ``tensors``, which must not be used before ``wait``; default: into new tensors.

    Returns:
        Handle; its ``wait`` returns tensors with the values of ``root``, in the order of ``tensors`` (with ``in_place``
        ``tensors`` themselves), and raises MismatchError where ranks' calls differ, and PeerError where a rank has
        ended, left or did not make the call in time.

    Raises:
        UsageError: ``process_set`` is not registered, or ``root`` or this rank is no member of it; a tensor is sparse,
            or with ``in_place`` expanded (several of its elements share memory); tensors are on devices of several
            types; or ``tutti.init`` was not called.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    _check_root(root, name, process_set)
    tensors = list(tensors)
    _refuse_sparse("broadcast", tensors, name)
    outputs = [t.detach() if in_place else t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
    convert = (lambda _: tensors) if in_place else None
    return _submit("broadcast", tensors, name, process_set, outputs=outputs, convert=convert, root=int(root))


def _check_root(root: int, name: str | None, process_set: ProcessSet) -> None:
    _number(process_set)
    if root not in process_set.ranks:
        raise UsageError(
            f"root rank {root} is not in {process_set}",
            where=_where("broadcast", name),
            remedy="give the global rank of a member",
        )


def broadcast_async(
    tensor: Tensor,
    root: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = all_ranks,
    in_place: bool = False,
) -> CollectiveHandle:
    """Start a broadcast of ``tensor`` from global rank ``root``; ``wait()`` of the handle returns ``root``'s tensor.

    Collective over ``process_set``; does not block, but a process's first collective waits for rank 0's first; not
    differentiable.

    Args:
        tensor: of equal shape and dtype on all ranks; the values of ``root`` count.
        root: global rank of the source; a member of ``process_set``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.
        in_place: write the result into ``tensor``, which must not be used before ``wait`` and which ``wait`` returns;
            default: into a new tensor.

    Returns:
        Handle with ``wait``, and ``done``, which does not block: whether the call has ended or failed. ``wait`` raises
        MismatchError where ranks' calls differ, and PeerError where a rank has ended, left or is late.

    Raises:
        UsageError: ``process_set`` is not registered, or ``root`` or this rank is no member of it; the tensor is
            sparse, or with ``in_place`` expanded (several of its elements share memory); or ``tutti.init`` was not
            called.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    handle = grouped_broadcast_async([tensor], root, name, process_set=process_set, in_place=in_place)
    handle.convert = (lambda _: tensor) if in_place else _first
    return handle


def broadcast(tensor: Tensor, root: int, name: str | None = None, *, process_set: ProcessSet = all_ranks) -> Tensor:
    """Broadcast: return a new tensor with the values of ``tensor`` on global rank ``root``.

    Collective over ``process_set``; blocks. Differentiable: the gradient is the average of the ranks' gradients on
    ``root``, zero elsewhere; backward performs an all-reduce over ``process_set``.

    Args:
        tensor: of equal shape and dtype on all ranks; the values of ``root`` count.
        root: global rank of the source; a member of ``process_set``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.

    Returns:
        A new tensor of the shape and dtype of ``tensor``, equal on all ranks.

    Raises:
        UsageError: ``process_set`` is not registered, or ``root`` or this rank is no member of it; the tensor is
            sparse; or ``tutti.init`` was not called.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    return _differentiable(_Broadcast, (root, name, process_set), [tensor])[0]


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int, where: str) -> tuple[int, ...]:
    if tensor.dim() == 0:
        raise UsageError("an all-to-all needs a tensor with a first dimension", where=where, remedy="reshape it")
    if splits is None:
        if len(tensor) % size:
            raise SplitError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers",
                where=where,
            )
        return (len(tensor) // size,) * size
    if isinstance(splits, Tensor) and splits.dtype != torch.int32:
        raise SplitError("alltoall expects splits to contain 32-bit integer elements", where=where)
    rows = tuple(int(n) for n in splits)
    if len(rows) != size or min(rows, default=0) < 0:
        raise SplitError(
            f"alltoall needs {size} splits of at least 0, one for each rank, not {list(rows)}", where=where
        )
    if sum(rows) > len(tensor):
        raise SplitError("Sum of splits entries is greater than the first dimension of tensor", where=where)
    return rows


class SplitError(UsageError, ValueError):
    """Raised where the splits (rows for each rank) of an all-to-all do not fit its tensor."""


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = all_ranks,
) -> CollectiveHandle:
    """Start an all-to-all; ``wait()`` returns the received rows and, as int32, how many came from each rank.

    Collective over ``process_set``; does not block, but a process's first collective waits for rank 0's first; not
    differentiable.

    Args:
        tensor: (rows, …); trailing dimensions and dtype are equal on all ranks. It must not be changed before ``wait``.
        splits: rows for each member, the first member's first, as an int32 tensor or a sequence of integers; default:
            equal parts. Rows beyond their sum are not sent.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle; its ``wait`` returns a pair: the received rows, a new tensor, the first member's first; and the number
        of rows from each member, an int32 tensor on the device of the tensor ``splits``, else on the CPU. ``wait``
        raises MismatchError where ranks' calls differ, and PeerError where a rank has ended, left or is late.

    Raises:
        SplitError: ``splits`` are not int32, not one number for each member, negative, or in sum more than the rows; or
            they are not given, and the number of members does not divide the rows.
        UsageError: ``tensor`` is a scalar or sparse; ``process_set`` is not registered, or this rank is no member of
            it; or ``tutti.init`` was not called.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    _refuse_sparse("alltoall", [tensor], name)
    _number(process_set)
    rows = _splits(tensor, splits, process_set.size(), _where("alltoall", name))
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")

    def convert(result: list[Any]) -> tuple[Tensor, Tensor]:
        return result[0], torch.tensor(result[1], dtype=torch.int32, device=device)

    sent = tensor[: sum(rows)]
    return _submit("alltoall", [sent], name, process_set, shapes=[tensor.shape[1:]], extents=rows, convert=convert)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = all_ranks,
) -> tuple[Tensor, Tensor]:
    """All-to-all: send ``splits[r]`` rows of ``tensor`` to the r-th member, and return the rows received.

    Collective over ``process_set``; blocks. Differentiable: the gradient of each row received goes back to the rank
    that sent the row, by another all-to-all.

    Args:
        tensor: (rows, …); trailing dimensions and dtype are equal on all ranks.
        splits: rows for each member, the first member's first, as an int32 tensor or a sequence of integers; default:
            equal parts. Rows beyond their sum are not sent.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.

    Returns:
        The received rows, a new tensor, the first member's first; and the number of rows from each member, an int32
        tensor on the device of the tensor ``splits``, else on the CPU.

    Raises:
        SplitError: ``splits`` are not int32, not one number for each member, negative, or in sum more than the rows; or
            they are not given, and the number of members does not divide the rows.
        UsageError: ``tensor`` is a scalar or sparse; ``process_set`` is not registered, or this rank is no member of
            it; or ``tutti.init`` was not called.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    received: list[Tensor] = []
    result = _differentiable(_AllToAll, (splits, name, process_set, received), [tensor])[0]
    return result, received[0]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    op: str = AVERAGE,
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = all_ranks,
) -> CollectiveHandle:
    """Start a reduce-scatter of several tensors as one call; ``wait()`` returns the list of results.

    Collective over ``process_set``; does not block, but a process's first collective waits for rank 0's first; not
    differentiable. Each result is this rank's part of the first dimension of the reduction; the first (rows mod ranks)
    ranks have one row more.

    Args:
        tensors: the same number on all ranks, each (rows, …), of equal shape and dtype on all ranks; must not be
            changed before ``wait``.
        op: ``average`` or ``sum``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        prescale: factor on the tensors before the reduction.
        postscale: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle with ``wait``, and ``done``, which does not block: whether the call has ended or failed. ``wait`` raises
        MismatchError where ranks' calls differ, and PeerError where a rank has ended, left or is late.

    Raises:
        UsageError: ``op`` is another operation or not defined for the dtype; a tensor is sparse or has no first
            dimension; tensors are on devices of several types; ``process_set`` is not registered, or this rank is no
            member of it; or ``tutti.init`` was not called.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    if op not in (AVERAGE, SUM):
        raise UsageError(
            f"Reducescatter currently only supports AVERAGE and SUM, not {op}", where=_where("reducescatter", name)
        )
    _check_tensors("reducescatter", tensors, name)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UsageError(
            "a reduce-scatter needs tensors with a first dimension",
            where=_where("reducescatter", name),
            remedy="reshape them",
        )
    return _submit(
        "reducescatter",
        tensors,
        name,
        process_set,
        op=ReduceOperation(op).value,
        prescale=float(prescale),
        postscale=float(postscale),
    )


def reducescatter_async(
    tensor: Tensor,
    op: str = AVERAGE,
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = all_ranks,
) -> CollectiveHandle:
    """Start a reduce-scatter of one tensor; ``wait()`` of the returned handle returns the result, a new tensor.

    Collective over ``process_set``; does not block, but a process's first collective waits for rank 0's first; not
    differentiable. The result is this rank's part of the first dimension of the reduction; the first (rows mod ranks)
    ranks have one row more.

    Args:
        tensor: (rows, …), of equal shape and dtype on all ranks; must not be changed before ``wait``.
        op: ``average`` or ``sum``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        prescale: factor on the tensors before the reduction.
        postscale: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle with ``wait``, and ``done``, which does not block: whether the call has ended or failed. ``wait`` raises
        MismatchError where ranks' calls differ, and PeerError where a rank has ended, left or is late.

    Raises:
        UsageError: ``op`` is another operation or not defined for the dtype; the tensor is sparse or has no first
            dimension; ``process_set`` is not registered, or this rank is no member of it; or ``tutti.init`` was not
            called.
        PeerError: a rank was lost earlier, so that no collective can be started.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    handle = grouped_reducescatter_async(
        [tensor], op, name, prescale=prescale, postscale=postscale, process_set=process_set
    )
    handle.convert = _first
    return handle


def reducescatter(
    tensor: Tensor,
    op: str = AVERAGE,
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = all_ranks,
) -> Tensor:
    """Reduce-scatter: reduce the tensors over the ranks and return this rank's part of the first dimension.

    Collective over ``process_set``; blocks. Differentiable: the gradient is the all-gather of the ranks' gradients,
    times prescale · postscale, and for a sum times the number of ranks.

    Args:
        tensor: (rows, …), of equal shape and dtype on all ranks.
        op: ``average`` or ``sum``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        prescale: factor on the tensors before the reduction.
        postscale: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        A tensor of shape (rows of this rank, …): ⌊rows / ranks⌋ rows, one more on each of the first (rows mod ranks)
        ranks.

    Raises:
        UsageError: ``op`` is another operation or not defined for the dtype; the tensor is sparse or has no first
            dimension; ``process_set`` is not registered, or this rank is no member of it; or ``tutti.init`` was not
            called.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    return _differentiable(_ReduceScatter, (op, name, float(prescale), float(postscale), process_set), [tensor])[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    op: str = AVERAGE,
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = all_ranks,
) -> list[Tensor]:
    """Reduce-scatter several tensors as one call: return this rank's part of the first dimension of each reduction.

    Collective over ``process_set``; blocks. Differentiable: each gradient is the all-gather of the ranks' gradients,
    times prescale · postscale, and for a sum times the number of ranks.

    Args:
        tensors: the same number on all ranks, each (rows, …), of equal shape and dtype on all ranks.
        op: ``average`` or ``sum``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        prescale: factor on the tensors before the reduction.
        postscale: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        For each of ``tensors`` a tensor of shape (rows of this rank, …): ⌊rows / ranks⌋ rows, one more on each of the
        first (rows mod ranks) ranks.

    Raises:
        UsageError: ``op`` is another operation or not defined for the dtype; a tensor is sparse or has no first
            dimension; tensors are on devices of several types; ``process_set`` is not registered, or this rank is no
            member of it; or ``tutti.init`` was not called.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    given = (op, name, float(prescale), float(postscale), process_set)
    return _differentiable(_ReduceScatter, given, list(tensors))


# --- control -------------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = all_ranks) -> None:
    """Block until all members of the process set have called this function. Collective over ``process_set``.

    Asynchronous collectives that were started before may still be pending afterwards.

    Args:
        process_set: ranks that take part; default: all ranks.

    Raises:
        UsageError: ``process_set`` is not registered, or this rank is no member of it, or ``tutti.init`` was not
            called.
        MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    number, session = _number(process_set), _session()
    call = CollectiveCall("barrier", session.name(number, "barrier"), number)
    session.submit(CollectiveHandle(call, session, [])).wait()


def join() -> int:
    """Declare that this rank has no more data, and contribute zeros to the other ranks' all-reduces; as in Horovod.

    For ranks with unequal numbers of batches. Collective over all ranks; blocks until every rank has joined. Until then
    the other ranks may all-reduce by sum, average or Adasum; their other collectives but barriers raise MismatchError.

    Returns:
        The global rank that joined last, the same on all ranks.

    Raises:
        UsageError: ``tutti.init`` was not called.
        PeerError: a rank has ended or left.
    """
    return _session().join()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, an ordered set of ranks, so that collectives can be called on it; make its process group.

    Collective over all ranks, members or not; blocks.

    Args:
        process_set: the set, or the global ranks of its members; equal on all ranks.

    Returns:
        ``process_set`` itself, or a new set of the given ranks; its ``process_set_id`` is set.

    Raises:
        UsageError: the set is empty, or names a rank twice or one that the job does not have; or ``tutti.init`` was not
            called.
        DuplicateSetError: a set of these ranks is known already.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, or did not make the call in time.
    """
    session = _session()
    process_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = tuple(process_set.ranks)
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < context.size():
        raise UsageError(f"{process_set} is not a set of ranks", remedy=f"give ranks from 0 to {context.size() - 1}")
    if ranks in session.sets.values():
        raise DuplicateSetError(f"Attempted to add a duplicate process set: {process_set}")
    call = CollectiveCall("add_process_set", session.name(0, "sets"), ranks=ranks, unnamed=True)
    process_set.process_set_id = int(session.submit(CollectiveHandle(call, session, [])).wait())
    return process_set


class DuplicateSetError(UsageError, ValueError):
    """Raised where a process set is added and one of the same ranks exists already."""


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set, an ordered set of ranks, so that collectives can no longer be called on it.

    Collective over all ranks, members or not; blocks.

    Args:
        process_set: the set, as ``add_process_set`` returned it; the same on all ranks.

    Returns:
        Whether the set was registered and is now removed. False, without communication, for a set that is not
        registered, and for the set of all ranks, which stays.

    Raises:
        UsageError: ``tutti.init`` was not called.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, or did not make the call in time.
    """
    session, number = _session(), process_set.process_set_id
    if number is None or number == 0 or number not in session.sets:
        return False
    call = CollectiveCall("remove_process_set", session.name(0, "sets"), root=number, unnamed=True)
    session.submit(CollectiveHandle(call, session, [])).wait()
    del session.sets[number]
    process_set.process_set_id = None
    return True


# --- objects -------------------------------------------------------------------------------------------------------


def _bytes_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def broadcast_object(value: Any, root: int = 0, name: str | None = None, *, process_set: ProcessSet = all_ranks) -> Any:
    """Broadcast a Python value from global rank ``root`` to the other ranks, without pickle, and return it.

    Collective over ``process_set``, an all-gather of bytes to which only ``root`` contributes; blocks. Values are None,
    bools, numbers, strings, bytes, lists, tuples, sets, dicts, tensors, NumPy arrays, and nestings of them.

    Args:
        value: on ``root``, the value to send; ignored on other ranks.
        root: global rank of the source; a member of ``process_set``.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.

    Returns:
        A value equal to that of ``root``, decoded from its bytes on every rank, ``root`` included.

    Raises:
        UsageError: the value is of another type, which the error names on every rank; ``process_set`` is not
            registered, or ``root`` or this rank is no member of it; or ``tutti.init`` was not called.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    _check_root(root, name, process_set)
    raw = encode_or_error(value, _where("broadcast_object", name)) if context.rank() == root else b""
    handle = _submit(
        "allgather",
        [_bytes_tensor(raw)],
        f"{name}.object" if name is not None else None,
        process_set,
        shapes=[torch.Size(())],
        extents=(len(raw),),
        root=int(root),
    )
    return decode_object(handle.wait()[0].numpy().tobytes())


def allgather_object(value: Any, name: str | None = None, *, process_set: ProcessSet = all_ranks) -> list[Any]:
    """All-gather a Python value from each rank, without pickle, and return the ranks' values in rank order.

    Collective over ``process_set``; blocks.

    Args:
        value: this rank's value, which may differ between ranks: None, a bool, number, string, bytes, list, tuple, set,
            dict, tensor or NumPy array, or a nesting of these.
        name: key that matches the ranks' calls, equal on all ranks; default: the order of calls without a name.
        process_set: ranks that take part; default: all ranks.

    Raises:
        UsageError: a rank's value is of another type; the error names rank and type, on every rank. Or ``process_set``
            is not registered, or this rank is no member of it, or ``tutti.init`` was not called.
        DuplicateNameError: a call with this name is still pending on this rank.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, left, or did not make the call in time.
    """
    raw = encode_or_error(value, _where("allgather_object", name))
    base = f"{name}.object" if name is not None else None
    handle = grouped_allgather_async([_bytes_tensor(raw), torch.tensor([len(raw)])], base, process_set=process_set)
    data, lengths = handle.wait()
    return [decode_object(part.numpy().tobytes()) for part in data.split(lengths.tolist())]


# --- gradients -----------------------------------------------------------------------------------------------------


def _differentiable(function: Any, given: tuple[Any, ...], tensors: list[Tensor]) -> list[Tensor]:
    found = function.apply(given, *tensors)
    return list(found) if isinstance(found, tuple) else [found]


def _translated(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward pass so that it raises the exceptions of the session's interface, such as Horovod's."""

    @wraps(backward)
    def call(*given: Any) -> Any:
        return _session().translated(backward)(*given)

    return call


def _grad_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> Any:
        op, name, prescale, postscale, process_set = ctx.given = arguments
        return tuple(
            grouped_allreduce_async(
                tensors, op, name, prescale=prescale, postscale=postscale, process_set=process_set
            ).wait()
        )

    @staticmethod
    @_translated
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, name, prescale, postscale, process_set = ctx.given
        if op not in (AVERAGE, SUM):
            raise UsageError(f"an all-reduce with {op} has no gradient", remedy="use sum or average")
        return None, *grouped_allreduce(
            gradients, op, _grad_name(name), prescale=prescale, postscale=postscale, process_set=process_set
        )


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> Any:
        name, process_set = ctx.given = arguments
        handle = grouped_allgather_async(tensors, name, process_set=process_set)
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(handle.wait())

    @staticmethod
    @_translated
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, process_set = ctx.given
        sizes = [math.prod(shape[:1]) for shape in ctx.shapes]
        counts = allgather_async(torch.tensor([sizes]), _grad_name(_grad_name(name)), process_set=process_set).wait()
        reduced = grouped_allreduce(gradients, AVERAGE, _grad_name(name), process_set=process_set)
        rank = process_set.rank()
        starts = counts[:rank].sum(0).tolist()
        return None, *(
            gradient[start : start + size].reshape(shape)
            for gradient, start, size, shape in zip(reduced, starts, sizes, ctx.shapes, strict=True)
        )


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], tensor: Tensor) -> Any:
        root, name, process_set = ctx.given = arguments
        return (broadcast_async(tensor, root, name, process_set=process_set).wait(),)

    @staticmethod
    @_translated
    def backward(ctx: Any, gradient: Tensor) -> Any:
        root, name, process_set = ctx.given
        reduced = allreduce(gradient, AVERAGE, _grad_name(name), process_set=process_set)
        return None, reduced if context.rank() == root else torch.zeros_like(reduced)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], tensor: Tensor) -> Any:
        splits, ctx.name, ctx.process_set, received = arguments
        handle = alltoall_async(tensor, splits, ctx.name, process_set=ctx.process_set)
        ctx.rows = len(tensor)
        result, ctx.received = handle.wait()
        received.append(ctx.received)
        return (result,)

    @staticmethod
    @_translated
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = alltoall(gradient, ctx.received, _grad_name(ctx.name), process_set=ctx.process_set)[0]
        if len(back) < ctx.rows:
            # Rows beyond the splits were not sent.
            back = torch.cat([back, back.new_zeros(ctx.rows - len(back), *back.shape[1:])])
        return None, back


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> Any:
        op, name, prescale, postscale, process_set = ctx.given = arguments
        return tuple(
            grouped_reducescatter_async(
                tensors, op, name, prescale=prescale, postscale=postscale, process_set=process_set
            ).wait()
        )

    @staticmethod
    @_translated
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, name, prescale, postscale, process_set = ctx.given
        factor = prescale * postscale * (process_set.size() if op == SUM else 1)
        return None, *grouped_allgather(
            [gradient * factor for gradient in gradients], _grad_name(name), process_set=process_set
        )
