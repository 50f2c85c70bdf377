"""Blocking collectives: ``tutti.allreduce``, ``tutti.allgather`` and so on, with their gradients.

Each is the asynchronous collective of its name (``async_collectives.py``, which says how ranks' calls are
matched and which arguments are refused) and a wait for the result. Those of tensors are differentiable: the backward of
an autograd function performs the collective that the gradient needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from tutti.comm.async_collectives import (
    AVERAGE,
    SUM,
    allgather_async,
    alltoall_async,
    broadcast_async,
    check_root,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    sparse_allreduce_async,
    submit_collective,
    where_called,
)
from tutti.comm.collective_call import CollectiveCall
from tutti.comm.collective_session import CollectiveHandle
from tutti.comm.current_session import current_session
from tutti.comm.object_codec import decode_object, encode_or_error
from tutti.comm.process_set import ProcessSet, all_ranks, registered_number
from tutti.errors import UsageError
from tutti.launcher import context

# --- collectives of tensors ------------------------------------------------------------------------------------------


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


def allgather(tensor: Tensor, name: str | None = None, *, process_set: ProcessSet = all_ranks) -> Tensor:
    """All-gather: concatenate the ranks' tensors along the first dimension, whose size may differ between ranks.

    Collective over ``process_set``; blocks. Differentiable: the gradient of ``tensor`` is this rank's rows of the
    average of the ranks' gradients. In ``run.backward`` and ``run.step``, which weight each rank's loss by its share of
    the batch, it is this rank's rows of their sum. Backward performs an all-reduce and an all-gather of the numbers of
    rows.

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

    Collective over ``process_set``; blocks. Differentiable: the gradient of each tensor is this rank's rows of the
    average of the ranks' gradients. In ``run.backward`` and ``run.step``, which weight each rank's loss by its share of
    the batch, it is this rank's rows of their sum. Backward performs an all-reduce and an all-gather of the numbers of
    rows.

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
    number, session = registered_number(process_set), current_session()
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
    return current_session().join()


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
    check_root(root, name, process_set)
    raw = encode_or_error(value, where_called("broadcast_object", name)) if context.rank() == root else b""
    handle = submit_collective(
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
    raw = encode_or_error(value, where_called("allgather_object", name))
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
        return current_session().translated(backward)(*given)

    return call


def _grad_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


_averaging: WeakSet[Any] = WeakSet()
"""Autograd nodes of gathers, broadcasts and reduce-scatters whose backwards average gradients, as Horovod's do."""


def _begin_gradient(ctx: Any) -> None:
    ctx.op = AVERAGE
    _averaging.add(ctx)


def sum_collective_gradients() -> None:
    """Make the backward of gathers, broadcasts and reduce-scatters sum the ranks' gradients instead of averaging them.

    Applies to the calls of ``allgather``, ``broadcast`` and ``reducescatter`` (grouped ones too) that this rank has
    made with gradients and not yet differentiated. By default their backward averages, as Horovod's does. Where each
    rank's loss is weighted by its share of the batch, the ranks' losses are terms of one sum, whose gradient is the sum
    of the ranks' gradients. Not collective; must be called on every rank before the backward.
    """
    for ctx in list(_averaging):
        ctx.op = SUM
    _averaging.clear()


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
        _begin_gradient(ctx)
        handle = grouped_allgather_async(tensors, name, process_set=process_set)
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(handle.wait())

    @staticmethod
    @_translated
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, process_set = ctx.given
        sizes = [math.prod(shape[:1]) for shape in ctx.shapes]
        counts = allgather_async(torch.tensor([sizes]), _grad_name(_grad_name(name)), process_set=process_set).wait()
        reduced = grouped_allreduce(gradients, ctx.op, _grad_name(name), process_set=process_set)
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
        _begin_gradient(ctx)
        return (broadcast_async(tensor, root, name, process_set=process_set).wait(),)

    @staticmethod
    @_translated
    def backward(ctx: Any, gradient: Tensor) -> Any:
        root, name, process_set = ctx.given
        reduced = allreduce(gradient, ctx.op, _grad_name(name), process_set=process_set)
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
        _begin_gradient(ctx)
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
        if ctx.op == SUM:
            factor /= process_set.size()
        return None, *grouped_allgather(
            [gradient * factor for gradient in gradients], _grad_name(name), process_set=process_set
        )


_DIFFERENTIABLE = frozenset(
    f"{each.__name__}Backward" for each in (_AllReduce, _AllGather, _Broadcast, _AllToAll, _ReduceScatter)
)


def is_collective_node(node: Any) -> bool:
    """Return whether an autograd node belongs to a collective of this module, whose backward is a collective, too.

    A check that one rank makes alone must not differentiate through it: the other ranks would not take part.

    Args:
        node: the node, such as ``tutti.allgather(tensor).grad_fn``.
    """
    return node.name() in _DIFFERENTIABLE
