"""All-reduces that ranks of one node perform without a message: every rank posts its tensors in shared memory.

An all-reduce on which ``tutti.comm.negotiation`` has agreed once has a place in the slot of each rank, its region of a
shared segment. A call copies its tensors there and writes the number of the *attempt*; a rank whose call waits adds the
tensors of all ranks, in rank order, once it sees that all ranks have posted. Calls match by name in any order, as with
messages, for each name has a place of its own.

The coordinator may *revoke* an attempt unless all ranks have posted it, so that a call either completes on every rank
or fails on every rank that made it. Attempt numbers are ``instance << 20 | attempt``: the next instance begins when one
is complete, and another attempt of the same one when one is revoked. Tensors of an instance lie in one of two buffers
in turn: a rank posts instance i + 2 only after all ranks have posted i + 1, and so have read i.

The counters are plain 64-bit words, which ``tutti.comm.shared_memory`` explains. Where a store must be visible before a
load that follows (post, then look for a revocation; revoke, then look for posts), a lock between them is the fence.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.comm.collective_call import CollectiveCall, ReduceOperation
from tutti.comm.collective_execution import finish_reduction, scale
from tutti.comm.communicator import Communicator
from tutti.comm.shared_memory import SharedMemorySegment, attach
from tutti.torch_compat import foreach_copy_

_ATTEMPTS = 20
_LINE = 64
_POSTED, _PROPOSED, _REVOKED = 0, 1, 2
LARGEST = 64 << 20
"""Bytes of the tensors of all ranks up to which each rank adds all of them itself."""
_FIRST_SEGMENT = 4 << 20
_BUDGET = 64 << 20
"""Bytes of shared memory for each rank. Larger models do not notice what a message costs."""

_fence = threading.Lock()


def posted_bytes(call: CollectiveCall, ranks: int) -> int:
    """Return the bytes of shared memory that an all-reduce takes on each rank; 0 if it cannot go through shared memory.

    Shared memory serves sums and averages over all ranks of CPU tensors of one dtype (floating, int32 or int64) with at
    most 64 MiB of elements over all ranks together.

    Args:
        call: description of the collective.
        ranks: number of ranks of the job.
    """
    served = call.kind == "allreduce" and call.op in (ReduceOperation.SUM, ReduceOperation.AVERAGE)
    if not served or call.device != "cpu" or call.process_set or len(set(call.dtypes)) != 1:
        return 0
    dtype = getattr(torch, call.dtypes[0])
    numbers = dtype.is_floating_point or dtype in (torch.int32, torch.int64)
    data = _elements(call) * dtype.itemsize
    return _LINE + 2 * _padded(data) if numbers and data and data * ranks <= LARGEST else 0


def _elements(call: CollectiveCall) -> int:
    return sum(math.prod(shape) for shape in call.shapes)


def _padded(size: int) -> int:
    return -(-size // _LINE) * _LINE


class PostedReduction:
    """One all-reduce that the ranks of a node repeat in shared memory, without messages: its buffers and counters.

    Each rank has such an object. A repetition has a number, its attempt: each rank writes its tensors (``post``), waits
    until all have (``complete``) and adds them up (``reduce_into``). Until all have written, rank 0 may cancel the
    attempt (``revoke``). No method sends a message.

    Args:
        call: the all-reduce, one for which ``posted_bytes`` is not 0.
        rank: this rank; rank 0 is the one that may cancel.
        slots: for each of two ranks or more, in rank order, memory that all ranks see: (``posted_bytes``,) uint8, zeros
            at first.

    Attributes:
        call: as the argument.
    """

    def __init__(self, call: CollectiveCall, rank: int, slots: Sequence[Tensor]) -> None:
        self.call = call
        count, dtype = _elements(call), getattr(torch, call.dtypes[0])
        data = count * dtype.itemsize
        self._words = [slot[:_LINE].view(torch.int64).numpy().data for slot in slots]
        self._mine, self._decided = self._words[rank], self._words[0]
        starts = (_LINE, _LINE + _padded(data))
        self._buffers = [[slot[start : start + data].view(dtype) for slot in slots] for start in starts]
        self._own = [buffers[rank] for buffers in self._buffers]
        self._total = torch.empty(count, dtype=dtype)
        # As many views as tensors, made once.
        self._own_parts = [self._parts(own) for own in self._own]
        self._total_parts = self._parts(self._total)

    def post(self, tensors: Sequence[Tensor]) -> int:
        """Write this rank's tensors, times the prescale factor, into shared memory, to be all-reduced there.

        Called once for each repetition of the all-reduce. Does not wait for other ranks.

        Args:
            tensors: this rank's tensors, of the shapes of the all-reduce; may be reused at once.

        Returns:
            Attempt number of this repetition of the all-reduce, equal on all ranks, by which ``complete``, ``revoked``
            and ``reduce_into`` identify it.
        """
        attempt = self._next()
        turn = attempt >> _ATTEMPTS & 1
        foreach_copy_(self._own_parts[turn], list(tensors))
        if self.call.prescale != 1.0:
            self._own[turn].copy_(scale(self._own[turn], self.call.prescale))
        self._mine[_POSTED] = attempt
        with _fence:
            return attempt

    def post_again(self, attempt: int) -> int:
        """Contribute the tensors of a cancelled attempt at an all-reduce again, from shared memory, under a new number.

        An attempt is one try to repeat the all-reduce, which rank 0 may cancel (``revoke``). Local: copies nothing and
        does not wait for other ranks.

        Args:
            attempt: number of the cancelled attempt, as ``post`` or this method returned it.

        Returns:
            Number of the new attempt.
        """
        # Of the same instance, and so in the same buffer.
        self._mine[_POSTED] = attempt = max(attempt, self._decided[_REVOKED]) + 1
        with _fence:
            return attempt

    def posted(self, attempt: int) -> list[int]:
        """Return the global ranks that have written their tensors for an attempt at this all-reduce, or a later one.

        Rank 0 finds by it which ranks are missing. Local: reads counters in shared memory; does not wait.

        Args:
            attempt: number of one repetition of the all-reduce, as ``post`` returned it.
        """
        return [rank for rank, words in enumerate(self._words) if words[_POSTED] >= attempt]

    def complete(self, attempt: int) -> bool:
        """Return whether all ranks have written their tensors for an attempt at this all-reduce.

        A rank that waits for the result calls this method repeatedly. Once it is True, the attempt cannot be cancelled
        any more, and ``reduce_into`` may compute the result. Local: reads counters in shared memory; does not wait.

        Args:
            attempt: number of one repetition of the all-reduce, as ``post`` returned it.
        """
        for words in self._words:
            if words[_POSTED] < attempt:
                return False
        return not self._overtaken(attempt, _PROPOSED)

    def revoked(self, attempt: int) -> bool:
        """Return whether rank 0 has cancelled an attempt at this all-reduce before all ranks had written their tensors.

        Local; does not wait. ``post_again`` then starts a new attempt with the same tensors.

        Args:
            attempt: number of one repetition of the all-reduce, as ``post`` returned it.
        """
        return self._overtaken(attempt, _REVOKED)

    def revoke(self, attempt: int) -> bool:
        """Cancel an attempt at this all-reduce, unless all ranks have written their tensors already. Only for rank 0.

        The coordinator calls this method if the all-reduce must fail, or be performed by messages, such as with a rank
        that has joined. Local; does not wait. Other ranks see the cancellation by ``revoked``.

        Args:
            attempt: number of one repetition of the all-reduce, as ``post`` returned it.

        Returns:
            True if the attempt is cancelled; False if it is complete.
        """
        if self.complete(attempt):
            return False
        words = self._decided
        words[_PROPOSED] = attempt
        with _fence:
            if len(self.posted(attempt)) < len(self._words):
                words[_REVOKED] = attempt
                return True
        words[_PROPOSED] = words[_REVOKED]
        return False

    def reduce_into(self, outputs: Sequence[Tensor], attempt: int) -> None:
        """Compute the result of an all-reduce from the tensors that all ranks have written into shared memory.

        Adds the tensors in rank order, and applies averaging and postscale. Local: does not wait for other ranks. Every
        rank computes the same bits.

        Args:
            outputs: tensors of the shapes of the all-reduce; overwritten by the results.
            attempt: number of one repetition of the all-reduce, for which ``complete`` was True.
        """
        total, (first, second, *others) = self._total, self._buffers[attempt >> _ATTEMPTS & 1]
        if total.dtype in (torch.float16, torch.bfloat16):
            # Rounded once.
            wide = first.float().add_(second)
        else:
            wide = torch.add(first, second, out=total)
        for other in others:
            wide += other
        reduced = finish_reduction(wide, self.call, len(self._words))
        if reduced is not total:
            total.copy_(reduced)
        foreach_copy_(list(outputs), self._total_parts)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        sizes = [math.prod(shape) for shape in self.call.shapes]
        return [part.view(shape) for part, shape in zip(flat.split(sizes), self.call.shapes, strict=True)]

    def _next(self) -> int:
        last, revoked = self._mine[_POSTED], self._decided[_REVOKED]
        return int(revoked + 1 if revoked >= last else ((last >> _ATTEMPTS) + 1) << _ATTEMPTS)

    def _overtaken(self, attempt: int, word: int) -> bool:
        # Of a later instance: this one is complete.
        decided = self._decided[word]
        return bool(decided >= attempt and decided >> _ATTEMPTS == attempt >> _ATTEMPTS)


class PostedReductions:
    """Allocates shared memory for the repeated all-reduces of a session whose ranks are all on one node.

    Args:
        comm: communicator of all ranks, on one node.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._segment: SharedMemorySegment | None = None
        self._used = self._size = self._total = 0
        self._refused = False

    def make(self, call: CollectiveCall) -> PostedReduction | None:
        """Reserve shared memory in which the ranks of a node will perform one all-reduce repeatedly.

        Collective over all ranks of the job, which must call it in the same order. Where a new segment is made, the
        ranks exchange messages (a broadcast and all-reduces) and block; otherwise nothing is sent.

        Args:
            call: description of an all-reduce that shared memory serves, as the function ``posted_bytes`` tells: a sum
                or average over all ranks of dense CPU tensors of one dtype, with at most 64 MiB over all ranks.

        Returns:
            A ``PostedReduction``, the buffers and counters of this all-reduce in shared memory, with the methods that
            perform it; None on all ranks where there is no shared memory, or not enough.

        Raises:
            MismatchError: ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        size = posted_bytes(call, self._comm.size)
        if self._used + size > self._size and not self._grow(size):
            return None
        assert self._segment is not None
        start, self._used = self._used, self._used + size
        slots = [self._segment.slot(rank)[start : start + size] for rank in range(self._comm.size)]
        return PostedReduction(call, self._comm.rank, slots)

    def _grow(self, size: int) -> bool:
        room = max(_FIRST_SEGMENT, size)
        if self._refused or self._total + room > _BUDGET:
            return False
        self._segment = attach(self._comm, room)
        self._refused = self._segment is None
        self._used, self._size, self._total = 0, 0 if self._refused else room, self._total + room
        return not self._refused
