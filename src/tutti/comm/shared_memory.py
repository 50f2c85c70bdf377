"""Memory shared by the ranks of one node, with a barrier in it.

The file is unlinked once all ranks have opened it, so nothing remains in /dev/shm however processes end. Each rank
locks a byte of its own in the file: if another rank can take the lock, its owner has ended, which shows at once and
without a timeout.

The barrier's counters are plain 64-bit words, which suffices on x86-64, where other cores see stores in order; on other
processors there is no segment.
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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.comm.random_keys import name_key
from tutti.comm.stall import ENDED_RANK, Call
from tutti.errors import PeerError, script_line
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase

if TYPE_CHECKING:
    from tutti.comm.communicator import Communicator

_DIRECTORY = Path("/dev/shm")
_LINE = 64
_SPINS, _YIELDS = 200, 2000
# Seconds of a sleep between two looks at a barrier: the shortest, the longest, and its share of the time waited.
_NAP, _LONGEST_NAP, _SHARE = 0.0002, 0.005, 0.02
_LIVENESS = 0.05
SMALL_BYTES = 1 << 20
"""Bytes of the largest tensor of a rank whose gradients or activations ``SmallMessages`` carries."""
CONTROL_BYTES = 1 << 14
"""Bytes of the largest tensor of a rank in a control message that ``SmallMessages`` carries."""


class SharedMemorySegment:
    """Memory that all ranks of a communicator on one node have mapped, with a slot for each rank and a barrier.

    Layout: for each rank a cache line with its barrier counter; then for each rank a slot of ``size`` bytes.

    Args:
        comm: communicator of ranks of one node.
        descriptor: the open file behind the memory; closed with this object.
        size: bytes of a slot.
    """

    def __init__(self, comm: Communicator, descriptor: int, size: int) -> None:
        self._comm, self._descriptor, self._size = comm, descriptor, size
        self._lock(comm.rank)
        self._memory = mmap.mmap(descriptor, _total(comm.size, size))
        self._words = memoryview(self._memory).cast("q")
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._round = 0

    def slot(self, rank: int) -> Tensor:
        """Return the memory of one rank in the shared segment, as a uint8 tensor of shape (bytes of a slot,).

        The tensor is a view: all ranks see writes to it.

        Args:
            rank: index of the rank within the communicator.
        """
        start = self._comm.size * _LINE + rank * self._size
        return self._bytes[start : start + self._size]

    def slots(self) -> Tensor:
        """Return the memory of all ranks in the shared segment, as a uint8 tensor of shape (ranks, bytes of a slot).

        The tensor is a view in rank order: all ranks see writes to it.
        """
        return self._bytes[self._comm.size * _LINE :].view(self._comm.size, self._size)

    def part(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return a part of this shared-memory segment as a tensor of shape (count,), without a copy.

        The tensor has a storage of its own, which holds only these elements; all ranks see writes to it.

        Args:
            start: byte at which the tensor begins, counted from the start of the first rank's slot; the ranks' slots
                follow one another.
            count: number of elements.
            dtype: dtype of the elements.
        """
        if not count:
            return torch.empty(0, dtype=dtype)
        offset = self._comm.size * _LINE + start
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    def barrier(self, text: str) -> None:
        """Block until all ranks have called this method; writes before the call are visible to all ranks after it.

        Collective over the ranks of the segment.

        Args:
            text: names the call in both errors; equal on all ranks.

        Raises:
            PeerError: a rank has ended, or did not arrive within the timeout.
            MismatchError: all ranks wait, in different calls.
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
                # With more processes than cores each sched_yield may take milliseconds.
                heartbeat.training.beat()

        start = time.monotonic()

        def done(limit: timedelta) -> bool:
            now = time.monotonic()
            end, look = now + limit.total_seconds(), now + _LIVENESS
            while words[index] < here:
                time.sleep(min(max(_NAP, _SHARE * (now - start)), _LONGEST_NAP))
                now = time.monotonic()
                if now > look:
                    self._check_alive(other, text)
                    look = now + _LIVENESS
                if now > end:
                    return False
            return True

        self._comm.stall.poll(done, Call(text, self._comm.ranks, counted=False))

    def _check_alive(self, other: int, text: str) -> None:
        """Raise PeerError if rank ``other`` has ended (its lock is free) without arriving at the barrier."""
        try:
            self._lock(other)
        except OSError:
            return
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, other)
        if self._words[other * _LINE // 8] >= self._round:
            return
        raise PeerError(
            f"{text} failed: rank {self._comm.ranks[other]} has ended",
            where=f"rank {self._comm.global_rank}, {script_line()}",
            remedy=ENDED_RANK,
        )

    def _lock(self, rank: int) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._descriptor)


class SmallMessages:
    """All-gathers small CPU tensors through the shared memory of a node, with one barrier for each all-gather.

    Faster than sockets, as no sleeping thread must be woken. Each rank's slot has two halves, which calls use in turn:
    before a rank overwrites a half, it has passed the barrier of the call in between, and every rank had read the half
    before that barrier. Each half begins with a digest of its call, which ranks compare before they use the numbers
    behind it.

    Args:
        comm: communicator of ranks of one node.
        segment: shared memory of these ranks, at least ``SmallMessages.room(most)`` bytes a slot.
        most: bytes of the largest tensor of a rank.
    """

    def __init__(self, comm: Communicator, segment: SharedMemorySegment, most: int) -> None:
        self._comm, self._rank, self._segment, self._most = comm, comm.rank, segment, most
        room = self.room(most)
        halves = segment.slots()[:, :room].view(comm.size, 2, room // 2).unbind(1)
        self._digests = [part[:, :_LINE].view(torch.int64)[:, 0].numpy() for part in halves]
        self._messages = [part[:, _LINE:] for part in halves]
        self._turn = 0

    @staticmethod
    def room(most: int) -> int:
        """Return the bytes of shared memory that each rank needs for all-gathers of tensors of up to ``most`` bytes.

        There is room for two tensors, because two all-gathers use two buffers in turn, each with a digest of the call.

        Args:
            most: bytes of the largest tensor of a rank, a multiple of 64.
        """
        return 2 * (_LINE + most)

    def takes(self, tensor: Tensor) -> bool:
        """Return whether ``gather`` can all-gather a tensor through the node's shared memory.

        True if it is on the CPU and has at most ``most`` bytes, the limit that the constructor was given. Local.

        Args:
            tensor: this rank's tensor.
        """
        return tensor.nbytes <= self._most and tensor.device.type == "cpu"

    def gather(self, mine: Tensor, text: str, call: str = "") -> Tensor:
        """All-gather a small CPU tensor through shared memory. Collective over the ranks of one communicator; blocks.

        Args:
            mine: this rank's tensor of n elements, for which ``takes`` is True; n and dtype are equal on all ranks.
            text: names the call in PeerError and in the MismatchError of ranks that all wait in different calls; equal
                on all ranks.
            call: describes the call and must be equal on all ranks; "" for ``text`` with n and dtype.

        Returns:
            A view (ranks, n) of all ranks' tensors in shared memory, in rank order; do not write to it. The next call
            but one overwrites it.

        Raises:
            MismatchError: ranks are in different calls, or their tensors differ in size or dtype.
            PeerError: a rank has ended, or did not arrive within the timeout.
        """
        self._turn = 1 - self._turn
        digests, size = self._digests[self._turn], mine.nbytes
        messages = self._messages[self._turn][:, :size].view(mine.dtype)
        call = call or f"{text}, with {mine.numel()} of {mine.dtype}"
        digests[self._rank] = digest = name_key(call)
        messages[self._rank].view_as(mine).copy_(mine)
        self._segment.barrier(text)
        if (digests != digest).any():
            differs = next(rank for rank, other in enumerate(digests) if other != digests[0])
            raise self._comm.calls_differ(call, differs)
        return messages


def attach_small(comm: Communicator, most: int = SMALL_BYTES) -> SmallMessages | None:
    """Make shared memory for collectives of small CPU tensors among the ranks of ``comm``.

    Collective over the ranks of ``comm`` (a broadcast of the file's name and all-reduces); blocks.

    Args:
        comm: the ranks that share the memory.
        most: bytes of the largest tensor of a rank, a multiple of 64.

    Returns:
        An object with the collective ``gather``. None on all ranks where the processor is not x86-64, the ranks are on
        several nodes, a rank cannot open the file, or /dev/shm is too small.

    Raises:
        MismatchError: ranks are in different calls.
        PeerError: a rank has ended, or did not make the call in time.
    """
    segment = attach(comm, SmallMessages.room(most))
    return None if segment is None else SmallMessages(comm, segment, most)


def attach(comm: Communicator, size: int) -> SharedMemorySegment | None:
    """Make a shared-memory segment with a slot of at least ``size`` bytes for each rank.

    Collective over the ranks of ``comm`` (a broadcast of the file's name and all-reduces); blocks.

    Args:
        comm: the ranks that share the memory.
        size: bytes of a slot.

    Returns:
        The segment, an object with ``slot`` (a rank's memory, as a uint8 tensor) and ``barrier``. None on all ranks if
        the processor is not x86-64, the ranks are on several nodes, a rank cannot open the file (containers with a
        /dev/shm of their own), or /dev/shm is too small.

    Raises:
        MismatchError: ranks are in different calls.
        PeerError: a rank has ended, or did not make the call in time.
    """
    size = -(-size // 4096) * 4096
    descriptor, name = _create(_total(comm.size, size)) if comm.rank == 0 else (-1, "")
    name, node = comm.broadcast_json((name, comm.node), 0, "name of the shared memory")
    if comm.rank != 0 and name and comm.node == node:
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
    segment = SharedMemorySegment(comm, descriptor, size)
    # A barrier: no rank may test another's lock before that rank has taken it.
    comm.all_reduce(held, "every rank is in the shared memory")
    return segment


def _create(total: int) -> tuple[int, str]:
    """Create a file of ``total`` reserved bytes in /dev/shm; return its descriptor and name, or (-1, "") on failure."""
    if platform.machine() not in ("x86_64", "AMD64") or not _DIRECTORY.is_dir():
        return -1, ""
    name = f"tutti-{os.getpid()}-{secrets.token_hex(8)}"
    _reclaim()
    try:
        descriptor = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1, ""
    try:
        # Without the reservation a full /dev/shm would raise SIGBUS in the middle of a step.
        os.posix_fallocate(descriptor, 0, total)
    except OSError:
        os.close(descriptor)
        os.unlink(_DIRECTORY / name)
        return -1, ""
    return descriptor, name


def _reclaim() -> None:
    """Remove files of processes that ended between creating a segment and unlinking it."""
    for path in _DIRECTORY.glob("tutti-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.unlink()


def _total(ranks: int, size: int) -> int:
    return ranks * (_LINE + size)
