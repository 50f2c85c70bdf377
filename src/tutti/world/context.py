"""``tutti.init`` and what it knows: this process's place in the job, its device, and its store.

A world of one is the same code path as a world of many: it has a store and a process group too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from tutti.errors import PeerError, UsageError
from tutti.world import child, failure, heartbeat, interface, watchdog
from tutti.world import identity as identities
from tutti.world.allocator import keep_freed_memory
from tutti.world.heartbeat import Phase
from tutti.world.identity import Identity
from tutti.world.watchdog import Limits


@dataclass(frozen=True)
class World:
    """This process's place: who it is, what it computes on, and where ranks leave notes for each other.

    Attributes:
        identity: rank, size and their like.
        device: where tensors of this rank live.
        store: key-value store shared by all ranks.
        timeout: seconds that a collective may take.
        owned: whether ``init`` made the process group, so that ``shutdown`` destroys it.
    """

    identity: Identity
    device: torch.device
    store: dist.Store
    timeout: float
    owned: bool


_world: World | None = None


def init(device: str = "auto", timeout: float | None = None) -> World:
    """Join the job that the environment describes, or make a world of one; calling it again changes nothing.

    Reads torchrun's, Horovod's, Slurm's and Open MPI's variables. Adopts a default process group that exists. Gloo
    moves CPU tensors, NCCL CUDA tensors. In a job of several processes each gets its watchdog, if it has none yet. On
    several hosts Gloo takes the interface that leads to rank 0, unless ``GLOO_SOCKET_IFNAME`` names another. From now
    on an exception that nobody catches ends this process at once.

    Args:
        device: ``auto`` (CUDA where there is any), ``cpu`` or ``cuda``.
        timeout: seconds that ranks may take to arrive, and a collective to finish; default: ``TUTTI_TIMEOUT``, or 300.

    Raises:
        UsageError: the environment contradicts itself, or CUDA was asked for and is not there.
        PeerError: the other ranks did not arrive in time.
    """
    global _world
    if _world is not None:
        return _world
    timeout = _timeout() if timeout is None else timeout
    heartbeat.process.set_timeout(timeout)
    if dist.is_initialized():
        _world = _adopt(device, timeout)
        _watched(_world.identity)
        return _world
    identity = identities.read(os.environ)
    # Before there is a device or a thread, which a fork would copy in part.
    _watched(identity)
    place = _device(device, identity)
    if place.type == "cpu":
        keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    where = f"rank {identity.rank} of {identity.size}"
    try:
        with heartbeat.training.during(Phase.MEETING):
            store = _meet(identity, backend, limit)
    except (RuntimeError, TimeoutError) as error:
        raise PeerError(
            "the ranks could not find each other",
            where=where,
            why=str(error).splitlines()[0],
            remedy=f"check that all {identity.size} processes run and reach the same address within {timeout:g} s"
            + ", and set GLOO_SOCKET_IFNAME to the interface between the hosts" * (identity.cross_size > 1),
        ) from error
    _world = World(identity, place, store, timeout, owned=True)
    atexit.register(shutdown)
    if not isinstance(sys.excepthook, _End):
        sys.excepthook = _End(sys.excepthook)
    return _world


def _meet(identity: Identity, backend: str, limit: timedelta) -> dist.Store:
    """Wait for all ranks and make the process group. Returns the store that they share."""
    meeting = _meeting(identity)
    store = dist.PrefixStore(f"tutti/{identity.attempt}", _store(identity, meeting, limit))
    own = interface.way_to(meeting[0]) if meeting else ""
    _await_all(store, identity, meeting, limit, own)
    _choose_interface(store, identity, own)
    # Slower than our own limit, so that our message comes first: see tutti.comm.stall.
    later = limit + timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=identity.rank, world_size=identity.size, timeout=later)
    return store


def leave(code: int) -> None:
    """End this process now, with ``code``, if it is one of several: what comes at the end of a program would hang.

    The process groups' own threads are waited for there, and they wait for peers that may be gone.
    """
    if _world is not None and _world.owned and _world.identity.size > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


class _End:
    """Shows an exception that nobody caught as before, and leaves with its exit code."""

    def __init__(self, show: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._show = show

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._show(kind, error, trace)
        # At a prompt the session goes on.
        if not hasattr(sys, "ps1"):
            leave(failure.exit_code(error))


def shutdown() -> None:
    """Leave the job. The process group is destroyed if ``init`` made it. Calling it twice changes nothing."""
    global _world
    leaving, _world = _world, None
    if leaving is not None and leaving.owned and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        child.let_go()


def is_initialized() -> bool:
    """Whether ``init`` was called and ``shutdown`` was not."""
    return _world is not None


def current() -> World:
    """The world that ``init`` made. Raises UsageError before ``init``."""
    if _world is None:
        raise UsageError("tutti has not been initialised", remedy="call tutti.init() first")
    return _world


def rank() -> int:
    """This process's number in the whole job, from 0."""
    return current().identity.rank


def size() -> int:
    """Processes in the whole job."""
    return current().identity.size


def local_rank() -> int:
    """This process's number on its host, from 0."""
    return current().identity.local_rank


def local_size() -> int:
    """Processes of the job on this host."""
    return current().identity.local_size


def cross_rank() -> int:
    """This host's number among the hosts of the job, from 0."""
    return current().identity.cross_rank


def cross_size() -> int:
    """Hosts of the job."""
    return current().identity.cross_size


def _watched(identity: Identity) -> None:
    """Watch this process if it is one of a job, and keep what torch knows of its collectives for the worst case."""
    if identities.joined(os.environ):
        watchdog.start(identity.rank, Limits.read(os.environ))
    recorder = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if recorder is not None:
        watchdog.keep_flights(identity.rank, recorder)


def _device(choice: str, identity: Identity) -> torch.device:
    if choice not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device '{choice}'", remedy="choices: auto, cpu, cuda")
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("CUDA was asked for, but PyTorch sees no GPU", remedy="take --device cpu")
    count = torch.cuda.device_count()
    if identity.local_rank >= count:
        raise UsageError(
            f"{identity.local_size} processes on this host share {count} GPUs",
            where=f"rank {identity.rank}",
            remedy=f"start at most {count} processes a host, or take --device cpu",
        )
    torch.cuda.set_device(identity.local_rank)
    return torch.device("cuda", identity.local_rank)


def _timeout() -> float:
    text = os.environ.get("TUTTI_TIMEOUT", "300")
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise UsageError(f"TUTTI_TIMEOUT is '{text}'", remedy="give seconds, a number above 0")


def _meeting(identity: Identity) -> tuple[str, int] | None:
    """Address and port of the store; None where it has neither: under our own launcher, and in a world of one."""
    if os.environ.get("TUTTI_STORE") or identity.size == 1:
        return None
    return identities.rendezvous(os.environ, identity)


def _choose_interface(store: dist.Store, identity: Identity, own: str) -> None:
    """Let Gloo listen where the other hosts reach it: on the way to rank 0, and from rank 0's host to any other."""
    if identity.cross_size == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    ranks = iter(range(identity.size))
    while not own and (rank := next(ranks, None)) is not None:
        there = bytes(store.get(f"here/{rank}")).decode()
        own = interface.way_to(there) if there else ""
    if own and (name := interface.name_of(own)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _store(identity: Identity, meeting: tuple[str, int] | None, limit: timedelta) -> dist.Store:
    """A file on one host (nothing listens), the launcher's TCP store across hosts, memory for a world of one."""
    path = os.environ.get("TUTTI_STORE")
    if path:
        store: dist.Store = dist.FileStore(path, identity.size)
    elif meeting is None:
        store = dist.HashStore()
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE"):
        store, _, _ = next(dist.rendezvous("env://", identity.rank, identity.size, timeout=limit))
    else:
        address, port = meeting
        try:
            # Nobody is waited for here: ``_await_all`` names those that do not come.
            store = dist.TCPStore(
                address, port, identity.size, identity.rank == 0, timeout=limit, wait_for_workers=False
            )
        except (RuntimeError, TimeoutError) as error:
            raise _unreachable(identity, f"{address}:{port}", limit, error) from error
    store.set_timeout(limit)
    return store


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
    store: dist.Store, identity: Identity, meeting: tuple[str, int] | None, limit: timedelta, own: str
) -> None:
    """Return when every rank has come and left its own address, which may be empty.

    Raises PeerError naming those that have not, the same ranks on every rank.
    """
    keys = [f"here/{rank}" for rank in range(identity.size)]
    place = f", met at {meeting[0]}:{meeting[1]}" if meeting else ""
    store.set(keys[identity.rank], own)
    end, pause = time.monotonic() + limit.total_seconds(), 0.001
    # Asked for again and again: a wait in the store that runs out is reported by native code, frame by frame.
    while not store.check(keys):
        if time.monotonic() > end and not store.check(["absent"]):
            store.set("absent", ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key])))
        if store.check(["absent"]):
            missing = bytes(store.get("absent")).decode()
            if identity.rank == 0:
                # The store ends with this process: let the others read why.
                time.sleep(1)
            raise PeerError(
                f"rank {missing} of {identity.size} did not arrive within {limit.total_seconds():g} s",
                where=f"rank {identity.rank}{place}",
                remedy="check that every process was started and reaches the same address, or raise --timeout",
            )
        heartbeat.training.beat("arrival of all ranks")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _adopt(device: str, timeout: float) -> World:
    identity = identities.of_group(dist.get_rank(), dist.get_world_size(), os.environ)
    store = dist.distributed_c10d._get_default_store()
    return World(identity, _device(device, identity), dist.PrefixStore("tutti", store), timeout, owned=False)
