"""Buffers of each logical worker, such as batch-norm statistics, where several workers share a device."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.comm.partition import sharers, workers_of
from tutti.device import current_stream, is_accelerator, numbers_for, widest_float
from tutti.errors import UsageError
from tutti.nn.swap import BufferRef, buffers
from tutti.parallel.ddp.buffer_handover import BufferHandover
from tutti.torch_compat import BatchNormBase, foreach_norm, foreach_sub, tensor_version
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState


class _Writer(Enum):
    """What may write buffers at present."""

    FORWARDS = "the forwards of a worker, or its bodies of a custom loop"
    LAST_BODY = "a custom loop's last body of a global batch, after the update; its writes are the last worker's own"
    SCRIPT = "the script, between global batches; its writes are meant for every worker"


class _Copied(NamedTuple):
    """Flags on their way from the device to the host, and an event behind the copy."""

    flags: Tensor
    event: torch.Event


class WorkerBuffers:
    """The module buffers (batch-norm statistics) of each logical worker of this rank; the model holds one worker's.

    A logical worker is one of N fixed shares of the global batch; a rank computes one or more of them, or shares a
    worker with other ranks. A change from one worker to another replaces tensor objects in the modules and copies
    nothing. Construction clones the model's buffers for each further worker; where ranks share a worker, it also makes
    point-to-point channels, which all data ranks do together.

    Args:
        parts: the modules on this rank.
        run_context: communicators and settings of the run.
        not_owned: names of buffers that another rank of the replica saves.
        in_turn: whether ranks that share a worker may wait for each other before a forward; False where forwards are
            collective (FSDP2).
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        run_context: RunContext,
        not_owned: Collection[str] = (),
        in_turn: bool = True,
    ) -> None:
        self._comm, self._run_context, self._not_owned = run_context.comms.replica, run_context, not_owned
        self._slots = buffers(parts)
        self._own = {w: [slot.get().clone() for slot in self._slots] for w in run_context.mine[1:]}
        if len(run_context.mine):
            self._own[run_context.mine[0]] = [slot.get() for slot in self._slots]
        self._inside = run_context.mine[0] if len(run_context.mine) else -1
        self._learned, self._writer, self._custom = set[int](), _Writer.SCRIPT, False
        self._pending: _Copied | None = None
        self._marks: list[tuple[Tensor, int]] = []
        self._look()
        self._handover: BufferHandover | None = None
        if run_context.sharers is not None:
            self._handover = BufferHandover(self._slots, run_context, in_turn)

    def enter(self, worker: int, step: int = 0) -> None:
        """Put a logical worker's buffers (batch-norm statistics) into the model, in place of the previous worker's.

        A logical worker is one of N fixed shares of the global batch. Where several ranks share the worker's
        micro-batches, the call blocks until the rank before this one has sent the buffers that its forwards have left;
        the first call of a step first completes a previous step without ``finish``, by the collectives of ``close``. On
        an accelerator the host does not wait for the device: writes by the script between the steps are found on the
        device, and ``verify`` raises the first of the errors below.

        Args:
            worker: index of the worker, one of those that this rank computes.
            step: index of the global step.

        Raises:
            UsageError: the script has written a buffer between the steps. Raised in two cases. First, this rank
                computes several workers, and forwards write the buffer too, so that each worker has its own value;
                allowed are a reset to zeros, or to ones for a variance, and writes in a custom loop
                (``begin_custom_loop``). Second, several ranks share this worker; there every such write is refused.
            PeerError: the previous rank of a shared worker is lost, or does not send its buffers within the timeout.
        """
        if self._handover is not None:
            self._handover.begin(step)
        self._follow_writes_in_step()
        if worker != self._inside and self._slots:
            self._keep()
            for slot, tensor in zip(self._slots, self._own[worker], strict=True):
                slot.put(tensor)
            self._inside = worker
        self._writer, self._marks = _Writer.FORWARDS, self._marked()

    def written(self) -> list[str]:
        """Return the names of module buffers that the script has written since the end of the previous step.

        Not collective, and no wait for the device: writes through ``.data`` are not found. Empty where this rank has
        one logical worker (share of the global batch), within a step, and in the body of a custom training loop.
        """
        if self._writer != _Writer.SCRIPT:
            return []
        return [self._slots[i].name for i in sorted(self._visibly_changed(self._marked()))]

    def pass_on(self) -> None:
        """Send the model's buffers (batch-norm statistics) to the next rank that computes the same logical worker.

        Called after the step's last forward. A logical worker is a fixed share of the global batch; several ranks
        compute one worker only where there are more data ranks than workers; elsewhere nothing is done. Does not block;
        ``finish`` completes the sends.

        Raises:
            UsageError: ranks share workers, and a forward has changed a buffer (outside reproducible mode: other than
                batch-norm statistics), either with FSDP2, whose forwards are collective, so that ranks cannot compute
                one after the other, or after a first step in which no forward of any rank changed a buffer.
        """
        if self._handover is not None:
            self._handover.pass_on()

    def finish(self) -> None:
        """Make a logical worker's buffers equal on all ranks that share the worker, before the update.

        A logical worker is a fixed share of the global batch; several ranks share one where there are more data ranks
        than workers. Then all data ranks must call ``finish``: there is an all-gather over them in the first step, and
        in each step if forwards change buffers. Without shared workers nothing is sent. Changes of buffers from now
        until the next ``enter`` count as made by the script, and not by a forward.

        Raises:
            UsageError: ranks share workers, and a buffer has changed since ``pass_on``; or a forward has changed a
                buffer (outside reproducible mode: other than batch-norm statistics), either with FSDP2, whose forwards
                are collective, so that ranks cannot compute one after the other, or after a first step in which no
                forward of any rank changed a buffer.
            PeerError: ranks share workers, and a data rank is lost, or does not make the call in time.
        """
        if self._handover is not None:
            self._handover.finish()
        self._follow_writes_in_step()
        self._writer = _Writer.LAST_BODY if self._custom else _Writer.SCRIPT
        self._look()

    def verify(self) -> None:
        """Raise UsageError if ``enter`` has found on an accelerator that the script wrote a module buffer.

        The buffers are those of logical workers, fixed shares of the global batch. ``enter`` starts to copy its finding
        to the host and does not wait. Called before the update, after the host has read a result of this step's
        backward, so that the copy is complete and the host does not wait here either. Not collective.

        Raises:
            UsageError: this rank computes several workers, and the script has written a buffer that forwards write too,
                other than by a reset to zeros, or to ones for a variance: each worker has its own value of it.
        """
        if self._pending is None:
            return
        (flags, event), self._pending = self._pending, None
        if not event.query():
            event.synchronize()
        if own := flags.nonzero().flatten().tolist():
            self._refuse(self._slots[own[0]])

    def begin_custom_loop(self) -> None:
        """Give the script's writes to buffers in its own training loop to this rank's last logical worker alone.

        Each logical worker, one of N fixed shares of the global batch, has its own copy of buffers such as batch-norm
        statistics. The rule holds on a rank that computes several workers, for a buffer that forwards write, too, and
        that the script writes between an update (``finish``) and the next ``enter``. Until ``leave_custom_loop`` such a
        write goes to the copy of the rank's last worker; outside of custom loops it raises UsageError in the next step.
        In both cases a reset to zeros (ones for a variance), and a write to a buffer that no forward writes, go to the
        copies of all workers. Not collective.
        """
        self._custom = True

    def leave_custom_loop(self) -> None:
        """Treat the script's writes to buffers as writes outside a custom loop, until the next ``begin_custom_loop``.

        Called when the script's own training loop over an epoch has ended. A logical worker is a fixed share of the
        global batch with its own buffers; a rank may compute several. On a rank with several workers, a reset to zeros
        (ones for a variance), and a write to a buffer that no forward writes, outside the loop go to all workers; any
        other write there raises UsageError in the next step. Writes that the script made within the loop, before this
        call, are settled here: of buffers that forwards write only the last worker takes the values. Not collective.
        """
        self._custom = False
        if self._writer == _Writer.LAST_BODY:
            self._follow_writes()
            self._writer = _Writer.SCRIPT
            self._look()

    def close(self) -> None:
        """Make a logical worker's buffers equal on all ranks that share the worker, after a step without backward.

        A logical worker is a fixed share of the global batch; several ranks share one where there are more data ranks
        than workers. All data ranks must call ``close``: there is an all-gather over them in the first step, and in
        each step if forwards change buffers. Does nothing after ``finish``, and where ranks share no worker.

        Raises:
            UsageError: as ``finish``: ranks share workers, and a buffer has changed after the last forward; or in a
                forward, with FSDP2 or after a first step in which no forward changed a buffer.
            PeerError: a data rank is lost, or does not make the call in time.
        """
        if self._handover is not None:
            self._handover.close()

    def state(self) -> dict[str, Tensor]:
        """Return the buffers (batch-norm statistics) of this rank's logical workers for a checkpoint. Not collective.

        Returns:
            A dict with keys ``"{worker}/{buffer}"``: index of the logical worker (share of the global batch with its
            own buffers) and name of the buffer in the model. If several ranks share a worker, only the first of these
            ranks returns its buffers. Empty for a run of one worker. The tensors are not copied: the next forwards may
            change them in place.

        Raises:
            UsageError: this rank computes several workers, and the script has written a buffer that forwards write too,
                other than by a reset to zeros, or to ones for a variance: each worker has its own value of it.
        """
        if self._run_context.workers == 1 or not self._slots or not self._run_context.begins_worker:
            return {}
        self._take_out()
        rows = [
            (f"{w}/", slot.name, t) for w, row in self._own.items() for slot, t in zip(self._slots, row, strict=True)
        ]
        return {worker + name: t for worker, name, t in rows if name not in self._not_owned}

    def load(self, saved: SavedState) -> None:
        """Load the buffers of this rank's logical workers from a checkpoint, in place. Not collective.

        A logical worker is one of N fixed shares of the global batch, with its own buffers. If the checkpoint has the
        same N, each worker takes its own buffers, ``{worker}/{buffer}`` of the group ``workers``; otherwise all workers
        take the merged buffers, ``{buffer}`` of the group ``model``.

        Args:
            saved: the checkpoint.

        Raises:
            CheckpointError: the checkpoint lacks a buffer, or a file of it differs from its manifest.
        """
        # What the script has loaded into the model is in the checkpoint, too.
        self._pending = None
        self._look()
        self._take_out()
        if self._handover is not None:
            self._handover.forget()
        names = saved.names("workers")
        same = self._slots and f"{self._run_context.workers - 1}/{self._slots[0].name}" in names
        same = same and f"{self._run_context.workers}/{self._slots[0].name}" not in names
        for worker, row in self._own.items():
            for slot, tensor in zip(self._slots, row, strict=True):
                source = ("workers", f"{worker}/{slot.name}") if same else ("model", slot.name)
                tensor.copy_(saved.get(*source))
        self._look()

    def _take_out(self) -> None:
        """Read the current worker's buffers from the model, with what the script has written. Waits for the device."""
        self.verify()
        self._follow_writes()
        self._keep()

    def _keep(self) -> None:
        """Keep the current worker's buffers as the model has them, because a module may have assigned new tensors."""
        if self._inside >= 0:
            self._own[self._inside] = [slot.get() for slot in self._slots]

    def _follow_writes_in_step(self) -> None:
        """Call ``_follow_writes``, or on an accelerator its form that does not wait; there ``verify`` refuses."""
        if len(self._own) < 2:
            return
        if self._writer == _Writer.FORWARDS or not self._on_accelerator():
            self._follow_writes()
        else:
            self.verify()
            self._follow_writes_on_device()

    def _on_accelerator(self) -> bool:
        places = {slot.get().device for slot in self._slots}
        return len(places) == 1 and is_accelerator(places.pop())

    def _follow_writes(self) -> None:
        """Give a buffer that the script has written between global batches to all workers of this rank.

        A buffer that no forward and no body of a loop has written is every worker's alike, such as a temperature that
        the script lowers in each epoch. The others, such as statistics, are each worker's own: of these only a reset
        is the same for all workers.

        Raises:
            UsageError: the script has written a buffer of which each worker has a value of its own.
        """
        if len(self._own) < 2:
            return
        marks = self._marked()
        changed = self._visibly_changed(marks)
        if self._writer == _Writer.FORWARDS:
            self._learned |= changed
        else:
            changed |= {i for i, each in enumerate(self._silently_changed(marks).tolist()) if each}
            own = {i for i in changed & self._learned if not _is_reset(self._slots[i])}
            if own and self._writer == _Writer.SCRIPT:
                self._refuse(self._slots[min(own)])
            for i in changed - own:
                for worker, row in self._own.items():
                    row[i] = marks[i][0] if worker == self._inside else marks[i][0].clone()
        self._marks = marks

    @torch.no_grad()
    def _follow_writes_on_device(self) -> None:
        """Do the same as ``_follow_writes`` with flags on the device, and copy refusals to the host for ``verify``."""
        if len(self._own) < 2:
            return
        marks = self._marked()
        changed = self._visibly_changed(marks)
        if any(_form(self._marks[i][0]) != _form(marks[i][0]) for i in changed):
            # No element of the one tensor can be selected in place of the other's.
            self._follow_writes()
            return
        tensors, device = [tensor for tensor, _ in marks], marks[0][0].device
        written, every = self._silently_changed(marks), range(len(marks))
        if changed:
            written |= numbers_for(device, [i in changed for i in every], torch.bool).to(device, non_blocking=True)
        learned = numbers_for(device, [i in self._learned for i in every], torch.bool).to(device, non_blocking=True)
        own = written & learned & ~_resets(self._slots, tensors)
        if self._writer == _Writer.SCRIPT:
            self._pending = _Copied(own.to("cpu", non_blocking=True), current_stream(device).record_event())
        for i, taken in enumerate((written & ~own).unbind()):
            for worker, row in self._own.items():
                row[i] = tensors[i] if worker == self._inside else torch.where(taken, tensors[i], row[i])
        self._marks = marks

    def _visibly_changed(self, marks: Sequence[tuple[Tensor, int]]) -> set[int]:
        """Return the buffers that are other tensors, or other versions of a tensor, than when last looked at."""
        return {
            i
            for i, ((before, version), (now, newer)) in enumerate(zip(self._marks, marks, strict=True))
            if before is not now or version != newer
        }

    def _refuse(self, slot: BufferRef) -> None:
        raise UsageError(
            f"the script has written the buffer {slot.name} between global batches, and forwards write it too",
            why=f"each of the {len(self._own)} logical workers of this device has a value of its own, and the script"
            " changed one of them",
            remedy="write it in the body of a loop over run.microbatches(), which runs for each worker; or reset it to"
            f" zero; or take as many workers as data ranks ({self._comm.size})",
        )

    def _look(self) -> None:
        """Remember the buffers in the model as they are now, to see what the script writes."""
        if len(self._own) < 2:
            return
        self._marks = self._marked()
        self._norms = _norms([tensor for tensor, _ in self._marks])

    def _silently_changed(self, marks: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Return, for each buffer, whether its value has changed since ``_look``; writes through ``.data`` count too.

        Returns:
            (buffers,) truth values on the buffers' device.
        """
        norms = _norms([tensor for tensor, _ in marks])
        return (norms != self._norms) & ~(norms.isnan() & self._norms.isnan())

    def _marked(self) -> list[tuple[Tensor, int]]:
        """Return each buffer in the model with its version counter, where several workers share this rank."""
        if len(self._own) < 2:
            return []
        return [(slot.get(), tensor_version(slot.get())) for slot in self._slots]

    def replicated(self) -> dict[str, Tensor]:
        """Return the module buffers (batch-norm statistics) that are equal on all data ranks. Not collective.

        Returns:
            A dict from the buffers' names in the model to the model's own tensors, in a run of one logical worker
            (share of the global batch with its own buffers). With several workers, whose buffers differ, an empty dict.
        """
        return {slot.name: slot.get() for slot in self._slots} if self._run_context.workers == 1 else {}

    def of_all(self) -> dict[str, Tensor]:
        """All-gather the module buffers (batch-norm statistics) of all N logical workers, on every rank.

        A logical worker is one of N fixed shares of the global batch, with its own buffers. Collective over the data
        ranks: one all-gather of all workers' buffers for each dtype; blocks.

        Returns:
            A dict with keys ``"{worker}/{buffer}"`` (index of the worker, name of the buffer in the model) and new
            tensors. The workers of ranks that were lost get the merge of the present workers' buffers. Empty for N = 1.

        Raises:
            UsageError: this rank computes several workers, and the script has written a buffer that forwards write too,
                other than by a reset to zeros, or to ones for a variance: each worker has its own value of it.
            PeerError: a data rank is lost, or does not make the call in time.
        """
        if self._run_context.workers == 1 or not self._slots:
            return {}
        self._take_out()
        table = self._gather()
        rows = dict(zip(_present(self._comm, self._run_context.workers), zip(*table, strict=True), strict=True))
        lost = list(self._merge(table).values())
        return {
            f"{worker}/{slot.name}": tensor
            for worker in range(self._run_context.workers)
            for slot, tensor in zip(self._slots, rows.get(worker, lost), strict=True)
        }

    def merged(self) -> dict[str, Tensor]:
        """Return the module buffers merged over all N logical workers, by name: the same bits for any number of ranks.

        Logical workers are the N fixed shares of the global batch, each with its own buffers. Batch-norm statistics are
        pooled in worker order in float64, or float32 on a device without it: mean of means; mean of variances plus the
        variance of the means (so that they are the moments of all workers' samples together). Other floating buffers
        are averaged; integers take the largest. Collective over the data ranks: one all-gather of all workers' buffers
        for each dtype, none for N = 1. Where ranks share workers and the last step had no backward, the collectives of
        ``close`` come first.

        Returns:
            A dict from the buffers' names in the model to new tensors of the buffers' shapes and dtypes; for N = 1 the
            model's own tensors.

        Raises:
            UsageError: this rank computes several workers, and the script has written a buffer that forwards write too,
                other than by a reset to zeros, or to ones for a variance: each worker has its own value of it. Or ranks
                share workers, and a buffer has changed after the last forward of a step without backward.
            PeerError: a data rank is lost, or does not make the call in time.
        """
        if not self._slots:
            return {}
        self.close()
        if self._run_context.workers == 1:
            return {slot.name: slot.get() for slot in self._slots}
        self._take_out()
        return self._merge(self._gather())

    def _merge(self, table: Sequence[Tensor]) -> dict[str, Tensor]:
        by_name = {slot.name: rows for slot, rows in zip(self._slots, table, strict=True)}
        return {slot.name: _merge(slot, by_name) for slot in self._slots}

    def _gather(self) -> list[Tensor]:
        """All-gather each buffer into a tensor (N, *shape), in worker order, without workers of lost ranks."""
        slots = range(len(self._slots))
        dtypes = sorted({slot.get().dtype for slot in self._slots}, key=str)
        table: list[Tensor] = [torch.empty(0)] * len(self._slots)
        there = self._comm.alive_ranks
        for dtype in dtypes:
            members = [i for i in slots if self._slots[i].get().dtype == dtype]
            rows = [torch.cat([self._own[w][i].reshape(-1) for i in members]) for w in self._run_context.mine]
            everyone = _gather_rows(rows, self._comm, self._run_context.workers)
            start = 0
            for i in members:
                shape = self._slots[i].get().shape
                table[i] = everyone[:, start : start + shape.numel()].reshape(len(everyone), *shape)
                start += shape.numel()
        # A rank that was lost between two all-gathers is in some tensors only: gather again.
        return table if self._comm.alive_ranks == there else self._gather()


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _norms(tensors: Sequence[Tensor], order: float = 2) -> Tensor:
    """Return the norm of each buffer, (buffers,) on their device, with few kernels."""
    if not tensors:
        return torch.empty(0)
    norms, device = foreach_norm(_as_floats(tensors), order), tensors[0].device
    if len({(norm.device, norm.dtype) for norm in norms}) == 1:
        return torch.stack(norms).to(widest_float(device))
    return torch.stack([norm.to(device, widest_float(device)) for norm in norms])


def _as_floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors with real or complex elements, at least one; scalar counts of one device are cast together."""
    found = [t if t.is_floating_point() or t.is_complex() or t.dim() == 0 else t.float() for t in tensors]
    found = [t if t.numel() else t.new_zeros(1) for t in found]
    counts = [i for i, t in enumerate(found) if not (t.is_floating_point() or t.is_complex())]
    for device in {found[i].device for i in counts}:
        here = [i for i in counts if found[i].device == device]
        for i, cast in zip(here, torch.stack([found[i] for i in here]).float().unbind(), strict=True):
            found[i] = cast
    return found


def _is_reset(slot: BufferRef) -> bool:
    """Return whether a buffer has the values of a reset: zeros, or ones in a batch norm's variance."""
    return bool((slot.get() == _reset_value(slot)).all())


def _resets(slots: Sequence[BufferRef], tensors: Sequence[Tensor]) -> Tensor:
    """Return which of all buffers have the values of a reset, (buffers,) truth values on their device."""
    ones = [i for i, slot in enumerate(slots) if _reset_value(slot)]
    distances = list(tensors)
    for i, distance in zip(ones, foreach_sub([tensors[i] for i in ones], 1.0) if ones else (), strict=True):
        distances[i] = distance
    return _norms(distances, math.inf) == 0


def _reset_value(slot: BufferRef) -> int:
    return int(slot.key == "running_var" and isinstance(slot.owner, BatchNormBase))


def _gather_rows(rows: Sequence[Tensor], comm: Communicator, workers: int) -> Tensor:
    """All-gather one row a worker.

    Args:
        rows: (width,) of each worker of this rank.
        comm: the data ranks.
        workers: N; ranks with fewer workers than rank 0 pad one row.

    Returns:
        (N, width) in worker order, without the workers of lost ranks.
    """
    most = len(workers_of(workers, comm.size, 0))
    mine = torch.stack(list(rows))
    padded = mine.new_zeros(most, mine.shape[1])
    padded[: len(rows)] = mine
    parts = comm.all_gather(padded, "buffers of all workers")
    return torch.cat([p[: len(_led(workers, comm.size, r))] for r, p in zip(comm.alive_ranks, parts, strict=True)])


def _present(comm: Communicator, workers: int) -> list[int]:
    """Return the workers of the ranks that took part in the last collective."""
    return [worker for rank in comm.alive_ranks for worker in _led(workers, comm.size, rank)]


def _led(workers: int, ranks: int, rank: int) -> range:
    """Return the workers of a rank, without a worker that it shares with a rank before it."""
    return workers_of(workers, ranks, rank) if sharers(workers, ranks, rank).start == rank else range(0)


def _merge(slot: BufferRef, table: dict[str, Tensor]) -> Tensor:
    values = table[slot.name]
    if not (values.is_floating_point() or values.is_complex()):
        return values.amax(dim=0)
    mean = _mean(values)
    prefix = slot.name.removesuffix(slot.key)
    if slot.key == "running_var" and f"{prefix}running_mean" in table:
        means = table[f"{prefix}running_mean"]
        mean = mean + _mean((means.to(widest_float(means.device)) - _mean(means)) ** 2)
    return mean.to(values.dtype)


def _mean(values: Tensor) -> Tensor:
    """Return the mean over the first axis in float64 or complex128, added in order."""
    total = values[0].to(torch.promote_types(values.dtype, widest_float(values.device)))
    for value in values[1:]:
        total = total + value
    return total / len(values)
