"""Asynchronous collectives: ``tutti.allreduce_async`` and so on, which start a call and return a handle.

Calls with one name belong together, in whatever order ranks make them; calls without a name are matched by the order
of such calls. Where ranks' calls of a name differ in kind, dtype, shape or arguments nothing is sent, every rank raises
MismatchError with both calls, and the job goes on. None of the functions is differentiable. Every function raises
UsageError, and sends nothing, for an argument that is no tensor where a tensor is expected, for a tensor on the meta
device, and within ``collectives_refused``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tutti.comm.collective_call import CollectiveCall, ReduceOperation
from tutti.comm.collective_execution import finish_reduction, scale
from tutti.comm.collective_session import CollectiveHandle
from tutti.comm.current_session import current_session
from tutti.comm.process_set import ProcessSet, all_ranks, registered_number
from tutti.errors import UsageError
from tutti.launcher import context

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


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def where_called(kind: str, name: str | None) -> str:
    """Return a text for an error message that names this rank and the collective that it has called.

    Args:
        kind: the collective, such as ``allreduce``.
        name: name of the call; None for a call without one.
    """
    return f"rank {context.rank()}, {kind} " + (f"'{name}'" if name is not None else "without a name")


def submit_collective(
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
    """Describe a collective of dense tensors and hand it to the engine, which runs it once all ranks have called it.

    Args:
        kind: the collective, such as ``allreduce``.
        inputs: this rank's tensors.
        name: name of the call; None for a call that is matched by its order.
        process_set: ranks that take part.
        outputs: tensors into which the results are written; None for new ones.
        convert: makes the value that ``wait`` returns of the list of results; None: ``wait`` returns the list itself.
        shapes: shapes that are compared between ranks, in the order of ``inputs``; None for the shapes of the inputs.
        given: further attributes of the ``CollectiveCall``, such as ``op`` and ``root``.

    Returns:
        The handle of the started call, whose ``wait`` blocks and returns the results.

    Raises:
        UsageError: ``inputs`` are no dense tensors with values, or are on devices of several types; ``op`` is not
            defined for a dtype; an output is expanded; or ``process_set`` does not have this rank as a member.
        DuplicateNameError: a call with this name is still pending on this rank.
    """
    number, session = registered_number(process_set), current_session()
    _refuse_sparse(kind, inputs, name)
    devices = {device.type for device in {tensor.device for tensor in inputs}}
    if len(devices) > 1:
        raise UsageError(
            f"tensors of one {kind} are on {' and '.join(sorted(devices))}",
            where=where_called(kind, name),
            remedy="move them to one device",
        )
    dtypes = tuple([_name_of(tensor.dtype) for tensor in inputs])
    if (reduced := _REDUCED.get(given.get("op", ""))) is not None and not reduced.issuperset(dtypes):
        raise UsageError(
            f"Tensor type {next(dtype for dtype in dtypes if dtype not in reduced)} is not supported by {given['op']}",
            where=where_called(kind, name),
            remedy="convert the tensor, or use another operation",
        )
    # Of several places that are one in memory, a copy into the tensor would leave any one.
    if outputs is not None and any(not tensor.is_contiguous() and 0 in tensor.stride() for tensor in outputs):
        raise UsageError(
            "Tensor is required to be contiguous where the result is written into an expanded tensor",
            where=where_called(kind, name),
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
                where=where_called(kind, name),
                remedy="give torch.tensor(…), or use allgather_object or broadcast_object",
            )


def _refuse_sparse(kind: str, tensors: Sequence[Tensor], name: str | None) -> None:
    """Raise UsageError for tensors that are not dense, at which the engine would fail with all later collectives."""
    _check_tensors(kind, tensors, name)
    for tensor in tensors:
        if tensor.is_meta:
            raise UsageError(
                "a tensor on the meta device has no values",
                where=where_called(kind, name),
                remedy="move the model to a device by to_empty(), and initialise it",
            )
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"a tensor of layout {str(tensor.layout).removeprefix('torch.')} cannot be given to this collective",
                where=where_called(kind, name),
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
        registered_number(process_set)
        size = process_set.size()
        if size & (size - 1):
            raise UsageError(
                f"Adasum needs a power of two of ranks, not {size}",
                where=where_called("allreduce", name),
                remedy="use sum or average, or a process set",
            )
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise UsageError(
                "Adasum needs floating point tensors", where=where_called("allreduce", name), remedy="use sum"
            )
    return submit_collective(
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
            where=where_called("allreduce", name),
            remedy="use sum or average, or to_dense()",
        )
    _check_tensors("allreduce", [tensor], name)
    if not tensor.is_sparse:
        raise UsageError(
            f"the tensor has layout {tensor.layout}, and no sparse COO layout",
            where=where_called("allreduce", name),
            remedy="use allreduce",
        )
    tensor = tensor.detach().coalesce()
    base = name if name is not None else current_session().name(registered_number(process_set), "sparse")
    rows = [tensor.indices().t().contiguous(), scale(tensor.values(), prescale)]
    handle = submit_collective(
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


# --- all-gather, broadcast, all-to-all, reduce-scatter ---------------------------------------------------------------


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
    return submit_collective(
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
    check_root(root, name, process_set)
    tensors = list(tensors)
    _refuse_sparse("broadcast", tensors, name)
    outputs = [t.detach() if in_place else t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
    convert = (lambda _: tensors) if in_place else None
    return submit_collective("broadcast", tensors, name, process_set, outputs=outputs, convert=convert, root=int(root))


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


def check_root(root: int, name: str | None, process_set: ProcessSet) -> None:
    """Raise UsageError if the root of a broadcast, or this rank, is no member of the process set.

    Args:
        root: global rank of the source.
        name: name of the call, for the message.
        process_set: ranks that take part.
    """
    registered_number(process_set)
    if root not in process_set.ranks:
        raise UsageError(
            f"root rank {root} is not in {process_set}",
            where=where_called("broadcast", name),
            remedy="give the global rank of a member",
        )


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
    registered_number(process_set)
    rows = _splits(tensor, splits, process_set.size(), where_called("alltoall", name))
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")

    def convert(result: list[Any]) -> tuple[Tensor, Tensor]:
        return result[0], torch.tensor(result[1], dtype=torch.int32, device=device)

    sent = tensor[: sum(rows)]
    return submit_collective(
        "alltoall", [sent], name, process_set, shapes=[tensor.shape[1:]], extents=rows, convert=convert
    )


class SplitError(UsageError, ValueError):
    """Raised where the splits (rows for each rank) of an all-to-all do not fit its tensor."""


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
            f"Reducescatter currently only supports AVERAGE and SUM, not {op}",
            where=where_called("reducescatter", name),
        )
    _check_tensors("reducescatter", tensors, name)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UsageError(
            "a reduce-scatter needs tensors with a first dimension",
            where=where_called("reducescatter", name),
            remedy="reshape them",
        )
    return submit_collective(
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
