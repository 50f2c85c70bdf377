"""Run an all-reduce as its schedule says: messages over the network, and shared memory within nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.comm.collective_schedules import Algorithm, ChunkTransfer
from tutti.comm.communicator import Communicator
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.shared_memory import SharedMemorySegment, attach
from tutti.errors import UsageError

if TYPE_CHECKING:
    from tutti.comm.communicator import Pending


class ScheduledAllReduce:
    """An all-reduce (sum) over the data-parallel ranks, by an explicit schedule of point-to-point messages.

    Collective over all ranks of the job: the constructor makes process groups and, for ``hierarchical``, shared memory,
    and checks by an all-reduce that every rank has got the memory. It sums no vector yet.

    Args:
        comms: communicators of this process; the sum is over ``comms.replica``.
        algorithm: ``ring``, ``tree``, ``halving``, ``hierarchical`` or ``central``.
        size: bytes of the largest vector; ``grow`` makes room for larger ones.

    Attributes:
        schedule: the ``Schedule`` that is run; its ranks are indices in ``comms.replica``.

    Raises:
        UsageError: ``hierarchical`` where the ranks of a node cannot share memory; on all ranks of the job.
        MismatchError: ranks are in different calls.
        PeerError: a rank has ended, or did not make the call in time.
    """

    def __init__(self, comms: Communicators, algorithm: Algorithm, size: int) -> None:
        self._comm = comms.replica
        self.schedule, self._members, self._node = comms.connect(algorithm)
        self._kind = f"{algorithm} all-reduce"
        # Every rank of a job learns whether one of them cannot, and all end with the same message.
        self._reserve(size, comms.world)

    def grow(self, size: int) -> None:
        """Make room for vectors of ``size`` bytes, if there is less. Collective over the data-parallel ranks; blocks.

        Sends nothing where there is room.

        Args:
            size: bytes of the largest vector from now on; equal on the data-parallel ranks.

        Raises:
            UsageError: ``hierarchical`` where the ranks of a node cannot share so much memory; on all these ranks.
            MismatchError: ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if size > self._size:
            self._reserve(size, self._comm)

    def _reserve(self, size: int, comm: Communicator) -> None:
        """Share memory within the node for vectors of ``size`` bytes; raise on all ranks of ``comm`` if one cannot."""
        self._size = size
        self._segment = None if self._node is None else _attached(self._node, size)
        failed = torch.tensor([int(self._node is not None and self._segment is None)])
        comm.all_reduce(failed, "shared memory of nodes")
        if int(failed):
            raise UsageError(
                "algorithm=hierarchical needs memory that the ranks of a node share",
                why="the ranks compute on accelerators, the processor is not x86-64, or /dev/shm is too small",
                remedy="take algorithm=ring, or a smaller bucket_mb",
            )

    def start(self, flat: Tensor, text: str) -> ScheduledSum:
        """Return a handle whose ``wait`` all-reduces (sums) ``flat`` in place over the data-parallel ranks.

        The sum is made of point-to-point messages by this object's algorithm, such as a ring. Nothing is sent before
        ``wait``, so that the sum does not overlap with computation; ``wait`` is collective and blocks.

        Args:
            flat: (elements,), of equal shape and dtype on all ranks; at most as many bytes as the constructor or the
                last ``grow`` made room for.
            text: words for the call in the error message if a rank does not arrive at a barrier of the shared memory
                that ranks of one node use with ``hierarchical``. An error of a network message names the algorithm and
                the two ranks instead.

        Returns:
            The handle, an object with ``wait``, which raises PeerError (a rank is lost or late) or MismatchError (the
            ranks wait in different calls).
        """
        return ScheduledSum(self, flat, text)

    def sum(self, flat: Tensor, text: str) -> None:
        """All-reduce (sum) ``flat`` in place over the data-parallel ranks, to the same bits on every rank.

        Performs the point-to-point messages of this object's algorithm, such as a ring, in the order of its schedule;
        with ``hierarchical`` the ranks of one node exchange through shared memory. Collective over the data-parallel
        ranks; blocks.

        Args:
            flat: (elements,), of equal shape and dtype on all ranks; at most as many bytes as the constructor or the
                last ``grow`` made room for.
            text: words for the call in the error message if a rank does not arrive at a barrier of the shared memory.
                An error of a network message names the algorithm and the two ranks instead.

        Raises:
            PeerError: a rank is lost, or did not take part in time.
            MismatchError: the ranks wait for each other in different calls.
        """
        if self._segment is None:
            self._play(flat, {}, text)
            return
        slots: dict[int, Tensor] = {}
        for place, rank in enumerate(self._members):
            slots[rank] = self._segment.slot(place)[: flat.nbytes].view(flat.dtype)
        own = slots[self._comm.rank]
        own.copy_(flat)
        self._play(own, slots, text)
        flat.copy_(own)
        # No rank overwrites its slot for the next sum before all have read it.
        self._segment.barrier(f"{text}, end")

    def _play(self, flat: Tensor, slots: dict[int, Tensor], text: str) -> None:
        """Play the rounds on ``flat``, which is this rank's slot where the node has slots."""
        me = self._comm.rank
        for transfers in self.schedule.rounds:
            receives = [t for t in transfers if t.to == me]
            # All ranks of the node meet in its rounds, those too that have nothing to read.
            if any(t.within_node and t.to in slots for t in transfers):
                self._read(receives, flat, slots, text)
            else:
                self._exchange([t for t in transfers if t.source == me], receives, flat)

    def _read(self, receives: Sequence[ChunkTransfer], flat: Tensor, slots: dict[int, Tensor], text: str) -> None:
        """Play a round within the node: read from other ranks' slots what earlier rounds have left there."""
        if self._segment is not None:
            self._segment.barrier(f"{text}, within the node")
        for transfer in receives:
            start, end = self.schedule.bounds(transfer, flat.numel())
            if end > start:
                there = slots[transfer.source][start:end]
                _put(transfer, flat[start:end], there)
                self._comm.count(transfer.source, transfer.to, there.nbytes)

    def _exchange(self, sends: Sequence[ChunkTransfer], receives: Sequence[ChunkTransfer], flat: Tensor) -> None:
        """Play a round over the network. Sums are added in the order of the schedule, whichever arrives first."""
        started: list[Pending] = []
        for transfer in sends:
            start, end = self.schedule.bounds(transfer, flat.numel())
            if end > start:
                started.append(self._comm.start_send(flat[start:end], transfer.to, self._kind))
        arriving: list[tuple[Pending, ChunkTransfer, Tensor, Tensor]] = []
        for transfer in receives:
            start, end = self.schedule.bounds(transfer, flat.numel())
            if end > start:
                own = flat[start:end]
                into = torch.empty_like(own) if transfer.reduce else own
                arriving.append(
                    (self._comm.start_receive(into, transfer.source, self._kind), transfer, own, into),
                )
        for pending, transfer, own, into in arriving:
            pending.wait()
            if transfer.reduce:
                _put(transfer, own, into)
        for pending in started:
            pending.wait()


class ScheduledSum:
    """Handle of an all-reduce (sum) by an explicit schedule of messages, which is performed only by ``wait``.

    Args:
        all_reduce: performs the all-reduce.
        flat: (elements,), the tensor that is summed over the data-parallel ranks in place.
        text: names the call in error messages.
    """

    def __init__(self, all_reduce: ScheduledAllReduce, flat: Tensor, text: str) -> None:
        self._all_reduce, self._flat, self._text = all_reduce, flat, text

    def wait(self) -> None:
        """Perform the all-reduce (sum) now, in place in the tensor that ``ScheduledAllReduce.start`` was given.

        Collective over the data-parallel ranks; blocks.

        Raises:
            PeerError: a rank is lost, or did not take part in time.
            MismatchError: the ranks wait for each other in different calls.
        """
        self._all_reduce.sum(self._flat, self._text)


def _put(transfer: ChunkTransfer, own: Tensor, there: Tensor) -> None:
    if transfer.reduce:
        own.add_(there)
    else:
        own.copy_(there)


def _attached(node: Communicator, size: int) -> SharedMemorySegment | None:
    return attach(node, size) if node.device.type == "cpu" else None
