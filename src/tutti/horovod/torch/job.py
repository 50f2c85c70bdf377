"""The job of ``horovod.torch``: ``init``, ``shutdown``, ranks and sizes, what was built in, and the timeline."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any

from tutti.comm.collective_engine import abandon_engine, engine, interrupt_engine
from tutti.comm.collective_session import CollectiveSession
from tutti.comm.collectives import allgather_object, barrier
from tutti.comm.current_session import use_session
from tutti.comm.negotiation import SessionOptions
from tutti.comm.process_set import ProcessSet, add_process_set
from tutti.device import collective_library_version, has_toolkit
from tutti.errors import PeerError
from tutti.horovod.common.exceptions import HorovodInternalError, translated
from tutti.horovod.installing import export_rank
from tutti.horovod.torch.collective_timeline import CollectiveTimeline
from tutti.horovod.torch.handles import forget_handles
from tutti.launcher import context
from tutti.launcher.membership import current_membership

log = logging.getLogger("tutti.elastic")

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_ATTEMPTS = 20

_session: CollectiveSession | None = None
_homogeneous = True
_timeline: CollectiveTimeline | None = None


def check_initialized() -> None:
    """Raise ValueError, with Horovod's message, if this process has not called ``init`` or has called ``shutdown``."""
    if _session is None:
        raise ValueError(NOT_INITIALIZED)


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
    use_session(None)
    forget_handles()
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
    use_session(_session)
    barrier()
    running.make_group()
    sizes = allgather_object(context.local_size(), "processes of the node")
    _homogeneous = len({*sizes}) == 1
    for given in made:
        add_process_set(given)
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
    use_session(None)
    leaving.close()
    forget_handles()


atexit.register(shutdown)


# --- queries ----------------------------------------------------------------------------------------------------------


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


# --- the timeline -----------------------------------------------------------------------------------------------------


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
