"""Collectives of ``horovod.torch``, with integer handles, on ``tutti.comm.collectives``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from tutti.comm import async_collectives, collectives
from tutti.comm import process_set as process_sets
from tutti.comm.collective_call import ReduceOperation
from tutti.comm.current_session import current_session
from tutti.comm.process_set import ProcessSet
from tutti.comm.process_set import all_ranks as global_process_set
from tutti.horovod.common.exceptions import HorovodInternalError, translated
from tutti.horovod.torch.compression import Compression
from tutti.horovod.torch.handles import new_handle, poll, synchronize  # noqa: F401 (poll: as in Horovod)
from tutti.horovod.torch.job import (  # noqa: F401 (Horovod has these names here, too)
    ccl_built,
    check_initialized,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

T = TypeVar("T", bound=Callable[..., Any])

Average, Sum, Adasum = ReduceOperation.AVERAGE, ReduceOperation.SUM, ReduceOperation.ADASUM

Min, Max, Product = ReduceOperation.MIN, ReduceOperation.MAX, ReduceOperation.PRODUCT


class _Basics:
    """Horovod's object of the functions that a job has without tensors, such as ``init`` and ``rank``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(name) from None

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of each registered process set, by its number."""
        return {number: [*ranks] for number, ranks in current_session().sets.items()}


_basics = _Basics()


def _collective(function: T) -> T:
    """Decorate a collective: before ``init`` it raises ValueError, and afterwards Horovod's exceptions for tutti's."""

    @translated
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_initialized()
        return function(*args, **kwargs)

    return cast("T", call)


# --- process sets and control -----------------------------------------------------------------------------------------


@_collective
def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set (a set of ranks), so that collectives can be called on it.

    Collective over all ranks; blocks.

    Args:
        process_set: the set, or the global ranks of its members; equal on all ranks, whether they are members or not.

    Returns:
        The process set, whose ``process_set_id``, an integer that is equal on all ranks, identifies it in collectives.

    Raises:
        ValueError: ``init`` was not called, a set of these ranks is registered already, the set is empty, or ranks are
            out of range or named twice.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    return process_sets.add_process_set(process_set)


@_collective
def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set (a set of ranks), which collectives can then no longer use.

    Collective over all ranks; blocks.

    Args:
        process_set: the set, as ``add_process_set`` returned it; the same on all ranks, whether they are members or
            not.

    Returns:
        Whether the set was registered and is now removed; False also for the set of all ranks, which stays.

    Raises:
        ValueError: ``init`` was not called.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    return process_sets.remove_process_set(process_set)


@_collective
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of the process set have called this function. Collective over ``process_set``.

    The barrier does not wait for asynchronous collectives that were started before.

    Args:
        process_set: ranks that take part; default: all ranks.

    Raises:
        ValueError: ``init`` was not called, or the process set is not registered or does not have this rank as a
            member.
        HorovodInternalError: a rank is lost.
    """
    collectives.barrier(process_set)


@_collective
def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and contribute zeros to the other ranks' all-reduces.

    For ranks with unequal numbers of batches. Collective over all ranks; blocks until every rank has joined. Until then
    the other ranks may all-reduce by sum, average or Adasum; an average still divides by the number of all ranks. Their
    other collectives, except barriers, fail.

    Args:
        device: accepted for Horovod's signature; no effect, because the zeros are made on the device of the other
            ranks' tensors.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        ValueError: ``init`` was not called.
        HorovodInternalError: a rank has ended or left.
    """
    return collectives.join()


# --- all-reduce -------------------------------------------------------------------------------------------------------


def _operation(op: Any, average: bool | None) -> ReduceOperation:
    if average is not None:
        warnings.warn(
            "Parameter average has been replaced with op and will be removed in v1.0", DeprecationWarning, stacklevel=5
        )
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    return Average if op is None else ReduceOperation(op)


def _reduced(prescale_factor: float, postscale_factor: float, process_set: ProcessSet) -> dict[str, Any]:
    return {"prescale": prescale_factor, "postscale": postscale_factor, "process_set": process_set}


def _named(kind: str, name: str | None) -> str | None:
    return None if name is None else f"{kind}.{name}"


@_collective
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """All-reduce a tensor over the ranks: return postscale_factor · op(prescale_factor · tensor).

    Collective over ``process_set``; blocks. Differentiable for sums and averages: the gradient is all-reduced by the
    same operation and factors; a backward through another operation raises ValueError. Sparse COO tensors are summed or
    averaged by an all-gather of their indices and values, and are not differentiable.

    Args:
        tensor: tensor of equal shape and dtype on all ranks; not changed.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``; excludes ``op``.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        compression: compression of the tensors that are sent, such as ``Compression.fp16``; default: none.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; averages of integers are
            truncated.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        A new tensor of the shape and dtype of ``tensor``, equal on all ranks.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``average`` and ``op`` are both given, or ``op`` is unknown or does not reduce this dtype; the process set
            is not registered, or does not have this rank as a member; or ``Adasum`` is used with a number of ranks that
            is no power of two, or with integers.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    operation = _operation(op, average)
    compressed, ctx = compression.compress(tensor)
    given = _reduced(prescale_factor, postscale_factor, process_set)
    reduced = collectives.allreduce(compressed, operation, _named("allreduce", name), **given)
    decompressed: Tensor = compression.decompress(reduced, ctx)
    return decompressed


@_collective
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce of a tensor over the ranks, and return a handle for the result.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensor: tensor of equal shape and dtype on all ranks. Not to be changed before ``synchronize`` returns.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``; excludes ``op``.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; averages of integers are
            truncated.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns postscale_factor · op(prescale_factor · tensor) over
        the ranks.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; ``average`` and ``op`` are both given, or ``op`` is unknown or does not reduce this
            dtype; the process set is not registered, or does not have this rank as a member; or ``Adasum`` is used with
            a number of ranks that is no power of two, or with integers.
        HorovodInternalError: a rank is lost already.
    """
    given = _reduced(prescale_factor, postscale_factor, process_set)
    return new_handle(
        async_collectives.allreduce_async(tensor, _operation(op, average), _named("allreduce", name), **given)
    )


@_collective
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """All-reduce ``tensor`` in place, to postscale_factor · op(prescale_factor · tensor), and return it.

    Collective over ``process_set``; blocks. Not differentiable.

    Args:
        tensor: tensor of equal shape and dtype on all ranks. Overwritten.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``; excludes ``op``.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; averages of integers are
            truncated.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; ``average`` and ``op`` are both given, or ``op`` is unknown or does not reduce this
            dtype; the process set is not registered, or does not have this rank as a member; ``Adasum`` is used with a
            number of ranks that is no power of two, or with integers; or an expanded tensor is to be overwritten.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    handle = allreduce_async_(
        tensor, None, name, _operation(op, average), prescale_factor, postscale_factor, process_set
    )
    result: Tensor = synchronize(handle)
    return result


@_collective
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce of a tensor in place, and return a handle by which to wait for the result.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    The result is postscale_factor · op(prescale_factor · tensor) over the ranks.

    Args:
        tensor: tensor of equal shape and dtype on all ranks. Overwritten, and not to be used before ``synchronize``.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``; excludes ``op``.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; averages of integers are
            truncated.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns ``tensor``.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; ``average`` and ``op`` are both given, or ``op`` is unknown or does not reduce this
            dtype; the process set is not registered, or does not have this rank as a member; ``Adasum`` is used with a
            number of ranks that is no power of two, or with integers; or an expanded tensor is to be overwritten.
        HorovodInternalError: a rank is lost already.
    """
    given = _reduced(prescale_factor, postscale_factor, process_set)
    operation = _operation(op, average)
    return new_handle(
        async_collectives.allreduce_async(tensor, operation, _named("allreduce", name), in_place=True, **given)
    )


@_collective
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """All-reduce several tensors over the ranks as one call, and return the list of results, new tensors.

    Each result is postscale_factor · op(prescale_factor · tensor) over the ranks. Collective over ``process_set``;
    blocks. Differentiable for sums and averages: the gradient is all-reduced by the same operation and factors; a
    backward through another operation raises ValueError.

    Args:
        tensors: the same number on all ranks, each of equal shape and dtype on all ranks.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``; excludes ``op``.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        compression: compression of the tensors that are sent, such as ``Compression.fp16``; default: none.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; averages of integers are
            truncated.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; a tensor
            is sparse; ``average`` and ``op`` are both given, or ``op`` is unknown or does not reduce this dtype; the
            process set is not registered, or does not have this rank as a member; ``Adasum`` is used with a number of
            ranks that is no power of two, or with integers; or the tensors are on devices of different types.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    operation = _operation(op, average)
    compressed = [compression.compress(tensor) for tensor in tensors]
    given = _reduced(prescale_factor, postscale_factor, process_set)
    reduced = collectives.grouped_allreduce([t for t, _ in compressed], operation, _named("allreduce", name), **given)
    return [compression.decompress(t, ctx) for t, (_, ctx) in zip(reduced, compressed, strict=True)]


@_collective
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce of several tensors as one call, and return a handle for the results.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensors: the same number on all ranks, each of equal shape and dtype on all ranks. Not to be changed before
            ``synchronize`` returns.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``; excludes ``op``.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; averages of integers are
            truncated.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns the list of reductions.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; a tensor
            is sparse; ``average`` and ``op`` are both given, or ``op`` is unknown or does not reduce this dtype; the
            process set is not registered, or does not have this rank as a member; ``Adasum`` is used with a number of
            ranks that is no power of two, or with integers; or the tensors are on devices of different types.
        HorovodInternalError: a rank is lost already.
    """
    given = _reduced(prescale_factor, postscale_factor, process_set)
    operation = _operation(op, average)
    return new_handle(async_collectives.grouped_allreduce_async(tensors, operation, _named("allreduce", name), **given))


@_collective
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """All-reduce several tensors in place as one call, and return the list of them.

    Collective over ``process_set``; blocks. Not differentiable.

    Each result is postscale_factor · op(prescale_factor · tensor) over the ranks.

    Args:
        tensors: the same number on all ranks, each of equal shape and dtype on all ranks. Overwritten.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``; excludes ``op``.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; averages of integers are
            truncated.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; a tensor
            is sparse; ``average`` and ``op`` are both given, or ``op`` is unknown or does not reduce this dtype; the
            process set is not registered, or does not have this rank as a member; ``Adasum`` is used with a number of
            ranks that is no power of two, or with integers; the tensors are on devices of different types; or an
            expanded tensor is to be overwritten.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    handle = grouped_allreduce_async_(
        tensors, None, name, _operation(op, average), prescale_factor, postscale_factor, process_set
    )
    result: list[Tensor] = synchronize(handle)
    return result


@_collective
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce of several tensors in place as one call, and return a handle by which to wait for it.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Each result is postscale_factor · op(prescale_factor · tensor) over the ranks.

    Args:
        tensors: the same number on all ranks, each of equal shape and dtype on all ranks. Overwritten, and not to be
            used before ``synchronize``.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``; excludes ``op``.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; averages of integers are
            truncated.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns ``tensors``.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; a tensor
            is sparse; ``average`` and ``op`` are both given, or ``op`` is unknown or does not reduce this dtype; the
            process set is not registered, or does not have this rank as a member; ``Adasum`` is used with a number of
            ranks that is no power of two, or with integers; the tensors are on devices of different types; or an
            expanded tensor is to be overwritten.
        HorovodInternalError: a rank is lost already.
    """
    given = _reduced(prescale_factor, postscale_factor, process_set)
    operation = _operation(op, average)
    return new_handle(
        async_collectives.grouped_allreduce_async(tensors, operation, _named("allreduce", name), in_place=True, **given)
    )


@_collective
def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: Any = None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to sum or average sparse tensors over the ranks, and return a function that waits for the result.

    Collective over ``process_set``; does not block; not differentiable. Performed as an all-gather of indices and
    values, before which shapes, dtypes and operations of the ranks are compared.

    Args:
        tensor: sparse COO tensor, of equal shape and dtype on all ranks. Not to be changed before the returned function
            has returned.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        op: ``Average`` (default) or ``Sum``, the same on all ranks.
        process_set: ranks that take part; default: all ranks.

    Returns:
        A function that blocks until the reduction is complete and returns it, sparse and coalesced; ``synchronize``
        takes it, too. The function raises HorovodInternalError where ranks' calls differ in shape, dtype or
        ``op``, or a rank is lost.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; the
            process set is not registered or does not have this rank as a member; or ``op`` is another operation.
        RuntimeError: ``tensor`` is dense.
        HorovodInternalError: a rank is lost already.
    """
    wait = async_collectives.sparse_allreduce_async(
        tensor, _operation(op, None), _named("allreduce", name), process_set=process_set
    )
    return translated(wait)


# --- other collectives ------------------------------------------------------------------------------------------------


@_collective
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, whose size may differ between ranks.

    Collective over ``process_set``; blocks. Differentiable: the gradient of ``tensor`` is this rank's rows of the
    average of the ranks' gradients. Backward is collective, too: an all-gather of the numbers of rows and an all-reduce
    of the gradients.

    Args:
        tensor: shape (rows, …); trailing dimensions and dtype are equal on all ranks. A scalar counts as one row.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Tensor of shape (sum of the ranks' rows, …): the ranks' tensors in rank order.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; or the process set is not registered or does not have this rank as a member.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    return collectives.allgather(tensor, _named("allgather", name), process_set=process_set)


@_collective
def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an all-gather of a tensor from each rank, and return a handle for the result.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensor: shape (rows, …); trailing dimensions and dtype are equal on all ranks. A scalar counts as one row. Not
            to be changed before ``synchronize`` returns.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns the ranks' tensors, concatenated along the first
        dimension in rank order.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; or the process set is not registered or does not have this rank as a member.
        HorovodInternalError: a rank is lost already.
    """
    return new_handle(async_collectives.allgather_async(tensor, _named("allgather", name), process_set=process_set))


@_collective
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Concatenate the ranks' tensors along the first dimension, for several tensors by one call.

    Collective over ``process_set``; blocks. Differentiable: the gradient of each tensor is this rank's rows of the
    average of the ranks' gradients. Backward is collective, too: an all-gather of the numbers of rows and an all-reduce
    of the gradients.

    Args:
        tensors: the same number on all ranks, of shapes (rows, …); trailing dimensions and dtypes are equal on all
            ranks. A scalar counts as one row.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        For each of ``tensors`` the ranks' tensors in rank order, of shape (sum of the ranks' rows, …).

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; a tensor
            is sparse; the process set is not registered or does not have this rank as a member; or the tensors are on
            devices of different types.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    return collectives.grouped_allgather(tensors, _named("allgather", name), process_set=process_set)


@_collective
def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an all-gather of several tensors as one call, and return a handle for the results.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensors: the same number on all ranks, of shapes (rows, …); trailing dimensions and dtypes are equal on all
            ranks. A scalar counts as one row. Not to be changed before ``synchronize`` returns.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns for each of ``tensors`` the ranks' tensors,
        concatenated along the first dimension in rank order.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; a tensor
            is sparse; the process set is not registered or does not have this rank as a member; or the tensors are on
            devices of different types.
        HorovodInternalError: a rank is lost already.
    """
    return new_handle(
        async_collectives.grouped_allgather_async(tensors, _named("allgather", name), process_set=process_set)
    )


@_collective
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Broadcast the tensor of global rank ``root_rank`` and return it as a new tensor.

    Collective over ``process_set``; blocks. Differentiable: backward all-reduces the gradients; on ``root_rank`` the
    result is the average of the ranks' gradients, elsewhere zero.

    Args:
        tensor: tensor of equal shape and dtype on all ranks; the values of ``root_rank`` are sent.
        root_rank: global rank of the source, a member of the process set.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; the process set is not registered or does not have this rank as a member; or
            ``root_rank`` is no member of it.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    return collectives.broadcast(tensor, root_rank, _named("broadcast", name), process_set=process_set)


@_collective
def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast of a tensor from ``root_rank``, and return a handle for the result.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensor: tensor of equal shape and dtype on all ranks; the values of ``root_rank`` are sent. Not to be changed
            before ``synchronize`` returns.
        root_rank: global rank of the source, a member of the process set.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns a new tensor with the values of ``root_rank``.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; the process set is not registered or does not have this rank as a member; or
            ``root_rank`` is no member of it.
        HorovodInternalError: a rank is lost already.
    """
    return new_handle(
        async_collectives.broadcast_async(tensor, root_rank, _named("broadcast", name), process_set=process_set)
    )


@_collective
def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Broadcast ``tensor`` in place from global rank ``root_rank`` and return it.

    Collective over ``process_set``; blocks. Not differentiable.

    Args:
        tensor: tensor of equal shape and dtype on all ranks; the values of ``root_rank`` are sent, and overwrite those
            of the other ranks.
        root_rank: global rank of the source, a member of the process set.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; the process set is not registered or does not have this rank as a member;
            ``root_rank`` is no member of it; or ``tensor`` is expanded, on any rank.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


@_collective
def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast of a tensor in place from ``root_rank``, and return a handle by which to wait for it.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensor: tensor of equal shape and dtype on all ranks; the values of ``root_rank`` are sent, and overwrite those
            of the other ranks. Not to be used before ``synchronize``.
        root_rank: global rank of the source, a member of the process set.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns ``tensor``.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; the process set is not registered or does not have this rank as a member;
            ``root_rank`` is no member of it; or ``tensor`` is expanded, on any rank.
        HorovodInternalError: a rank is lost already.
    """
    named = _named("broadcast", name)
    return new_handle(
        async_collectives.broadcast_async(tensor, root_rank, named, process_set=process_set, in_place=True)
    )


@_collective
def start_broadcasts(
    tensors: Sequence[Tensor], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast of several tensors in place as one collective, and return a handle by which to wait.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensors: of one device type, each of equal shape and dtype on all ranks; the values of ``root_rank`` are sent,
            and overwrite those of the other ranks. Not to be used before ``synchronize``.
        root_rank: global rank of the source, a member of the process set.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns ``tensors``.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; a tensor
            is sparse; the process set is not registered or does not have this rank as a member; ``root_rank`` is no
            member of it; the tensors are on devices of different types; or a tensor is expanded, on any rank.
        HorovodInternalError: a rank is lost already.
    """
    named = _named("broadcast", name)
    return new_handle(
        async_collectives.grouped_broadcast_async(tensors, root_rank, named, process_set=process_set, in_place=True)
    )


@_collective
def alltoall(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[r]`` rows of a tensor to each rank r, in order, and return the received rows.

    Collective over ``process_set``; blocks. Differentiable: the gradient of a received row goes back, by an all-to-all,
    to the rank that sent it; rows that were not sent get zeros.

    Args:
        tensor: shape (rows, …); trailing dimensions and dtype are equal on all ranks.
        splits: int32 tensor, number of rows for each member of the process set, in rank order; rows beyond their sum
            are not sent. None: equally many rows for each.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        The received rows, in the order of the ranks that sent them; with ``splits`` a pair of these rows and an int32
        tensor with the number of rows from each member.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; the process set is not registered or does not have this rank as a member; ``tensor``
            is a scalar; ``splits`` are not int32, not one number of at least 0 for each rank, or in sum more than the
            rows; or ``splits`` is None and the number of ranks does not divide the rows.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    result = collectives.alltoall(tensor, splits, _named("alltoall", name), process_set=process_set)
    return result[0] if splits is None else result


@_collective
def alltoall_async(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-to-all, which sends some rows of a tensor to each rank, and return a handle for the result.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensor: shape (rows, …); trailing dimensions and dtype are equal on all ranks. Not to be changed before
            ``synchronize`` returns.
        splits: int32 tensor, number of rows for each member of the process set, in rank order; rows beyond their sum
            are not sent. None: equally many rows for each.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns, with and without ``splits``, a pair of the received
        rows, in the order of the ranks that sent them, and an int32 tensor with the number of rows from each member.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; the process set is not registered or does not have this rank as a member; ``tensor``
            is a scalar; ``splits`` are not int32, not one number of at least 0 for each rank, or in sum more than the
            rows; or ``splits`` is None and the number of ranks does not divide the rows.
        HorovodInternalError: a rank is lost already.
    """
    return new_handle(
        async_collectives.alltoall_async(tensor, splits, _named("alltoall", name), process_set=process_set)
    )


def _scatters(op: Any) -> ReduceOperation:
    operation = ReduceOperation(op)
    if operation not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    return operation


@_collective
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over the ranks and return this rank's slice along the first dimension.

    Collective over ``process_set``; blocks. Differentiable: the gradient is the all-gather of the ranks' gradients,
    times both factors, and for a sum times the number of ranks.

    Args:
        tensor: shape (rows, …), of equal shape and dtype on all ranks.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        compression: compression of the tensors that are sent, such as ``Compression.fp16``; default: none.
        op: ``Average`` (default) or ``Sum``; averages of integers are truncated.
        process_set: ranks that take part; default: all ranks.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.

    Returns:
        New tensor of shape (rows of this rank, …); the first (rows mod ranks) ranks have one row more than the others.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; the process set is not registered or does not have this rank as a member; ``tensor``
            is a scalar; or ``op`` is no operation of Horovod's.
        HorovodInternalError: ``op`` is another operation of Horovod's, ranks' calls differ, or a rank is lost.
    """
    compressed, ctx = compression.compress(tensor)
    given = _reduced(prescale_factor, postscale_factor, process_set)
    reduced = collectives.reducescatter(compressed, _scatters(op), _named("reducescatter", name), **given)
    decompressed: Tensor = compression.decompress(reduced, ctx)
    return decompressed


@_collective
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reduce-scatter of a tensor, and return a handle for this rank's slice of the reduction.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensor: shape (rows, …), of equal shape and dtype on all ranks. Not to be changed before ``synchronize``
            returns.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        op: ``Average`` (default) or ``Sum``; averages of integers are truncated.
        process_set: ranks that take part; default: all ranks.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns this rank's rows of the reduction; the first (rows
        mod ranks) ranks have one row more than the others.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank;
            ``tensor`` is sparse; the process set is not registered or does not have this rank as a member; ``tensor``
            is a scalar; or ``op`` is no operation of Horovod's.
        HorovodInternalError: ``op`` is another operation of Horovod's, or a rank is lost already.
    """
    given = _reduced(prescale_factor, postscale_factor, process_set)
    return new_handle(
        async_collectives.reducescatter_async(tensor, _scatters(op), _named("reducescatter", name), **given)
    )


@_collective
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce several tensors over the ranks by one call and return this rank's slice of each.

    Collective over ``process_set``; blocks. Differentiable: the gradient is the all-gather of the ranks' gradients,
    times both factors, and for a sum times the number of ranks.

    Args:
        tensors: the same number on all ranks, each of shape (rows, …), of equal shape and dtype on all ranks.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        compression: compression of the tensors that are sent, such as ``Compression.fp16``; default: none.
        op: ``Average`` (default) or ``Sum``; averages of integers are truncated.
        process_set: ranks that take part; default: all ranks.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.

    Returns:
        Tensor of shape (rows of this rank, …) for each of ``tensors``; the first (rows mod ranks) ranks have one row
        more than the others.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; a tensor
            is sparse; the process set is not registered or does not have this rank as a member; a tensor is a scalar;
            the tensors are on devices of different types; or ``op`` is no operation of Horovod's.
        HorovodInternalError: ``op`` is another operation of Horovod's, ranks' calls differ, or a rank is lost.
    """
    compressed = [compression.compress(tensor) for tensor in tensors]
    given = _reduced(prescale_factor, postscale_factor, process_set)
    named = _named("reducescatter", name)
    reduced = collectives.grouped_reducescatter([t for t, _ in compressed], _scatters(op), named, **given)
    return [compression.decompress(t, ctx) for t, (_, ctx) in zip(reduced, compressed, strict=True)]


@_collective
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reduce-scatter of several tensors as one call, and return a handle for this rank's slices.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensors: the same number on all ranks, each of shape (rows, …), of equal shape and dtype on all ranks. Not to be
            changed before ``synchronize`` returns.
        name: name by which the ranks' calls are matched; None: calls without a name are matched by their order.
        op: ``Average`` (default) or ``Sum``; averages of integers are truncated.
        process_set: ranks that take part; default: all ranks.
        prescale_factor: factor on the tensors before the reduction.
        postscale_factor: factor on the result after it.

    Returns:
        Handle for ``poll`` and for ``synchronize``, which returns the list of this rank's rows of each reduction;
        the first (rows mod ranks) ranks have one row more than the others.

    Raises:
        ValueError: ``init`` was not called; a call of this kind named ``name`` is still pending on this rank; a tensor
            is sparse; the process set is not registered or does not have this rank as a member; a tensor is a scalar;
            the tensors are on devices of different types; or ``op`` is no operation of Horovod's.
        HorovodInternalError: ``op`` is another operation of Horovod's, or a rank is lost already.
    """
    given = _reduced(prescale_factor, postscale_factor, process_set)
    return new_handle(
        async_collectives.grouped_reducescatter_async(tensors, _scatters(op), _named("reducescatter", name), **given)
    )
