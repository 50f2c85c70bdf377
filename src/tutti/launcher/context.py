"""``tutti.init``: join the job, and hold this process's rank, device, store and process group.

World size 1 takes the same code path as world size N: it has a store and a process group too.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from tutti import process_context as identities
from tutti.config.variables import check_variables, is_off
from tutti.config.verbosity import configure_logging
from tutti.config.watchdog_limits import WatchdogLimits, check_timeout, read_timeout
from tutti.device import check_processes, choose, collective_backend, set_collective_defaults
from tutti.errors import PeerError, UsageError
from tutti.launcher import child, failure, heartbeat, interface, watchdog
from tutti.launcher.heartbeat import Phase
from tutti.launcher.malloc_tuning import keep_freed_memory
from tutti.launcher.membership import current_membership
from tutti.launcher.slurm_engine import node_address
from tutti.process_context import Identity
from tutti.torch_compat import default_store, flight_recorder, forget_process_groups, set_group_timeout


@dataclass
class FailureNote:
    """Count of the errors that ended functions of tutti with collectives, on this rank or another; changed in place.

    ``comm.stall.StallInspector`` keeps it: an error is told to the other ranks by a numbered note in the job's store,
    and a waiting rank raises PeerError for a note whose number is above its own ``count``.

    Attributes:
        count: number of errors that this rank has had, or has read of in a note of another rank.
        written: whether the store holds a note about this rank's last error; the rank's next collective deletes it.
    """

    count: int = 0
    written: bool = False


@dataclass(frozen=True)
class World:
    """Membership of this process in a job, as ``init`` returns it: rank, size, device, key-value store and timeout.

    Attributes:
        identity: rank, size, local rank and node of this process.
        device: device of this rank's tensors.
        store: key-value store shared by all ranks.
        timeout: seconds that a collective may take.
        owned: whether ``init`` made the process group, so that ``shutdown`` destroys it; False if the script made it.
        sent: descriptions of the asynchronous sends that this process has started and not waited for yet, by which the
            ranks tell a deadlock from data that are on their way.
        left: the last 64 different collectives that this process has completed: text that identifies one (operation,
            name, ranks, size) → how often it was completed; for the same purpose.
        failure: count of the errors of which the ranks have told each other.
    """

    identity: Identity
    device: torch.device
    store: dist.Store
    timeout: float
    owned: bool
    sent: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    failure: FailureNote = field(default_factory=FailureNote)


log = logging.getLogger("tutti.init")

_CONNECT = timedelta(seconds=10)
_PACE = 0.25

_world: World | None = None
_before_shutdown: list[Callable[[], object]] = []


def init(device: str = "auto", timeout: float | None = None) -> World:
    """Join the job that the environment describes and create its process group, or make a world of size 1.

    Reads the variables of torchrun, Horovod, Open MPI, Hydra (MPICH, Intel MPI), PALS, Flux and Slurm. A default
    process group that exists already is adopted, without communication; otherwise the call is collective over all ranks
    of the job, and blocks until they have arrived. Gloo moves CPU tensors, the vendor's backend an accelerator's. A
    process that a launcher has started as a rank, and that has no watchdog yet, gets one: a process that kills the rank
    when it makes no progress. On several nodes Gloo takes the network interface that leads to rank 0, unless
    ``GLOO_SOCKET_IFNAME`` names another. An uncaught exception ends this process at once, and at the interpreter's exit
    ``shutdown`` is called. docs/environment.md lists all effects on the process. ``TUTTI_PROCESS_SETUP=off`` switches
    them off, except for the process group, the current accelerator, and the log handler that ``TUTTI_VERBOSITY``
    requests; call ``shutdown`` at the end then. A second call does nothing and returns the result of the first.

    Args:
        device: ``auto`` (the accelerator if there is one), ``cpu``, or the accelerator's type, such as ``cuda``.
        timeout: seconds that ranks may take to arrive, and a collective to finish; default: ``TUTTI_TIMEOUT``, or 300.

    Returns:
        A ``World``: ``identity`` (rank, size, local rank and node of this process), ``device`` (a ``torch.device``),
        ``store`` (a ``torch.distributed.Store``, shared by all ranks) and ``timeout`` in seconds.

    Raises:
        UsageError: the environment contradicts itself, has an unknown ``TUTTI_*`` variable or one with a value that is
            not permitted; ``timeout`` is not a finite number above 0; an accelerator is requested and not available, or
            a node has fewer accelerators than processes; the ranks count different numbers of nodes; or a process that
            ``multiprocessing`` has started within a job imports the script.
        PeerError: the other ranks did not arrive in time, rank 0 cannot be reached, or rank 0 cannot listen on its
            port.
        OSError: the process of the watchdog cannot be forked.
    """
    global _world
    if _world is not None:
        return _world
    check_variables(os.environ)
    configure_logging(os.environ)
    timeout = read_timeout(os.environ) if timeout is None else check_timeout(timeout, "timeout of init")
    heartbeat.process.set_timeout(timeout)
    if dist.is_initialized():
        _world = _adopt(device, timeout)
        _watched(_world.identity)
        return _world
    identity = identities.read_identity(os.environ)
    _refuse_import(identity)
    # Fork the watchdog before a device or a thread exists: a fork copies either in part only.
    _watched(identity)
    place = _place(device, identity)
    if place.type == "cpu":
        keep_freed_memory()
    if not is_off("PROCESS_SETUP", os.environ):
        set_collective_defaults(place, os.environ)
    limit = timedelta(seconds=timeout)
    where = f"rank {identity.rank} of {identity.size}"
    try:
        with heartbeat.training.during(Phase.CONNECTING):
            store = _make_group(identity, place, limit)
    except (RuntimeError, TimeoutError) as error:
        raise PeerError(
            "the ranks could not find each other",
            where=where,
            why=str(error).splitlines()[0],
            remedy=f"check that all {identity.size} processes run and reach the same address within {timeout:g} s"
            + ", and set GLOO_SOCKET_IFNAME to the interface between the hosts" * (identity.cross_size > 1),
        ) from error
    _world = World(identity, place, store, timeout, owned=True)
    log.info("%s on %s, as %s says; ranks wait %g s for each other", where, place, identity.source, timeout)
    if not is_off("PROCESS_SETUP", os.environ):
        atexit.register(shutdown)
        if not isinstance(sys.excepthook, _End):
            sys.excepthook = _End(sys.excepthook)
    return _world


def _refuse_import(identity: Identity) -> None:
    """Raise UsageError in a child of a rank, started by spawn or forkserver, that imports the script anew."""
    if not identities.joined(os.environ):
        return
    frame = inspect.currentframe()
    while frame is not None:
        # multiprocessing gives the script this name.
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            raise UsageError(
                "a process that this rank has started runs the script once more",
                where=f"rank {identity.rank}, {frame.f_code.co_filename}:{frame.f_lineno}",
                why="multiprocessing imports the script in processes that are spawned, such as those of a loader, and"
                " the import would join the job as a second process of this rank",
                remedy="put the script's statements under if __name__ == '__main__', or read the data by run.epoch or"
                " run.microbatches in place of the loader",
            )
        frame = frame.f_back


def _make_group(identity: Identity, device: torch.device, limit: timedelta) -> dist.Store:
    """Wait for all ranks, make the process group, and return the store that they share."""
    endpoint = _store_endpoint(identity)
    store = dist.PrefixStore(f"tutti/{identity.attempt}", _store(identity, endpoint, limit))
    own = interface.source_address(endpoint[0]) if endpoint else ""
    _await_all(store, identity, endpoint, limit, own)
    _choose_interface(store, identity, own)
    # Longer than tutti's own limit, so that tutti's message comes first: see tutti.comm.stall.
    later = limit + timedelta(seconds=60)
    backend = collective_backend(device)
    bound = backend not in (None, "gloo")
    brief = connect_limit(later, device)
    dist.init_process_group(
        "gloo" if backend is None else f"cpu:gloo,{device.type}:{backend}",
        store=store,
        rank=identity.rank,
        world_size=identity.size,
        timeout=brief,
        device_id=device if bound else None,
    )
    if brief != later:
        set_group_timeout(dist.group.WORLD, later)
    # The group has connected its devices by now, and errors in that were raised. A group that stayed bound would have
    # ranks outside of a new group of the host take part in a split of the device's communicator, alone, and hang.
    group = dist.group.WORLD
    if bound and group is not None:
        group.bound_device_id = None
    return store


def leave(code: int) -> None:
    """End this process at once by ``os._exit(code)``, if ``init`` made a process group of several ranks; else return.

    Flushes standard output and standard error first. A regular interpreter exit would hang: it joins the threads of the
    process groups, which wait for peers that may be gone.

    Args:
        code: exit code of the process.
    """
    if _world is not None and _world.owned and _world.identity.size > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def connect_limit(limit: timedelta, device: torch.device) -> timedelta:
    """Return how long the ranks of a new process group may take to connect to each other, as a ``timedelta``.

    In an elastic job (whose set of ranks changes while it runs) with tensors on CPUs the result is the smaller one of
    ``limit`` and ten seconds: native code does not notice there that a rank has died while the ranks connect, so that
    the surviving ranks form a new group only after this time. In every other case the result is ``limit``.

    Args:
        limit: timeout of the group's collectives.
        device: device of this rank's tensors.
    """
    return min(limit, _CONNECT) if current_membership() is not None and device.type == "cpu" else limit


class _End:
    """An excepthook: shows an uncaught exception by the previous hook, then ends the process with its exit code.

    The function of ``failure.before_report`` is called first.
    """

    def __init__(self, show: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._show = show

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failure.add_notes(error)
        self._show(kind, error, trace)
        # An interactive session goes on.
        if not hasattr(sys, "ps1"):
            leave(failure.failure_exit_code(error))


def shutdown() -> None:
    """Leave the job: call the functions registered by ``before_shutdown``, then destroy the process group.

    The registered functions get no arguments; if one raises, the others are called and the process group is destroyed
    all the same, and the last exception is then raised. A process group that ``init`` did not create is kept. After it
    has destroyed one, the call sleeps 50 ms, in which Gloo's threads end their work. A second call only calls the
    registered functions. ``init`` can join a job again afterwards.

    No collective, but all ranks should call it at about the same time: where tutti's collectives were used, a
    registered function may block until rank 0 has noted that this rank leaves; ``destroy_process_group`` of NCCL may
    wait for the other ranks.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_destroy)
        for function in reversed(_before_shutdown):
            stack.callback(function)


def _destroy() -> None:
    global _world
    leaving, _world = _world, None
    if leaving is not None and leaving.owned and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        child.drain_gloo()


def abandon_world() -> None:
    """Leave the job without waiting for its other ranks, some of which may be gone; ``init`` can then join another job.

    Called between two sets of ranks of an elastic job (``hvd``). Not collective. Drops PyTorch's process groups, unless
    the user's script made the default one. The functions registered by ``before_shutdown`` are not called.
    """
    global _world
    leaving, _world = _world, None
    # Without a world, ``init`` may have failed half-way.
    if leaving is None or leaving.owned:
        forget_process_groups()


def before_shutdown(function: Callable[[], object]) -> None:
    """Register a function to be called at the start of every ``tutti.shutdown`` of this process.

    The process group still exists then. Functions are called in the order in which they were registered.

    Args:
        function: called without arguments; its result is ignored.
    """
    _before_shutdown.append(function)


def is_initialized() -> bool:
    """Return whether this process has called ``init`` and not ``shutdown`` since."""
    return _world is not None


def current() -> World:
    """Return this process's membership in the job that ``init`` joined.

    Returns:
        A ``World``: ``identity`` (rank, size, local rank and node), ``device`` of the rank's tensors, ``store``
        (key-value store shared by all ranks), ``timeout`` (seconds that a collective may take) and ``owned`` (whether
        ``init`` made the process group).

    Raises:
        UsageError: before ``init``.
    """
    if _world is None:
        raise UsageError("tutti has not been initialised", remedy="call tutti.init() first")
    return _world


def rank() -> int:
    """Return this process's rank in the job, from 0; raises UsageError before ``init``."""
    return current().identity.rank


def size() -> int:
    """Return the number of processes in the job; raises UsageError before ``init``."""
    return current().identity.size


def local_rank() -> int:
    """Return this process's rank on its node, from 0; raises UsageError before ``init``."""
    return current().identity.local_rank


def local_size() -> int:
    """Return the number of the job's processes on this node; raises UsageError before ``init``."""
    return current().identity.local_size


def cross_rank() -> int:
    """Return this node's index in the job, from 0; raises UsageError before ``init``."""
    return current().identity.cross_rank


def cross_size() -> int:
    """Return the number of nodes in the job; raises UsageError before ``init``."""
    return current().identity.cross_size


def _watched(identity: Identity) -> None:
    """Start this process's watchdog if it belongs to a job, and register PyTorch's flight recorder for its reports."""
    if is_off("PROCESS_SETUP", os.environ):
        return
    if identities.joined(os.environ):
        watchdog.start_watchdog(identity.rank, WatchdogLimits.read(os.environ))
    recorder = flight_recorder()
    if recorder is not None:
        watchdog.keep_flights(identity.rank, recorder)


def _place(choice: str, identity: Identity) -> torch.device:
    where = f"rank {identity.rank}"
    device = choose(choice, identity.local_rank, identity.local_size, where)
    check_processes(device.type, identity.size, where)
    return device


def _store_endpoint(identity: Identity) -> tuple[str, int] | None:
    """Return address and port of the store; None without one: under tutti's launcher, or at world size 1."""
    if os.environ.get("TUTTI_STORE") or identity.size == 1:
        return None
    address, port = identities.rendezvous(os.environ, identity)
    if identity.source == "slurm" and "MASTER_ADDR" not in os.environ and not interface.resolves(address):
        address = node_address(address) or address
    return address, port


def _choose_interface(store: dist.Store, identity: Identity, own: str) -> None:
    """Set Gloo's network interface to one that other nodes reach: towards rank 0, or from its node to another."""
    chosen = "GLOO_SOCKET_IFNAME" in os.environ or is_off("PROCESS_SETUP", os.environ)
    if identity.cross_size == 1 or chosen:
        return
    ranks = iter(range(identity.size))
    while not own and (rank := next(ranks, None)) is not None:
        there = bytes(store.get(f"here/{rank}")).decode()
        own = interface.source_address(there) if there else ""
    if own and (name := interface.name_of(own)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _store(identity: Identity, endpoint: tuple[str, int] | None, limit: timedelta) -> dist.Store:
    """Make the store: a file under tutti's launcher (no port), memory at world size 1, else torchrun's or TCP."""
    path = os.environ.get("TUTTI_STORE")
    if path:
        store: dist.Store = dist.FileStore(path, identity.size)
    elif endpoint is None:
        store = dist.HashStore()
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE"):
        store, _, _ = next(dist.rendezvous("env://", identity.rank, identity.size, timeout=limit))
    else:
        address, port = endpoint
        _await_name(identity, address, limit)
        try:
            # No waiting for ranks here: ``_await_all`` does, and names missing ranks.
            store = dist.TCPStore(
                address, port, identity.size, identity.rank == 0, timeout=limit, wait_for_workers=False
            )
        except (RuntimeError, TimeoutError) as error:
            raise _unreachable(identity, f"{address}:{port}", limit, error) from error
    store.set_timeout(limit)
    return store


def _await_name(identity: Identity, address: str, limit: timedelta) -> None:
    """Wait until the name of rank 0's node resolves. Raises PeerError if it does not in time."""
    end = time.monotonic() + limit.total_seconds()
    # Native code, too, would wait for the name, and print a warning at each try.
    while not interface.resolves(address):
        if time.monotonic() > end:
            raise PeerError(
                f"the name {address} of rank 0's node does not resolve here within {limit.total_seconds():g} s",
                where=f"rank {identity.rank} of {identity.size}",
                remedy="set MASTER_ADDR to an address of that node",
            )
        time.sleep(_PACE)


def _unreachable(identity: Identity, place: str, limit: timedelta, error: Exception) -> PeerError:
    where, text = f"rank {identity.rank} of {identity.size}", str(error).splitlines()[0]
    if identity.rank == 0:
        why = "the port is already in use" if "EADDRINUSE" in text else text
        return PeerError(f"cannot listen on {place}", where=where, why=why, remedy="set MASTER_PORT to a free port")
    return PeerError(
        f"cannot reach rank 0 at {place} within {limit.total_seconds():g} s",
        where=where,
        why=text,
        remedy="check that rank 0 runs, and that MASTER_ADDR and MASTER_PORT are the same on every rank",
    )


def _await_all(
    store: dist.Store, identity: Identity, endpoint: tuple[str, int] | None, limit: timedelta, own: str
) -> None:
    """Wait until every rank has arrived and stored its own address, which may be empty.

    Args:
        store: shared by all ranks.
        identity: this process's.
        endpoint: address and port of the store, for messages.
        limit: how long to wait.
        own: this node's address towards rank 0.

    Raises:
        PeerError: ranks are missing; every rank names the same ones.
        UsageError: ranks count different numbers of nodes.
    """
    keys = [f"here/{rank}" for rank in range(identity.size)]
    place = f", store at {endpoint[0]}:{endpoint[1]}" if endpoint else ""
    store.add(f"nodes/{identity.cross_size}", 1)
    store.set(keys[identity.rank], own)
    end, pause = time.monotonic() + limit.total_seconds(), 0.001
    # Poll: when a blocking wait in the store times out, native code prints its stack, frame by frame.
    while not store.check(keys):
        if time.monotonic() > end and not store.check(["absent"]):
            store.set("absent", ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key])))
        if store.check(["absent"]):
            missing = bytes(store.get("absent")).decode()
            if identity.rank == 0:
                # The store ends with this process: give the other ranks time to read the reason.
                time.sleep(1)
            raise PeerError(
                f"rank {missing} of {identity.size} did not arrive within {limit.total_seconds():g} s",
                where=f"rank {identity.rank}{place}",
                remedy="check that every process was started and reaches the same address, or raise --timeout",
            )
        if (member := current_membership()) is not None:
            member.check()
        heartbeat.training.beat("arrival of all ranks")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    # Horovod's cross size counts, for each rank, the nodes that have a rank with its local rank.
    if identity.source != "horovod" and store.add(f"nodes/{identity.cross_size}", 0) != identity.size:
        raise UsageError(
            f"ranks count different numbers of nodes, this one {identity.cross_size}",
            where=f"rank {identity.rank} of {identity.size}, of {identity.local_size} on its node",
            why="their launcher gives only the number of ranks on a node, which differs between nodes",
            remedy="start with torchrun or tutti train -H, which number the nodes, or with as many ranks on every node",
        )


def _adopt(device: str, timeout: float) -> World:
    identity = identities.identity_of_group(dist.get_rank(), dist.get_world_size(), os.environ)
    store = default_store()
    return World(identity, _place(device, identity), dist.PrefixStore("tutti", store), timeout, owned=False)
