"""Memory that the ranks of one host share, and a meeting point in it.

The segment has no name left once all ranks hold it, so nothing stays behind whatever dies. Each rank keeps a lock on a
byte of its own: a lock that can be had means that its owner is gone, at once and without a time-out.

Flags are plain 64-bit words. That is enough on x86-64, whose stores are seen in order; elsewhere there is no segment.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import secrets
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.comm.stall import Call
from tutti.errors import PeerError
from tutti.world import heartbeat
from tutti.world.heartbeat import Phase

_DIRECTORY = Path("/dev/shm")
_LINE = 64
_SPINS, _YIELDS, _NAP = 200, 2000, 0.0002
_LIVENESS = 0.05


class Segment:
    """One block of memory seen by all ranks of a communicator.

    Layout: a cache line a rank with its arrival count; then ``size`` bytes for each rank.

    Args:
        comm: ranks of one host.
        descriptor: the open file behind the memory.
        size: bytes a rank.
    """

    def __init__(self, comm: Communicator, descriptor: int, size: int) -> None:
        self._comm, self._descriptor, self._size = comm, descriptor, size
        self._lock(comm.rank)
        self._memory = mmap.mmap(descriptor, _total(comm.size, size))
        self._words = memoryview(self._memory).cast("q")
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._round = 0

    def slot(self, rank: int) -> Tensor:
        """The ``size`` bytes of ``rank``, as uint8."""
        start = self._comm.size * _LINE + rank * self._size
        return self._bytes[start : start + self._size]

    def part(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` numbers at byte ``start`` of all slots taken as one, in a storage of their own."""
        if not count:
            return torch.empty(0, dtype=dtype)
        offset = self._comm.size * _LINE + start
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    def meet(self, text: str) -> None:
        """Return when every rank has come here as often as this one; what they wrote before is seen then.

        Raises:
            PeerError: a rank is gone, or did not come in time.
            MismatchError: all ranks wait, in calls that do not fit together.
        """
        self._round += 1
        words, here = self._words, self._round
        words[self._comm.rank * _LINE // 8] = here
        for other in range(self._comm.size):
            index, spins = other * _LINE // 8, 0
            while words[index] < here:
                spins += 1
                if spins > _SPINS:
                    self._wait(other, text)
                    break

    def _wait(self, other: int, text: str) -> None:
        index, here, words = other * _LINE // 8, self._round, self._words
        with heartbeat.training.during(Phase.WAITING):
            for _ in range(_YIELDS):
                os.sched_yield()
                if words[index] >= here:
                    return
                # On a machine without a core to spare each turn may take milliseconds.
                heartbeat.training.beat()

        def done(limit: timedelta) -> bool:
            end = time.monotonic() + limit.total_seconds()
            look = time.monotonic() + _LIVENESS
            while words[index] < here:
                time.sleep(_NAP)
                now = time.monotonic()
                if now > look:
                    self._check_alive(other, text)
                    look = now + _LIVENESS
                if now > end:
                    return False
            return True

        self._comm.stall.poll(done, Call(text, self._comm.ranks))

    def _check_alive(self, other: int, text: str) -> None:
        """Raise PeerError if ``other`` has ended: then its lock can be had."""
        try:
            self._lock(other)
        except OSError:
            return
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, other)
        if self._words[other * _LINE // 8] >= self._round:
            return
        raise PeerError(
            f"{text} failed: rank {self._comm.ranks[other]} has ended",
            where=f"rank {self._comm.global_rank}",
            remedy="look for the first error in the other ranks' logs",
        )

    def _lock(self, rank: int) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._descriptor)


def attach(comm: Communicator, size: int) -> Segment | None:
    """A segment of ``size`` bytes a rank, or None where these ranks cannot have one. Collective.

    None on other machines than x86-64, where ranks are on several hosts, and where shared memory is too small.
    """
    size = -(-size // 4096) * 4096
    descriptor, name = _create(_total(comm.size, size)) if comm.rank == 0 else (-1, "")
    name = comm.broadcast_json(name, 0, "name of the shared memory")
    if comm.rank != 0 and name:
        with contextlib.suppress(OSError):
            descriptor = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    held = torch.tensor([int(descriptor >= 0)])
    comm.all_reduce(held, "who holds the shared memory")
    if comm.rank == 0 and name:
        os.unlink(_DIRECTORY / name)
    if int(held) < comm.size:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    segment = Segment(comm, descriptor, size)
    # A rank that looks for another's lock must not come before that rank has taken it.
    comm.all_reduce(held, "everybody is in the shared memory")
    return segment


def _create(total: int) -> tuple[int, str]:
    """An unnamed-to-be file of ``total`` reserved bytes; (-1, "") where that is impossible."""
    if platform.machine() not in ("x86_64", "AMD64") or not _DIRECTORY.is_dir():
        return -1, ""
    name = f"tutti-{os.getpid()}-{secrets.token_hex(8)}"
    _reclaim()
    try:
        descriptor = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1, ""
    try:
        # Without the reservation a full /dev/shm would be a SIGBUS in the middle of a step.
        os.posix_fallocate(descriptor, 0, total)
    except OSError:
        os.close(descriptor)
        os.unlink(_DIRECTORY / name)
        return -1, ""
    return descriptor, name


def _reclaim() -> None:
    """Remove what a process left that died between making a segment and handing it out."""
    for path in _DIRECTORY.glob("tutti-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.unlink()


def _total(ranks: int, size: int) -> int:
    return ranks * (_LINE + size)
