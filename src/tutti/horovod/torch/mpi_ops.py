"""Queries and collectives of ``horovod.torch``, with integer handles, on ``tutti.comm.collectives``."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from tutti.comm import collectives
from tutti.comm.collective_call import ReduceOperation
from tutti.comm.collective_engine import abandon_engine, engine, interrupt_engine
from tutti.comm.collective_session import CollectiveHandle, CollectiveSession
from tutti.comm.collectives import ProcessSet
from tutti.comm.collectives import all_ranks as global_process_set
from tutti.comm.negotiation import SessionOptions
from tutti.device import collective_library_version, has_toolkit
from tutti.errors import PeerError, UsageError
from tutti.horovod.common.exceptions import HorovodInternalError
from tutti.horovod.installing import export_rank
from tutti.horovod.torch.collective_timeline import CollectiveTimeline
from tutti.horovod.torch.compression import Compression
from tutti.launcher import context
from tutti.launcher.membership import current_membership

log = logging.getLogger("tutti.elastic")

T = TypeVar("T", bound=Callable[..., Any])

Average, Sum, Adasum = ReduceOperation.AVERAGE, ReduceOperation.SUM, ReduceOperation.ADASUM
Min, Max, Product = ReduceOperation.MIN, ReduceOperation.MAX, ReduceOperation.PRODUCT

_ATTEMPTS = 20
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_session: CollectiveSession | None = None
_homogeneous = True
_timeline: CollectiveTimeline | None = None
_handles: dict[int, CollectiveHandle] = {}
_numbers = itertools.count()


def translated(function: T) -> T:
    """Decorate a function so that it raises Horovod's exceptions instead of tutti's.

    ``PeerError`` (a failed collective, mismatched calls included) becomes HorovodInternalError, ``UsageError`` becomes
    ValueError; the cause is kept.

    Returns:
        A function with the arguments and result of ``function``.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PeerError as error:
            raise HorovodInternalError(str(error)) from error
        except UsageError as error:
            if isinstance(error, ValueError):
                raise
            raise ValueError(str(error)) from error

    return call  # type: ignore[return-value]


def check_initialized() -> None:
    """Raise ValueError, with Horovod's message, if this process has not called ``init`` or has called ``shutdown``."""
    if _session is None:
        raise ValueError(NOT_INITIALIZED)


# --- the job -------------------------------------------------------------------------------------------------------


def _options() -> SessionOptions:
    def number(name: str, default: float) -> float:
        text = os.environ.get(f"HOROVOD_{name}", "")
        try:
            return float(text) if text else default
        except ValueError:
            raise ValueError(f"HOROVOD_{name} is '{text}'; it must be a number") from None

    off = os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
    return SessionOptions(
        warn=0.0 if off else number("STALL_CHECK_TIME_SECONDS", 60.0),
        limit=0.0 if off else number("STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        fusion=int(number("FUSION_THRESHOLD", 64 << 20)),
        capacity=int(number("CACHE_CAPACITY", 1024)),
    )


@translated
def init(comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Join the job that the environment describes and start the thread that runs collectives, as ``hvd.init``.

    Collective over all ranks; blocks until all have called it. A second call does nothing. In an elastic job, whose set
    of ranks changes while it runs, this function calls ``rejoin``, which joins the next set, and passes on its errors.

    Args:
        comm: None, an empty list, or the list of all ranks. Lists of some ranks and MPI communicators are refused.
        process_sets: process sets that this call registers, as objects or lists of global ranks, equal on all ranks;
            the text ``"dynamic"`` has no effect, because sets can always be added later; None: no sets.

    Raises:
        ValueError: two process sets have the same ranks, a set is empty or names a rank that does not exist, ``comm``
            is refused, a variable such as ``HOROVOD_FUSION_THRESHOLD`` is not a number, or ``tutti.init`` refuses the
            environment, such as variables of the launcher that contradict each other.
        HorovodInternalError: the other ranks did not arrive in time, or the ranks' process sets differ.
        OSError: on rank 0, the file that ``HOROVOD_TIMELINE`` names cannot be written.
    """
    if _session is not None:
        return
    if current_membership() is not None:
        rejoin(failed=False, process_sets=process_sets)
        return
    _join(comm, process_sets)


@translated
def rejoin(failed: bool, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Leave the present set of ranks of an elastic job, and join the set that replaces it.

    Collective over the ranks of the next set; blocks until it is complete. Tries again if ranks are lost meanwhile. To
    be called in elastic jobs only, where the launcher's elastic driver decides which ranks the next set has.

    Args:
        failed: whether a collective of the present set failed, so that its other ranks must be interrupted.
        process_sets: process sets that this call registers, as objects or lists of global ranks, equal on all ranks;
            texts and None add none.

    Raises:
        ValueError: two process sets have the same ranks, or a set is empty or names a rank that does not exist.
        HorovodInternalError: the ranks could not join each other in 21 attempts, or the launcher has ended.
        SystemExit: there is no place for this rank, because its slot was removed, or because other ranks have finished
            training before this rank became a member; the code is 0.
    """
    member = current_membership()
    assert member is not None
    member.on_lost = interrupt_engine
    for attempt in itertools.count():
        member.join(failed, _abandon)
        try:
            _join(None, process_sets)
            member.check()
            export_rank(os.environ)
            return
        except (PeerError, RuntimeError, TimeoutError) as error:
            if attempt == _ATTEMPTS:
                raise HorovodInternalError(str(error)) from error
            log.warning("the ranks could not join each other, and try again: %s", error)
            failed = True


def _abandon() -> None:
    """Give up the connections of a generation."""
    global _session
    _session = None
    collectives.use_session(None)
    _handles.clear()
    abandon_engine()
    context.abandon_world()


def _join(comm: Any, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    global _session, _homogeneous
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    made = [given if isinstance(given, ProcessSet) else ProcessSet(given) for given in sets]
    context.init()
    whole = list(range(context.size()))
    if comm is not None and not (isinstance(comm, list) and (not comm or sorted(comm) == whole)):
        raise ValueError("init(comm=) serves the list of all ranks only; use process_sets for a part of the ranks")
    known = [whole]
    for given in made:
        if given.ranks in known:
            raise ValueError(f"Attempted to add a duplicate process set: {given}")
        known.append(given.ranks)
    running = engine()
    if (member := current_membership()) is not None:
        # A loss before now found no engine to interrupt.
        member.check()
    _session = running.open_session(_options())
    _session.translated = translated
    collectives.use_session(_session)
    collectives.barrier()
    running.make_group()
    sizes = collectives.allgather_object(context.local_size(), "processes of the node")
    _homogeneous = len({*sizes}) == 1
    for given in made:
        collectives.add_process_set(given)
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC":
        start_timeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))


def shutdown() -> None:
    """Leave the job; pending collectives that not all ranks have called then fail on all ranks.

    Waits until rank 0, which coordinates the collectives, has taken note, but not for other ranks to leave. ``init``
    can join again afterwards. Does nothing before ``init``. Also called at the exit of the process.
    """
    global _session
    stop_timeline()
    leaving, _session = _session, None
    if leaving is None:
        return
    collectives.use_session(None)
    leaving.close()
    _handles.clear()


atexit.register(shutdown)


def is_initialized() -> bool:
    """Return whether this process has called ``init`` and not ``shutdown`` since."""
    return _session is not None


def rank() -> int:
    """Return this process's rank in the job, from 0. Raises ValueError before ``init``."""
    check_initialized()
    return context.rank()


def size() -> int:
    """Return the number of processes in the job. Raises ValueError before ``init``."""
    check_initialized()
    return context.size()


def local_rank() -> int:
    """Return this process's rank on its node, from 0. Raises ValueError before ``init``."""
    check_initialized()
    return context.local_rank()


def local_size() -> int:
    """Return the number of the job's processes on this node. Raises ValueError before ``init``."""
    check_initialized()
    return context.local_size()


def cross_rank() -> int:
    """Return the index of this process's node, from 0. Raises ValueError before ``init``."""
    check_initialized()
    return context.cross_rank()


def cross_size() -> int:
    """Return the number of nodes in the job. Raises ValueError before ``init``."""
    check_initialized()
    return context.cross_size()


def is_homogeneous() -> bool:
    """Return whether all nodes of the job have the same number of processes; the same answer on all ranks.

    No communication: ``init`` has gathered the numbers. Raises ValueError before ``init``.
    """
    check_initialized()
    return _homogeneous


def mpi_threads_supported() -> bool:
    """Return False, as Horovod's query whether MPI supports threads: tutti's collectives use no MPI."""
    return False


def mpi_enabled() -> bool:
    """Return False, as Horovod's query whether MPI is in use: tutti's collectives use no MPI."""
    return False


def mpi_built() -> bool:
    """Return False, as Horovod's query whether it was built with MPI: tutti's collectives use no MPI."""
    return False


def gloo_enabled() -> bool:
    """Return True, as Horovod's query whether Gloo is in use: it carries the collectives of CPU tensors."""
    return True


def gloo_built() -> bool:
    """Return True, as Horovod's query whether it was built with Gloo, which carries the collectives of CPU tensors."""
    return True


def nccl_built() -> int:
    """Return the version of the NCCL that PyTorch was built with as a number, such as 22705; 0 without NCCL."""
    return collective_library_version()


def ddl_built() -> bool:
    """Return False, as Horovod's query whether it was built with IBM DDL, which tutti does not use."""
    return False


def ccl_built() -> bool:
    """Return False, as Horovod's query whether it was built with Intel oneCCL, which tutti does not use."""
    return False


def cuda_built() -> bool:
    """Return whether PyTorch was built with CUDA; no GPU need be present."""
    return has_toolkit("cuda")


def rocm_built() -> bool:
    """Return whether PyTorch was built with ROCm; no GPU need be present."""
    return has_toolkit("rocm")


# --- process sets and control ----------------------------------------------------------------------------------------


@translated
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
    check_initialized()
    return collectives.add_process_set(process_set)


@translated
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
    check_initialized()
    return collectives.remove_process_set(process_set)


@translated
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
    check_initialized()
    collectives.barrier(process_set)


@translated
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
    check_initialized()
    return collectives.join()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write a trace of rank 0's collectives in the format of Chrome's trace viewer, until ``stop_timeline``.

    Not collective: does nothing on ranks other than 0. Ends a timeline that is being written.

    Args:
        file_path: JSON file to write; overwritten.
        mark_cycles: whether to add an event at the start of each collective, ``CYCLE_START``.

    Raises:
        ValueError: ``init`` was not called.
        OSError: on rank 0, the file cannot be written.
    """
    global _timeline
    check_initialized()
    stop_timeline()
    if context.rank() == 0:
        _timeline = CollectiveTimeline(file_path, mark_cycles)
        engine().sink = _timeline.record


def stop_timeline() -> None:
    """End the trace that ``start_timeline`` began and close its file; do nothing if there is none."""
    global _timeline
    ending, _timeline = _timeline, None
    if ending is not None:
        if _session is not None:
            _session.engine.sink = None
        ending.close()


# --- handles -------------------------------------------------------------------------------------------------------


def _handle(handle: CollectiveHandle) -> int:
    number = next(_numbers)
    _handles[number] = handle
    return number


def poll(handle: int) -> bool:
    """Return whether a collective has ended or failed, so that ``synchronize`` would not block. Does not block.

    Args:
        handle: number that an asynchronous collective has returned, and for which ``synchronize`` was not called yet;
            not the function that ``sparse_allreduce_async`` returns.

    Raises:
        ValueError: the handle is unknown.
    """
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _handles[handle].done


@translated
def synchronize(handle: Any) -> Any:
    """Block until an asynchronous collective is complete and return its result; the handle is invalid from then on.

    Args:
        handle: result of an asynchronous collective: a number, or the function of ``sparse_allreduce_async``.

    Returns:
        The result; None, as in Horovod, for a number that was synchronised before or that no collective returned.

    Raises:
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    if callable(handle):
        return handle()
    if (found := _handles.get(handle)) is None:
        return None
    try:
        return found.wait()
    finally:
        _handles.pop(handle, None)


# --- all-reduce ----------------------------------------------------------------------------------------------------


def _operation(op: Any, average: bool | None) -> ReduceOperation:
    if average is not None:
        warnings.warn(
            "Parameter average has been replaced with op and will be removed in v1.0", DeprecationWarning, stacklevel=4
        )
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    return Average if op is None else ReduceOperation(op)


def _reduced(prescale_factor: float, postscale_factor: float, process_set: ProcessSet) -> dict[str, Any]:
    return {"prescale": prescale_factor, "postscale": postscale_factor, "process_set": process_set}


def _named(kind: str, name: str | None) -> str | None:
    return None if name is None else f"{kind}.{name}"


@translated
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
    check_initialized()
    operation = _operation(op, average)
    compressed, ctx = compression.compress(tensor)
    given = _reduced(prescale_factor, postscale_factor, process_set)
    reduced = collectives.allreduce(compressed, operation, _named("allreduce", name), **given)
    decompressed: Tensor = compression.decompress(reduced, ctx)
    return decompressed


@translated
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
    check_initialized()
    given = _reduced(prescale_factor, postscale_factor, process_set)
    return _handle(collectives.allreduce_async(tensor, _operation(op, average), _named("allreduce", name), **given))


@translated
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
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = synchronize(handle)
    return result


@translated
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
    check_initialized()
    given = _reduced(prescale_factor, postscale_factor, process_set)
    operation = _operation(op, average)
    return _handle(collectives.allreduce_async(tensor, operation, _named("allreduce", name), in_place=True, **given))


@translated
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
        tensors: as many on all ranks, each of equal shape and dtype on all ranks.
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
    check_initialized()
    operation = _operation(op, average)
    compressed = [compression.compress(tensor) for tensor in tensors]
    given = _reduced(prescale_factor, postscale_factor, process_set)
    reduced = collectives.grouped_allreduce([t for t, _ in compressed], operation, _named("allreduce", name), **given)
    return [compression.decompress(t, ctx) for t, (_, ctx) in zip(reduced, compressed, strict=True)]


@translated
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
        tensors: as many on all ranks, each of equal shape and dtype on all ranks. Not to be changed before
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
    check_initialized()
    given = _reduced(prescale_factor, postscale_factor, process_set)
    operation = _operation(op, average)
    return _handle(collectives.grouped_allreduce_async(tensors, operation, _named("allreduce", name), **given))


@translated
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
        tensors: as many on all ranks, each of equal shape and dtype on all ranks. Overwritten.
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
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: list[Tensor] = synchronize(handle)
    return result


@translated
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
        tensors: as many on all ranks, each of equal shape and dtype on all ranks. Overwritten, and not to be used
            before ``synchronize``.
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
    check_initialized()
    given = _reduced(prescale_factor, postscale_factor, process_set)
    operation = _operation(op, average)
    return _handle(
        collectives.grouped_allreduce_async(tensors, operation, _named("allreduce", name), in_place=True, **given)
    )


@translated
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
    check_initialized()
    wait = collectives.sparse_allreduce_async(
        tensor, _operation(op, None), _named("allreduce", name), process_set=process_set
    )
    return translated(wait)


# --- other collectives -----------------------------------------------------------------------------------------------


@translated
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, whose size may differ between ranks.

    Collective over ``process_set``; blocks. Differentiable: this rank's gradient is its rows of the average of the
    ranks' gradients, for which backward, collective too, all-gathers the numbers of rows and all-reduces the gradients.

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
    check_initialized()
    return collectives.allgather(tensor, _named("allgather", name), process_set=process_set)


@translated
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
    check_initialized()
    return _handle(collectives.allgather_async(tensor, _named("allgather", name), process_set=process_set))


@translated
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Concatenate the ranks' tensors along the first dimension, for several tensors by one call.

    Collective over ``process_set``; blocks. Differentiable: this rank's gradient is its rows of the average of the
    ranks' gradients, for which backward, collective too, all-gathers the numbers of rows and all-reduces the gradients.

    Args:
        tensors: as many on all ranks, of shapes (rows, …); trailing dimensions and dtypes are equal on all ranks. A
            scalar counts as one row.
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
    check_initialized()
    return collectives.grouped_allgather(tensors, _named("allgather", name), process_set=process_set)


@translated
def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an all-gather of several tensors as one call, and return a handle for the results.

    Collective over ``process_set``; does not block; not differentiable. ``synchronize`` raises HorovodInternalError
    where ranks' calls differ or a rank is lost.

    Args:
        tensors: as many on all ranks, of shapes (rows, …); trailing dimensions and dtypes are equal on all ranks. A
            scalar counts as one row. Not to be changed before ``synchronize`` returns.
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
    check_initialized()
    return _handle(collectives.grouped_allgather_async(tensors, _named("allgather", name), process_set=process_set))


@translated
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
    check_initialized()
    return collectives.broadcast(tensor, root_rank, _named("broadcast", name), process_set=process_set)


@translated
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
    check_initialized()
    return _handle(collectives.broadcast_async(tensor, root_rank, _named("broadcast", name), process_set=process_set))


@translated
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


@translated
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
    check_initialized()
    named = _named("broadcast", name)
    return _handle(collectives.broadcast_async(tensor, root_rank, named, process_set=process_set, in_place=True))


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
    check_initialized()
    start = translated(collectives.grouped_broadcast_async)
    return _handle(start(tensors, root_rank, _named("broadcast", name), process_set=process_set, in_place=True))


@translated
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
    check_initialized()
    result = collectives.alltoall(tensor, splits, _named("alltoall", name), process_set=process_set)
    return result[0] if splits is None else result


@translated
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
    check_initialized()
    return _handle(collectives.alltoall_async(tensor, splits, _named("alltoall", name), process_set=process_set))


def _scatters(op: Any) -> ReduceOperation:
    operation = ReduceOperation(op)
    if operation not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    return operation


@translated
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
    check_initialized()
    compressed, ctx = compression.compress(tensor)
    given = _reduced(prescale_factor, postscale_factor, process_set)
    reduced = collectives.reducescatter(compressed, _scatters(op), _named("reducescatter", name), **given)
    decompressed: Tensor = compression.decompress(reduced, ctx)
    return decompressed


@translated
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
    check_initialized()
    given = _reduced(prescale_factor, postscale_factor, process_set)
    return _handle(collectives.reducescatter_async(tensor, _scatters(op), _named("reducescatter", name), **given))


@translated
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
        tensors: as many on all ranks, each of shape (rows, …), of equal shape and dtype on all ranks.
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
    check_initialized()
    compressed = [compression.compress(tensor) for tensor in tensors]
    given = _reduced(prescale_factor, postscale_factor, process_set)
    named = _named("reducescatter", name)
    reduced = collectives.grouped_reducescatter([t for t, _ in compressed], _scatters(op), named, **given)
    return [compression.decompress(t, ctx) for t, (_, ctx) in zip(reduced, compressed, strict=True)]


@translated
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
        tensors: as many on all ranks, each of shape (rows, …), of equal shape and dtype on all ranks. Not to be
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
    check_initialized()
    given = _reduced(prescale_factor, postscale_factor, process_set)
    return _handle(
        collectives.grouped_reducescatter_async(tensors, _scatters(op), _named("reducescatter", name), **given)
    )
