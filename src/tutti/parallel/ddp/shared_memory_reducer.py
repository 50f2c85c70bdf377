"""All-reduce of gradients in memory that all ranks of a node share: no messages, no copies but the sum itself.

Each rank packs its gradients into its slot of the segment. After a barrier each rank sums one slice of all slots and
writes the sum into every slot; after a second barrier every slot holds the whole sum. Two barriers a step, 2·n numbers
moved a rank. Ranks compare digests of their steps before the sum.

Where every tensor has an owner, as in ``central_storage``, only the owner sums it, in the first slot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from tutti.comm.partition import even_share
from tutti.comm.random_keys import name_key
from tutti.comm.shared_memory import SharedMemorySegment, attach
from tutti.device import is_accelerator
from tutti.parallel.ddp.buckets import METRICS, Bucket, ReducedSums, plan_buckets, read_sums
from tutti.parallel.ddp.gradient_arithmetic import scale_all
from tutti.parallel.ddp.reducers import Reducer
from tutti.parallel.ddp.step_agreement import edits_key, layout_key, refuse_mismatch
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext

_CHUNK_BYTES = 256 << 10
_ALIGN = 64
_DIGEST, _SQUARE, _TOTALS = 0, 1, 2
_STOP = _TOTALS + 2 + METRICS
_FLAGS = _STOP + 1


class SharedReducer(Reducer):
    """Sums the gradients of data ranks on one node in memory that all of them share; the CPU adds.

    Each rank has a slot of the shared memory: a header of 64-bit numbers (digest of the step, sum of squares of the
    slice that the rank sums, loss sums, stop flag, and for each parameter a flag that says whether it had a gradient),
    then the rank's gradient buckets.

    Args:
        parameters: (name, parameter) pairs; those with ``requires_grad`` are reduced.
        run_context: communicators and settings of the run.
        segment: shared memory with a slot for each rank.
        not_owned: names of parameters that another rank of the replica counts in the norm.
        owners: for each trainable parameter the only rank that receives its gradient, as an index among the data ranks;
            None: all ranks receive all.

    Attributes:
        listens: True: ``gradient_ready`` must be registered as a hook of autograd on every trained parameter.
    """

    listens = True

    def __init__(
        self,
        parameters: NamedParameters,
        run_context: RunContext,
        segment: SharedMemorySegment,
        not_owned: Collection[str] = (),
        owners: Sequence[int] | None = None,
    ) -> None:
        self._comm, self._segment, self._owned = run_context.comms.replica, segment, owners is not None
        trainable = [(name, p) for name, p in parameters if p.requires_grad]
        groups = shared_buckets([_kind(p) for _, p in trainable], owners, [name in not_owned for name, _ in trainable])
        self._order = [trainable[i][1] for group in groups for i in group]
        self._key = layout_key(trainable)
        self._header = _header_bytes(len(trainable))
        self._buckets: list[Bucket] = []
        self._chunks: list[tuple[bool, list[Tensor]]] = []
        self._summed: list[tuple[Bucket, slice]] = []
        self._released: list[Bucket] = []
        self._exposed: list[Bucket] = []
        start, first = self._header, 0
        for group in groups:
            members = [trainable[i][1] for i in group]
            elements, dtype = sum(p.numel() for p in members), members[0].dtype
            bytes_ = elements * dtype.itemsize
            flats = [segment.slot(r)[start : start + bytes_].view(dtype) for r in range(self._comm.size)]
            start += -(-bytes_ // _ALIGN) * _ALIGN
            bucket = Bucket(members, dtype, self._comm.device, tail=0, flat=flats[self._comm.rank])
            self._buckets.append(bucket)
            counted = trainable[group[0]][0] not in not_owned
            flags, first = slice(first, first + len(members)), first + len(members)
            # A complex number's square is that of its two parts.
            reals = [torch.view_as_real(flat).view(-1) if dtype.is_complex else flat for flat in flats]
            if owners is None:
                self._chunks += [(counted, chunk) for chunk in _chunks_of(reals, self._comm.size, self._comm.rank)]
                self._summed.append((bucket, flags))
            elif owners[group[0]] == self._comm.rank:
                self._chunks += [(counted, chunk) for chunk in _chunks_of(reals, 1, 0)]
                self._summed.append((Bucket(members, dtype, self._comm.device, tail=0, flat=flats[0]), flags))
        headers = [segment.slot(r)[: self._header].view(torch.float64).numpy() for r in range(self._comm.size)]
        self._headers, self._mine = headers, headers[self._comm.rank]
        self._digests = [header.view("int64") for header in headers]
        self._of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._sizes = [len(bucket.parameters) for bucket in self._buckets]
        self._missing: list[int] = []
        self._packed: list[list[bool] | None] = []
        self._armed = False
        self._square = 0.0

    def prepare_for_backward(self, step_context: StepContext) -> None:
        """Let the coming backward, this rank's last of the step, copy complete gradients to shared memory.

        The data ranks of one node share this memory; ``finish`` sums the gradients in it. Sends nothing.

        Args:
            step_context: unused.
        """
        self._armed = True
        self._missing = list(self._sizes)
        self._packed = [None] * len(self._buckets)

    def gradient_ready(self, parameter: Tensor) -> None:
        """Copy the gradients of the bucket of ``parameter`` to shared memory once all of them are complete.

        A bucket is a fixed group of parameters; the data ranks of one node share the memory. Called by autograd as a
        post-accumulate-grad hook. Does not wait for other ranks. Where each parameter has an owner rank, ``.grad`` of
        the bucket's parameters then becomes None. Before ``prepare_for_backward`` nothing happens.

        A backward that calls backward itself (a reversible block) accumulates into one ``.grad`` several times. A
        gradient that arrives after its bucket was copied is added to the copy, or ``finish`` copies the bucket again.

        Args:
            parameter: the parameter whose gradient backward has just completed.

        Raises:
            UsageError: a gradient of a complete bucket is sparse.
        """
        if self._armed:
            index = self._of[parameter]  # type: ignore[index]
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._packed[index] = self._pack(self._buckets[index])
            elif self._missing[index] < 0:
                self._take_late(index, parameter)  # type: ignore[arg-type]

    def finish(self, step_context: StepContext, loss_sums: Tensor | None) -> ReducedSums:
        """Sum the data ranks' gradients in shared memory and set every ``.grad`` to its sum. Collective: two barriers.

        Where each parameter has an owner rank (``central_storage``), a rank receives the gradients of its own
        parameters only, and ``.grad`` of all others is None. Every ``.grad`` that is set is a view of the shared
        memory, which the next step overwrites. The barriers are over the data ranks.

        Args:
            step_context: the step under way: a hash of its number, batch size and settings is compared over the ranks
                before the sum.
            loss_sums: this rank's ``[loss, count, *metrics]``, summed over its logical workers (fixed shares of the
                global batch); None if this rank had no samples.

        Returns:
            A ``ReducedSums`` (named tuple), equal on all data ranks: sums over the global batch of loss (``loss``),
            count of samples or tokens (``samples``) and metrics (``metrics``, a list of floats); whether a rank asks to
            stop (``stop``); for each parameter whether any rank had a gradient (the list ``used``; ``.grad`` is None
            where not).

        Raises:
            MismatchError: ranks are in different steps or hold different parameters.
            UsageError: a gradient is sparse; or the script's edits of parameters or gradients that are split over ranks
                differ between these ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        packed = self._packed if self._armed else [None] * len(self._buckets)
        self._armed = False
        used: list[bool] = []
        for bucket, flags in zip(self._buckets, packed, strict=True):
            used += self._pack(bucket) if flags is None else flags
        self._write_header(step_context, loss_sums, used)
        self._segment.barrier(f"sum of gradients in step {step_context.local_step + 1}")
        digest = self._digests[self._comm.rank][_DIGEST]
        if any(other[_DIGEST] != digest for other in self._digests):
            refuse_mismatch(self._comm, step_context)
        numbers = self._headers[0][_TOTALS:].copy()
        for header in self._headers[1:]:
            numbers += header[_TOTALS:]
        sums = read_sums(numbers[: _FLAGS - _TOTALS + len(self._order)].tolist())
        self._add()
        self._segment.barrier(f"sum of gradients in step {step_context.local_step + 1}, second half")
        self._square = float(sum(header[_SQUARE] for header in self._headers))
        for bucket, place in self._summed:
            bucket.expose(sums.used[place])
        self._exposed = [bucket for bucket, _ in self._summed]
        return sums

    def _pack(self, bucket: Bucket) -> list[bool]:
        """Copy a bucket's gradients into this rank's slot, and clear ``.grad`` where only the owner receives the sum.

        Returns for each parameter whether it had a gradient.
        """
        used = bucket.pack()
        if self._owned:
            for parameter in bucket.parameters:
                parameter.grad = None
        return used

    def _take_late(self, index: int, parameter: nn.Parameter) -> None:
        """Take a gradient that has changed after its bucket was copied to shared memory."""
        flags = self._packed[index]
        if not self._owned:
            self._packed[index] = None
        elif flags is not None and parameter.grad is not None:
            flags[self._buckets[index].add(parameter)] = True
            parameter.grad = None

    def _write_header(self, step_context: StepContext, loss_sums: Tensor | None, used: Sequence[bool]) -> None:
        now = step_context
        steps = (now.local_step, now.samples, now.call, *now.data_position)
        facts = (*steps, name_key(now.settings), now.written(), edits_key(now))
        # Of integers Python's hash is the same in every process.
        self._digests[self._comm.rank][_DIGEST] = hash((self._key, *facts))
        totals = [0.0, 0.0] if loss_sums is None else loss_sums.tolist()
        unused = [0.0] * (_STOP - _TOTALS - len(totals))
        self._mine[_TOTALS : _FLAGS + len(used)] = [*totals, *unused, step_context.stop, *used]

    def _add(self) -> None:
        """Sum this rank's slice of all slots in rank order, in chunks that fit the cache; write its sum of squares.

        Without owners the sum is copied into every slot. With owners the communicator counts what this rank reads of
        the others' gradients, one message a bucket.
        """
        square = 0.0
        for counted, (first, *others) in self._chunks:
            for other in others:
                first.add_(other)
            for other in () if self._owned else others:
                other.copy_(first)
            if counted:
                wide = first if first.dtype in (torch.float32, torch.float64) else first.float()
                square += float(torch.dot(wide, wide))
        self._mine[_SQUARE] = square
        for bucket, _ in self._summed if self._owned else ():
            for source in filter(lambda rank: rank != self._comm.rank, range(self._comm.size)):
                self._comm.count(source, self._comm.rank, bucket.gradients.nbytes)

    def release(self) -> None:
        """Copy the summed gradients out of shared memory, and set every ``.grad`` to its view of the copy.

        Not collective. Other ranks write the shared memory in the next step; the copy is this rank's alone. A ``.grad``
        that is None stays None. The next call overwrites the copy, unless the script keeps views of it then.
        """
        if not self._released:
            summed = [bucket for bucket, _ in self._summed]
            self._released = [Bucket(b.parameters, b.flat.dtype, b.flat.device, tail=0) for b in summed]
        for (bucket, _), released in zip(self._summed, self._released, strict=True):
            released.renew()
            released.flat.copy_(bucket.flat)
            released.expose([p.grad is not None for p in bucket.parameters])
        self._exposed = self._released

    def squares(self) -> list[float]:
        """Return the squared L2 norm of the summed gradients, as a list of one number that is equal on all data ranks.

        Not collective: ``finish`` has computed the number along with the sums. Where a replica spans several ranks
        (pipeline, tensor parallelism), the caller adds up the numbers of its ranks; a parameter that two ranks hold is
        counted on one rank only.
        """
        return [self._square]

    def scale(self, factor: float) -> None:
        """Multiply the gradients that ``finish`` has summed, or their copies, by ``factor``, in place. Not collective.

        Where each parameter has an owner rank, only the gradients of this rank's own parameters. Also multiplies the
        squared norm that ``squares`` returns by ``factor``².

        Args:
            factor: the number that each element is multiplied by.
        """
        self._square *= factor**2
        scale_all([bucket.gradients for bucket in self._exposed], factor)


def attach_shared(
    parameters: NamedParameters,
    run_context: RunContext,
    not_owned: Collection[str] = (),
    owners: Sequence[int] | None = None,
    *,
    of_devices: bool = False,
) -> SharedReducer | None:
    """Build a reducer that sums the data ranks' gradients in shared memory, if all ranks can share memory.

    Collective over the data ranks, which allocate the memory together. Returns None without a collective for a single
    rank, without trainable parameters, and on accelerators without ``of_devices``.

    Args:
        parameters: named parameters; those with ``requires_grad`` are reduced.
        run_context: communicators and settings of the run; its data ranks are those whose gradients are summed.
        not_owned: names of parameters that another rank of the replica counts in the norm.
        owners: for each trainable parameter the only rank that receives its gradient, as an index among the data ranks;
            None: all ranks receive all.
        of_devices: whether the reducer may sum gradients that are on accelerators. Parameters must then be in host
            memory when ``finish`` sets their ``.grad``.

    Returns:
        A ``SharedReducer``, whose ``finish`` sums the gradients of a step. None on every rank in the cases above, and
        if the ranks are on several hosts, the processor is not x86-64 or shared memory is too small.

    Raises:
        PeerError: a rank has ended, or did not make the call in time.
        MismatchError: ranks are in different calls.
    """
    comm = run_context.comms.replica
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    if comm.size == 1 or (is_accelerator(comm.device) and not of_devices) or not trainable:
        return None
    groups = shared_buckets([_kind(p) for _, p in trainable], owners, [name in not_owned for name, _ in trainable])
    bytes_ = sum(-(-sum(trainable[i][1].nbytes for i in group) // _ALIGN) * _ALIGN for group in groups)
    segment = attach(comm, _header_bytes(len(trainable)) + bytes_)
    return None if segment is None else SharedReducer(parameters, run_context, segment, not_owned, owners)


def shared_buckets(
    sizes: Sequence[tuple[int, str]], owners: Sequence[int] | None = None, not_owned: Sequence[bool] | None = None
) -> list[list[int]]:
    """Group parameters into buckets for the sum of gradients in shared memory (``SharedReducer``), of 1 MiB at most.

    All parameters of a bucket have the same dtype and the same owner, and either all or none of them are counted in the
    gradient norm by another rank of the replica. A larger parameter has a bucket to itself.

    Args:
        sizes: (bytes, dtype) of each trainable parameter, in the model's order.
        owners: for each parameter the rank that receives its gradient, as an index among the data ranks; None where all
            ranks receive all.
        not_owned: for each parameter whether another rank of the replica counts it in the norm; None: none is.

    Returns:
        For each bucket a list of indices into ``sizes``, in the order of the bucket's memory: last parameter first.

    >>> shared_buckets([(40, "f"), (40, "f"), (8, "f")], owners=[0, 1, 0])
    [[2, 0], [1]]
    """
    kinds = [(owners[i] if owners else 0, bool(not_owned and not_owned[i])) for i in range(len(sizes))]
    groups = []
    for kind in sorted(set(kinds)):
        chosen = [i for i, other in enumerate(kinds) if other == kind]
        planned = plan_buckets([sizes[i] for i in chosen], _BUCKET_BYTES, _BUCKET_BYTES)
        groups += [[chosen[i] for i in group] for group in planned]
    return groups


def _kind(parameter: Tensor) -> tuple[int, str]:
    return parameter.nbytes, str(parameter.dtype)


_BUCKET_BYTES = 1 << 20


def _header_bytes(flags: int) -> int:
    return -(-8 * (_FLAGS + flags) // _ALIGN) * _ALIGN


def _chunks_of(flats: Sequence[Tensor], ranks: int, rank: int) -> list[list[Tensor]]:
    """Cut a rank's slice of every rank's vector into chunks.

    Args:
        flats: the vector of each rank, (elements,).
        ranks: number of slices.
        rank: index of the slice.

    Returns:
        For each chunk its views of all vectors.
    """
    step = _ALIGN // flats[0].element_size()
    lines = -(-flats[0].numel() // step)
    mine = even_share(lines, ranks, rank)
    low, high = mine.start * step, min(mine.stop * step, flats[0].numel())
    size = _CHUNK_BYTES // flats[0].element_size()
    return [[flat[at : min(at + size, high)] for flat in flats] for at in range(low, high, size)]
