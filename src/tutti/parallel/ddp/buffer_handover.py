"""Buffers, such as batch-norm statistics, of a logical worker whose micro-batches several data ranks share (R > N)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Pending
from tutti.errors import UsageError
from tutti.nn.swap import BufferRef
from tutti.torch_compat import BatchNormBase, tensor_version
from tutti.types.run_context import RunContext

_KIND = "buffers of a shared worker"
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BufferHandover:
    """Pass the module buffers (batch-norm statistics) of one logical worker along the data ranks that share the worker.

    A logical worker is one of N fixed shares of the global batch; with more data ranks than workers, several ranks
    share one. Each of these ranks computes a part of the worker's micro-batches, in rank order. A rank begins a step
    with the buffers that the rank before it has after its last forward, so that each forward reads the buffers that it
    would read on one device; backwards overlap with the next rank's forwards. Where no forward changes a buffer,
    nothing is sent after the first step. At the end of a step all ranks of the worker take the last rank's buffers.

    Outside reproducible mode ranks do not wait for each other's batch-norm statistics, which no forward of training
    reads. k updates of momentum m turn a statistic s into (1 - m)^k s + c. The ranks all start from the same s, and
    their updates are composed in rank order at the end of the step, equal up to rounding.

    The constructor is collective over the data ranks, between which it makes point-to-point channels.

    Args:
        slots: references to the buffers on this rank.
        run_context: communicators and settings of the run; its ``sharers`` are the data ranks that share this rank's
            worker.
        in_turn: whether ranks may wait for each other before a forward; False where forwards have collectives (FSDP2),
            and then a forward that changes a buffer, other than batch-norm statistics, raises UsageError.
    """

    def __init__(self, slots: Sequence[BufferRef], run_context: RunContext, in_turn: bool) -> None:
        self._all, self._comm, self._in_turn = slots, run_context.comms.replica, in_turn
        self._ranks = run_context.sharers or range(self._comm.rank, self._comm.rank + 1)
        self._norms = [] if run_context.reproducible else _norms(slots)
        composed = {id(norm.owner) for norm in self._norms}
        self._slots = [slot for slot in slots if id(slot.owner) not in composed]
        self._begun: list[tuple[Tensor, ...]] = []
        self._changing: bool | None = None if self._slots else False
        self._changed = False
        self._step, self._open, self._passed = -1, False, True
        self._marks: list[tuple[int, int]] | None = None
        self._sent: list[tuple[Pending, Tensor]] = []
        run_context.comms.p2p_channels({_KIND: 1}, "replica", "shard")

    def begin(self, step: int) -> None:
        """Receive a shared logical worker's module buffers before this rank's first forward of the step.

        A logical worker is one of N fixed shares of the global batch; with more data ranks than workers, several
        consecutive ranks compute a worker's micro-batches, in rank order. The previous of these ranks sends its buffers
        by ``pass_on``; this call blocks until they have come, and overwrites this rank's. Outside reproducible mode
        batch-norm statistics are not among them. Nothing is received on the worker's first rank, in later calls of the
        same step, with FSDP2, and after the first step where forwards change no buffers. A previous step without
        ``finish`` is finished first, which is collective over all data ranks (the all-gathers of ``finish``).

        Args:
            step: index of the global step.

        Raises:
            UsageError: the script has changed a buffer between the steps; or, in a previous step without ``finish``, a
                forward has changed one with FSDP2, or after a first step in which no forward changed a buffer.
            PeerError: the previous rank is lost, or does not send its buffers within the timeout.
        """
        if step == self._step or not self._all:
            return
        self.close()
        self._check()
        self._step, self._open, self._passed = step, True, False
        if self._hands_on and self._comm.rank != self._ranks.start:
            for flat, members in self._flat():
                self._comm.receive(flat, self._comm.rank - 1, _KIND)
                _write(flat, members)
        self._begun = [norm.copies() for norm in self._norms]
        self._marks = _look(self._slots)

    def pass_on(self) -> None:
        """Start to send this rank's module buffers to the next data rank that shares the logical worker.

        A logical worker is one of N fixed shares of the global batch; with more data ranks than workers, several
        consecutive ranks compute a worker's micro-batches. Called after this rank's last forward of the step. The send
        is point to point and does not wait for the receiver (``finish`` does); later calls in the same step do nothing.
        Nothing is sent by the worker's last rank, and after the first step by any rank if forwards change no buffers.
        Outside reproducible mode batch-norm statistics are not sent.

        Raises:
            UsageError: a forward has changed a buffer (outside reproducible mode: other than batch-norm statistics),
                either with FSDP2, whose forwards are collective, so that ranks cannot compute one after the other; or
                after a first step in which no forward of any rank changed a buffer.
        """
        if self._passed:
            return
        self._passed = True
        self._changed = _look(self._slots) != self._marks
        if self._changed and not self._hands_on:
            self._refuse(
                "FSDP2's forwards are collective, so that ranks cannot compute them one after the other"
                if self._changing is None
                else "a buffer that no forward of the first step has changed is changed now"
            )
        if self._hands_on and self._comm.rank != self._ranks[-1]:
            self._sent = [(self._comm.start_send(f, self._comm.rank + 1, _KIND), f) for f, _ in self._flat()]
        self._marks = _look(self._all)

    def finish(self) -> None:
        """Copy the last sharing rank's module buffers to all ranks that share the logical worker, before the update.

        A logical worker is one of N fixed shares of the global batch; several ranks compute its micro-batches, in rank
        order. Batch-norm statistics that were updated on each rank by itself are composed in rank order instead. Also
        waits for the sends of ``pass_on``. All data ranks must call ``finish``: there are all-gathers over them where a
        forward changes buffers or updates batch-norm statistics, and in the first step one of a flag that says whether
        forwards change buffers.

        Raises:
            UsageError: a buffer has changed after ``pass_on``; or a forward has changed a buffer (outside reproducible
                mode: other than batch-norm statistics), either with FSDP2, whose forwards are collective, so that ranks
                cannot compute one after the other, or after a first step in which no forward of any rank changed a
                buffer.
            PeerError: a data rank is lost, or does not make the call in time.
        """
        if not self._all:
            return
        self.pass_on()
        self._check()
        self._open = False
        if self._changing is None:
            flag = torch.tensor([self._changed], dtype=torch.int64)
            flags = self._comm.all_gather(flag, "whether forwards change buffers")
            self._changing = any(bool(other) for other in flags)
        if self._changing:
            for flat, members in self._flat():
                _write(self._comm.all_gather(flat, "buffers of shared workers")[self._ranks[-1]], members)
        if self._begun:
            self._compose()
        for pending, _ in self._sent:
            pending.wait()
        self._sent = []
        self._marks = _look(self._all)

    def close(self) -> None:
        """Make a shared logical worker's module buffers equal on all its ranks after a step without backward.

        A logical worker is one of N fixed shares of the global batch; several ranks compute its micro-batches. Called
        before buffers are read or the next step begins. If ``begin`` was called and ``finish`` was not, this call does
        the work of ``finish``: all data ranks must make the call, and they all-gather the buffers if forwards change
        them. Otherwise it does nothing.

        Raises:
            UsageError: as ``finish``: a buffer has changed after the last forward; or in a forward, with FSDP2 or after
                a first step in which no forward changed a buffer.
            PeerError: a data rank is lost, or does not make the call in time.
        """
        if self._open:
            self.finish()

    def forget(self) -> None:
        """Accept the present values of the module buffers, such as the values of a checkpoint that was just loaded.

        Otherwise the next step would find that buffers have changed outside of forwards, and raise UsageError: this
        call clears the record of the buffers' identities and versions. Not collective.
        """
        self._marks = None

    @property
    def _hands_on(self) -> bool:
        return self._in_turn and self._changing is not False

    def _compose(self) -> None:
        """Compose the ranks' updates of batch-norm statistics. Collective: one all-gather in float64."""
        own = torch.cat([n.update(begun) for n, begun in zip(self._norms, self._begun, strict=True)])
        rows = self._comm.all_gather(own.to(self._comm.device), "batch-norm statistics of shared workers")
        widths = [1 + 2 * len(mean) for mean, _, _ in self._begun]
        updates = [rows[rank].split(widths) for rank in self._ranks]
        for index, (norm, begun) in enumerate(zip(self._norms, self._begun, strict=True)):
            norm.write(begun, [update[index] for update in updates])
        self._begun = []

    def _check(self) -> None:
        """Raise UsageError where a buffer has changed since this rank has passed its buffers on."""
        if self._passed and self._marks is not None and _look(self._all) != self._marks:
            self._refuse("a buffer has changed outside the forwards before this device's last backward of the step")

    def _refuse(self, why: str) -> None:
        raise UsageError(
            "devices cannot share a worker whose buffers change in this way",
            where=f"step {self._step + 1}",
            why=why,
            remedy=f"take workers={self._comm.size} or more, or fewer devices",
        )

    def _flat(self) -> list[tuple[Tensor, list[Tensor]]]:
        """Return the buffers by dtype: a flat copy on the communicator's device, and the tensors that it holds."""
        tensors = [slot.get() for slot in self._slots]
        groups = [[t for t in tensors if t.dtype == dtype] for dtype in sorted({t.dtype for t in tensors}, key=str)]
        return [(torch.cat([t.detach().reshape(-1).to(self._comm.device) for t in group]), group) for group in groups]


class _Norm(NamedTuple):
    """A batch norm whose statistics are moving averages."""

    owner: nn.Module
    slots: tuple[BufferRef, ...]
    momentum: float

    def copies(self) -> tuple[Tensor, ...]:
        """Return copies of mean, variance and number of updates."""
        return tuple(slot.get().clone() for slot in self.slots)

    def update(self, begun: tuple[Tensor, ...]) -> Tensor:
        """Return this rank's updates since ``begun``: their number and the statistics, (1 + 2 · channels,), float64."""
        mean, variance, count = (slot.get() for slot in self.slots)
        return torch.cat([(count - begun[2]).reshape(1).double(), mean.double(), variance.double()])

    def write(self, begun: tuple[Tensor, ...], updates: Sequence[Tensor]) -> None:
        """Apply all ranks' updates to the statistics ``begun``, in rank order: s ← sᵣ + (1 - m)^kᵣ (s - s₀)."""
        start = torch.cat([begun[0].double(), begun[1].double()])
        now, count = start, begun[2]
        for update in (each.to(start.device) for each in updates):
            now = update[1:] + (1 - self.momentum) ** update[0] * (now - start)
            count = count + update[0].to(count.dtype)
        for slot, value in zip(self.slots, (*now.chunk(2), count), strict=True):
            slot.get().copy_(value)


def _norms(slots: Sequence[BufferRef]) -> list[_Norm]:
    """Return the batch norms among the owners of ``slots`` whose statistics are moving averages with a momentum."""
    of: dict[int, dict[str, BufferRef]] = {}
    for slot in slots:
        of.setdefault(id(slot.owner), {})[slot.key] = slot
    found = []
    for keys in of.values():
        owner = next(iter(keys.values())).owner
        if isinstance(owner, BatchNormBase) and owner.momentum is not None and keys.keys() == set(_STATISTICS):
            found.append(_Norm(owner, tuple(keys[key] for key in _STATISTICS), owner.momentum))
    return found


def _look(slots: Sequence[BufferRef]) -> list[tuple[int, int]]:
    """Return the identity and the version of each buffer."""
    return [(id(tensor), tensor_version(tensor)) for tensor in (slot.get() for slot in slots)]


def _write(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of ``flat`` into ``tensors``, in place."""
    with torch.no_grad():
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
