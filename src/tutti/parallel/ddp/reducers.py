"""Reducers sum gradients over all logical workers: overlapped with backward, or in a fixed summation tree."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tutti.comm.tree_sum import TreeSum
from tutti.errors import UsageError, script_line
from tutti.parallel.ddp.buckets import Bucket, ReducedSums, Tail, plan_buckets
from tutti.parallel.ddp.gradient_arithmetic import own_part, read_with_squares, scale_all, squares_by, squares_of
from tutti.parallel.ddp.step_agreement import DIGESTS, contributions_agree, layout_key, refuse_mismatch
from tutti.parallel.ddp.update_first import PendingSums
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext

_HELD = 1 << 40
"""Count of gradients for which a bucket waits that is sent by ``finish`` alone."""

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Reducer(Protocol):
    """Sums gradients and loss sums over all data ranks (protocol); afterwards every ``.grad`` holds the sum.

    The global batch is split among N logical workers (fixed shares of the global batch); a data rank computes the
    micro-batches of one or more of them, or shares a worker with other ranks. A step calls ``collect`` after each
    worker's last backward, and ``finish`` once.

    Four methods do nothing unless a reducer overrides them: ``prepare_for_backward`` and ``gradient_ready`` of reducers
    that send nothing during backward, ``collect`` for those that sum rank by rank, ``release`` where the sums are in
    memory of this rank alone.
    """

    @property
    def listens(self) -> bool:
        """Whether ``gradient_ready`` must be registered as a post-accumulate-grad hook on every trained parameter.

        Read when the reducer has been made. A reducer sums gradients over the data ranks; the value is False if
        nothing is sent during backward.
        """

    def prepare_for_backward(self, step_context: StepContext) -> None:
        """Let the reducer send gradients during the coming backward, this rank's last of the step.

        A reducer sums gradients over the data ranks; from now on it may send each gradient as soon as the gradient is
        complete.

        Args:
            step_context: the step under way: small hashes of its number, batch size and settings are summed with the
                gradients, so that ranks in different steps are found.
        """
        return

    def gradient_ready(self, parameter: Tensor) -> None:
        """Tell the reducer of gradients that backward has completed ``parameter.grad``.

        Autograd calls this method as a post-accumulate-grad hook in every backward. The reducer may start to send the
        gradient. Calls before ``prepare_for_backward`` in a step have no effect. Does not block.

        Args:
            parameter: the parameter whose gradient is complete.
        """
        return

    def collect(self, step_context: StepContext, worker: int, loss_sums: Tensor | None) -> None:
        """Add one logical worker's gradients and loss sums to the sum, after the worker's last backward in the step.

        A logical worker is one of N fixed shares of the global batch. A reducer that sums gradients worker by worker
        takes them from ``.grad``, which is None afterwards. A reducer that sums gradients rank by rank does nothing:
        autograd accumulates the gradients of the rank's workers in ``.grad``.

        Args:
            step_context: the step under way: small hashes of its number, batch size and settings are summed with the
                gradients, so that ranks in different steps are found.
            worker: index of the worker; calls come in increasing order.
            loss_sums: the worker's ``[loss, count, *metrics]``; None if the worker had no samples.
        """
        return

    def finish(self, step_context: StepContext, loss_sums: Tensor | None) -> ReducedSums:
        """Complete the sums of gradients over all data ranks and set each trained parameter's ``.grad`` to its sum.

        Collective over the data ranks (an all-reduce, or collectives that amount to it): blocks until all of them call
        it. A ``.grad`` may be a view of memory that the reduction of the next step overwrites; see ``release``.

        Args:
            step_context: the step under way: small hashes of its number, batch size and settings are summed with the
                gradients, so that ranks in different steps are found.
            loss_sums: this rank's ``[loss, count, *metrics]``, summed over its logical workers (fixed shares of the
                global batch); None if this rank had no samples.

        Returns:
            A ``ReducedSums`` (named tuple), equal on all data ranks: sums over the global batch of loss (``loss``),
            count of samples or tokens (``samples``) and metrics (``metrics``, a list of floats); whether a rank asks to
            stop (``stop``); for each parameter whether any rank had a gradient (the list ``used``; ``.grad`` is None
            where not).

        Raises:
            MismatchError: ranks are in different steps or hold different parameters.
            PeerError: a rank is lost, or does not take part within the timeout.
            UsageError: a gradient is sparse and the reducer sums dense ones only; or the script's edits of parameters
                or gradients that are split over ranks differ between these ranks.
        """

    def release(self) -> None:
        """Move summed gradients out of memory that ranks share, for a script that may keep views of ``.grad``.

        Called after ``finish``; not collective. A reducer whose sums are in memory of this rank alone does nothing
        here: in the next step it takes new memory for sums of which the script still keeps views.
        """
        return

    def squares(self) -> list[float]:
        """Return sums of squares of this rank's gradients, as ``finish`` has summed them over the data ranks.

        The total of the list is the square of their L2 norm. Not collective: where a replica spans several ranks, the
        caller adds up the numbers of its ranks.

        Returns:
            Python floats, depending on the reducer one for each trained parameter, in the model's order, or a single
            one for all; a reducer returns equally many in every step. Parameters without gradient, and those that
            another rank of the replica counts in the norm, add 0.
        """

    def scale(self, factor: float) -> None:
        """Multiply the ``.grad`` of all trained parameters, summed over the data ranks by ``finish``, in place.

        Called to divide the sums by the global count of samples or tokens and by the loss scale, and to clip. Not
        collective.

        Args:
            factor: the number that each element is multiplied by.
        """


class StartedSum(Protocol):
    """Handle (protocol) of an all-reduce of a gradient bucket that has been started and runs asynchronously."""

    def wait(self) -> None:
        """Block until this all-reduce of a gradient bucket is complete.

        The flat vector with which the all-reduce was started then holds the sum over the data ranks. Called once, by
        ``finish`` of the reducer that has started it.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
            MismatchError: the ranks wait in different calls.
        """


StartAllReduce = Callable[[Tensor, str], StartedSum]
"""Starts an in-place all-reduce of a flat vector; the text names the call in error messages."""


class OverlappedReducer(Reducer):
    """Sums gradients over the data ranks by one all-reduce for each bucket, overlapped with backward, as DDP does.

    The all-reduce of a bucket (a flat vector of several parameters' gradients) starts as soon as backward has filled
    the bucket, in the same order on every rank; the all-reduce of the last bucket starts in ``finish``. With a single
    data rank nothing is sent, and every ``.grad`` stays the tensor of autograd.

    A backward that calls backward itself (a reversible block, a re-entrant checkpoint) accumulates into one ``.grad``
    several times. Where a gradient arrives after its bucket was sent, ``finish`` sums all buckets again, and sends that
    bucket no earlier in later steps.

    Args:
        parameters: (name, parameter) pairs; those with ``requires_grad`` are reduced.
        run_context: communicators and settings of the run.
        wire: number format of the messages. ``fp32`` sends gradients in their own dtype; ``bf16`` and ``fp16`` convert
            them.
        bucket_bytes: largest size of a bucket; a larger parameter has a bucket to itself.
        not_owned: names of parameters that another rank of the replica counts in the norm.
        all_reduce: function of a flat vector and a text for errors that starts the all-reduce of a bucket in place, and
            returns a handle with ``wait``; None takes the all-reduce of the backend.

    Attributes:
        waited: seconds that the host has waited for the last step's sums and norms.
    """

    waited = 0.0

    def __init__(
        self,
        parameters: NamedParameters,
        run_context: RunContext,
        wire: str,
        bucket_bytes: int,
        not_owned: Collection[str] = (),
        all_reduce: StartAllReduce | None = None,
    ) -> None:
        self._comm = run_context.comms.replica
        self._all_reduce = all_reduce
        trainable = [(name, p) for name, p in parameters if p.requires_grad]
        self._order = [p for _, p in trainable]
        self._owned = [p for name, p in trainable if name not in not_owned]
        self._owns_only_some = len(self._owned) < len(self._order)
        self._tail = Tail(len(trainable), layout_key(trainable))
        self._buckets: list[Bucket] = []
        self._wires: list[Tensor | None] = []
        if self._comm.size > 1:
            self._lay_out(trainable, wire, bucket_bytes)
        self._of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._sizes = [len(bucket.parameters) for bucket in self._buckets]
        self._armed = False
        self._missing: list[int] = []
        self._late = False
        self._under_way: list[StartedSum] = []
        self._used: list[bool] = []
        self._loss_sums: Tensor | None = None
        self._step_context = StepContext(0, 0)
        # Gradients with their sums of squares, which ``finish`` has read together with the totals.
        self._early: tuple[list[Tensor], list[float]] | None = None

    @property
    def listens(self) -> bool:
        """Whether ``gradient_ready`` must be registered as a post-accumulate-grad hook on every trained parameter.

        True with several data ranks, whose all-reduces overlap with backward. A single rank sends nothing.
        """
        return self._comm.size > 1

    def _lay_out(self, trainable: NamedParameters, wire: str, bucket_bytes: int) -> None:
        sizes = [(p.nbytes, str(p.dtype)) for _, p in trainable]
        groups = plan_buckets(sizes, bucket_bytes)
        # The used flags are in the order of the buckets, so that the flags of one bucket are contiguous.
        self._order = [trainable[i][1] for group in groups for i in group]
        device = self._comm.device
        for n, group in enumerate(groups):
            members = [trainable[i][1] for i in group]
            rides = n == len(groups) - 1 and wire == "fp32" and members[0].dtype in (torch.float32, torch.float64)
            self._buckets.append(Bucket(members, members[0].dtype, device, self._tail.size if rides else 0))
            narrow = WIRE_DTYPES.get(wire)
            self._wires.append(None if narrow is None else torch.empty_like(self._buckets[-1].flat, dtype=narrow))
        if not self._buckets or self._buckets[-1].tail.numel() == 0:
            self._buckets.append(Bucket([], torch.float64, device, self._tail.size))
            self._wires.append(None)

    def prepare_for_backward(self, step_context: StepContext) -> None:
        """Let the all-reduce of each gradient bucket start during the coming backward, this rank's last of the step.

        A bucket (flat vector of several parameters' gradients) is sent once backward has completed all gradients in it.
        With one data rank nothing is sent.

        Args:
            step_context: the step under way: small hashes of its number, batch size and settings are summed with the
                gradients, so that ranks in different steps are found.
        """
        self._armed = self._comm.size > 1
        self._missing = list(self._sizes)
        self._step_context = step_context

    def gradient_ready(self, parameter: Tensor) -> None:
        """Count ``parameter.grad`` as complete, and start the all-reduce of gradient buckets that are now complete.

        Autograd calls this method as the post-accumulate-grad hook of all trained parameters. Does not block. A bucket
        (flat vector of several parameters' gradients) waits for the buckets before it, so that every rank starts them
        in the same order. Before ``prepare_for_backward`` nothing happens.

        Args:
            parameter: the parameter whose gradient is complete.

        Raises:
            UsageError: a gradient of a complete bucket is sparse.
        """
        if not self._armed:
            return
        missing, index = self._missing, self._of[parameter]  # type: ignore[index]
        launched = len(self._under_way)
        if index < launched:
            self._late, self._sizes[index] = True, _HELD
            return
        missing[index] -= 1
        # The last bucket carries the loss sums, and whether a gradient came late.
        while launched < len(missing) - 1 and missing[launched] == 0:
            self._launch()
            launched += 1

    def _launch(self) -> None:
        """Start the next bucket's all-reduce."""
        index = len(self._under_way)
        bucket, wire = self._buckets[index], self._wires[index]
        self._used += bucket.pack()
        if bucket.tail.numel():
            self._tail.fill(bucket.tail, self._step_context, self._loss_sums, self._used, late=self._late)
        if wire is not None:
            wire.copy_(bucket.flat)
        text = f"all_reduce of gradient bucket {index} in step {self._step_context.local_step + 1}"
        start = self._all_reduce or self._comm.start_all_reduce
        self._under_way.append(start(bucket.flat if wire is None else wire, text))

    def finish(self, step_context: StepContext, loss_sums: Tensor | None) -> ReducedSums:
        """Start the remaining all-reduces of gradients, wait for all of them, and set every ``.grad`` to its sum.

        Collective over the data ranks: one all-reduce for each bucket. Every ``.grad`` is then a view of its bucket,
        which the next step overwrites. A single data rank leaves every ``.grad`` as it is.

        Args:
            step_context: the step under way: small hashes of its number, batch size and settings are summed with the
                gradients, so that ranks in different steps are found.
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
        numbers = self._sum(step_context, loss_sums)
        read = [0.0, 0.0] if numbers is None else self._read(numbers, step_context)
        return self._parsed(read, step_context)

    def finish_later(self, step_context: StepContext, loss_sums: Tensor) -> PendingSums | None:
        """Complete the sums as ``finish`` does, without waiting for the device or reading the sums on the host.

        Collective over the data ranks, as ``finish``.

        Args:
            step_context: the step under way, without a loss scale.
            loss_sums: this rank's ``[loss, count, *metrics]``, summed over its logical workers (fixed shares of the
                global batch).

        Returns:
            The sums and norms on the device. Its ``allowed`` is False where the host would have to scale the gradients
            (the count of the global batch is not its samples), or to raise an error. None where the host must read the
            sums to know which parameters have a gradient: then call ``finish``.
        """
        if self._owns_only_some or self._late or any(p.grad is None for p in self._order):
            return None
        numbers = self._sum(step_context, loss_sums)
        assert numbers is not None
        agrees, totals = None, numbers
        if self._comm.size > 1:
            expose(self._buckets, [True] * len(self._order))
            agrees, totals = self._tail.agrees(numbers, self._comm.size), numbers[DIGESTS:]
        if not step_context.whole:
            counted = totals[1] == step_context.samples
            agrees = counted if agrees is None else agrees & counted
        return PendingSums(numbers, self._counted(), agrees, partial(self._parsed_later, step_context))

    def _sum(self, step_context: StepContext, loss_sums: Tensor | None) -> Tensor | None:
        """Complete the all-reduces. Returns the numbers to read, on the device; None for a single rank without any."""
        self._armed, self._early = False, None
        if self._comm.size == 1:
            return loss_sums
        self._step_context, self._loss_sums = step_context, loss_sums
        return self._complete()

    def _complete(self) -> Tensor:
        """Start the all-reduces that are not under way, and wait for all. Returns the numbers behind the gradients."""
        while len(self._under_way) < len(self._buckets):
            self._launch()
        for pending, bucket, wire in zip(self._under_way, self._buckets, self._wires, strict=True):
            pending.wait()
            if wire is not None:
                bucket.flat.copy_(wire)
        self._under_way, self._used = [], []
        tail: Tensor = self._buckets[-1].tail
        return tail

    def _sum_again(self, read: list[float], step_context: StepContext, shown: bool) -> list[float]:
        """Sum all gradients again where one came after its bucket was sent; raise MismatchError where ranks differ.

        Collective over the data ranks: an all-gather, and the all-reduces. Returns the numbers that were read. Raises
        UsageError where a rank's ``.grad`` are the sums already (``shown``), so that its own gradients are gone.
        """
        mine = torch.tensor([self._late, shown])
        flags = [each.tolist() for each in self._comm.all_gather(mine, "gradients that came late")]
        if any(late for late, _ in flags):
            if any(gone for _, gone in flags):
                raise _late_gradients(step_context)
            self._late, self._early = False, None
            read = self._complete().tolist()
        if not self._tail.same(read, step_context, self._comm.size):
            refuse_mismatch(self._comm, step_context)
        return read

    def _parsed(self, read: list[float], step_context: StepContext, shown: bool = False) -> ReducedSums:
        """Return the sums from the numbers that were read. ``shown``: whether every ``.grad`` is set already."""
        if self._comm.size == 1:
            return ReducedSums(read[0], read[1], read[2:], step_context.stop, [p.grad is not None for p in self._order])
        if self._late or not self._tail.same(read, step_context, self._comm.size):
            read = self._sum_again(read, step_context, shown)
        sums = self._tail.read(read)
        if not shown:
            expose(self._buckets, sums.used)
        return sums

    def _parsed_later(self, step_context: StepContext, read: list[float], waited: float) -> ReducedSums:
        """Return the sums of ``finish_later`` from the numbers for which the host has waited so many seconds."""
        self.waited = waited
        return self._parsed(read, step_context, shown=True)

    def _read(self, numbers: Tensor, step_context: StepContext) -> list[float]:
        """Copy ``numbers`` to the host, and with them the squares of the gradients, where no scale is to come."""
        counted, began = self._counted(), time.perf_counter()
        if step_context.loss_scale != 1.0 or (self._comm.size > 1 and self._owns_only_some):
            return list(numbers.tolist())
        read, squares = read_with_squares(numbers, counted)
        self._early, self.waited = (counted, squares), time.perf_counter() - began
        return read

    def _counted(self) -> list[Tensor]:
        if self._comm.size > 1 and not self._owns_only_some:
            return [bucket.gradients for bucket in self._buckets]
        return [gradient for p in self._owned if (gradient := p.grad) is not None]

    def squares(self) -> list[float]:
        """Return the squared L2 norm of the gradients summed by ``finish`` on this rank, as a list of one Python float.

        Not collective. Parameters that another rank of the replica counts in the norm are left out. Where possible
        ``finish`` has computed the number, to save a synchronisation of host and accelerator.
        """
        counted, early = self._counted(), self._early
        self._early = None
        if early is not None and len(early[0]) == len(counted) and all(map(operator.is_, early[0], counted)):
            return [sum(early[1])]
        return [sum(squares_of(counted))]

    def scale(self, factor: float) -> None:
        """Multiply the ``.grad`` of all trained parameters, summed over the data ranks by ``finish``, in place.

        Parameters with ``.grad`` None are skipped. Not collective.

        Args:
            factor: the number that each element is multiplied by.
        """
        self._early = None
        scale_all([p.grad for p in self._order if p.grad is not None], factor)


class TreeReducer(Reducer):
    """Sums the gradients of N logical workers in one fixed tree: the same bits for any number of data ranks.

    A logical worker is one of N fixed shares of the global batch; a data rank computes one or more, or shares a worker
    with other ranks. Nothing overlaps with backward.

    Args:
        parameters: (name, parameter) pairs; those with ``requires_grad`` are reduced.
        run_context: communicators and settings of the run.
        not_owned: names of parameters that another rank of the replica counts in the norm.

    Attributes:
        listens: False: ``gradient_ready`` need not be registered as a hook of autograd.
    """

    listens = False

    def __init__(self, parameters: NamedParameters, run_context: RunContext, not_owned: Collection[str] = ()) -> None:
        self._comm, self._workers = run_context.comms.replica, run_context.workers
        trainable = [(name, p) for name, p in parameters if p.requires_grad]
        self._not_owned = {p for name, p in trainable if name in not_owned}
        self._order = [p for _, p in trainable]
        self._tail = Tail(len(trainable), layout_key(trainable))
        self._measured = len(trainable) + 1 if run_context.gradient_variance else 0
        wide = (torch.float32, torch.float64)
        dtypes = sorted({p.dtype for _, p in trainable}, key=lambda d: (d in wide, str(d)))
        if not dtypes or dtypes[-1] not in wide:
            dtypes.append(torch.float64)
        self._buckets = [
            Bucket(
                [p for _, p in trainable if p.dtype == dtype],
                dtype,
                self._comm.device,
                self._tail.size + self._measured if dtype is dtypes[-1] else 0,
            )
            for dtype in dtypes
        ]
        self._sums = [TreeSum(self._comm, self._workers, b.flat.numel(), b.flat.dtype) for b in self._buckets]
        self._begins = run_context.begins_worker
        self._added = False

    def collect(self, step_context: StepContext, worker: int, loss_sums: Tensor | None) -> None:
        """Add one logical worker's gradients and loss sums to a fixed summation tree, and set every ``.grad`` to None.

        Called after the last backward of the worker, one of N fixed shares of the global batch. Not collective: this
        rank adds to a partial sum of its own, and ``finish`` sums over the ranks and raises MismatchError where their
        steps differ. Where several ranks share a worker, a rank without samples of it adds nothing, unless it is the
        first of these ranks, which then adds zeros.

        Args:
            step_context: the step under way: small hashes of its number, batch size and settings are added to the sum,
                so that workers in different steps are found; its loss scale is taken out of a measured gradient
                variance.
            worker: index of the worker; calls come in increasing order.
            loss_sums: the worker's ``[loss, count, *metrics]``; None if the worker had no samples on this rank.

        Raises:
            UsageError: a gradient is sparse.
        """
        if loss_sums is None and not self._begins:
            # The worker's other micro-batches are on the ranks before this one, and nothing is added to their sum.
            return
        self._added = True
        used: list[bool] = []
        size, own = self._tail.size, own_part(self.squares(), step_context, loss_sums) if self._measured else None
        for bucket, total in zip(self._buckets, self._sums, strict=True):
            bucket.use(torch.empty_like(bucket.flat))
            used += bucket.pack()
            if bucket.tail.numel():
                self._tail.fill(bucket.tail[:size], step_context, loss_sums, used)
                if own is not None:
                    bucket.tail[size:].copy_(own)
            total.add(worker, bucket.flat)
            for parameter in bucket.parameters:
                parameter.grad = None

    def finish(self, step_context: StepContext, loss_sums: Tensor | None) -> ReducedSums:
        """Complete the summation tree of gradients over the data ranks and set every ``.grad`` to its sum.

        The terms are the gradients of the logical workers (fixed shares of the global batch), added in a fixed order.
        Collective over the data ranks, for each dtype: an all-to-all of partial sums and an all-gather of their sum,
        before them an all-gather of the numbers of contributions where ranks share a worker. Every ``.grad`` is a view
        of the sum's memory, which no later step overwrites.

        Args:
            step_context: the step under way on this rank; all contributions to the sum must be of this step.
            loss_sums: unused; ``collect`` has added the loss sums of each logical worker.

        Returns:
            A ``ReducedSums`` (named tuple), equal on all data ranks: sums over the global batch of loss (``loss``),
            count of samples or tokens (``samples``) and metrics (``metrics``, a list of floats); whether a rank asks to
            stop (``stop``); for each parameter whether any rank had a gradient (the list ``used``; ``.grad`` is None
            where not). The sequence ``own`` is empty unless the gradient variance is measured. Then ``own`` has a float
            for each parameter, Σ ‖G‖²/c over the workers, where G is a worker's gradient of the parameter, without loss
            scale, and c the worker's count; and as last number how many workers have c > 0.

        Raises:
            MismatchError: logical workers were in different steps, or ranks hold different parameters.
            UsageError: the script's edits of parameters or gradients that are split over ranks differ between these
                ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        for bucket, total in zip(self._buckets, self._sums, strict=True):
            bucket.use(total.total())
        tail = self._buckets[-1].tail.tolist()
        addends, added, self._added = self._sums[-1].addends, self._added, False
        if not (self._tail.same(tail, step_context, addends) if added else contributions_agree(tail, addends)):
            refuse_mismatch(self._comm, step_context)
        sums = self._tail.read(tail[: self._tail.size])._replace(own=tail[self._tail.size :])
        expose(self._buckets, sums.used)
        return sums

    def squares(self) -> list[float]:
        """Return a list of one float for each trained parameter, in the model's order: the sum of squares of ``.grad``.

        Not collective. The number is 0 for a parameter without a gradient, and for one that another rank of the replica
        counts in the norm. Added up with exact rounding, the numbers give the same norm for any partition of the model
        into pipeline stages.
        """
        return squares_by(self._order, self._not_owned)

    def scale(self, factor: float) -> None:
        """Multiply the ``.grad`` of all trained parameters, summed over the logical workers by ``finish``, in place.

        A logical worker is one of N fixed shares of the global batch. Not collective.

        Args:
            factor: the number that each element is multiplied by.
        """
        scale_all([bucket.gradients for bucket in self._buckets], factor)


def _late_gradients(step_context: StepContext) -> UsageError:
    return UsageError(
        "on some ranks backward adds to a gradient again after the gradient was sent",
        where=f"step {step_context.local_step + 1}, {script_line()}",
        why="a backward that calls backward (a reversible block, a re-entrant checkpoint) may complete a gradient"
        " late, and the ranks that ran no such backward have put the sums in place of their gradients",
        remedy="take reproducible=True, which sends gradients after backward",
    )


def expose(buckets: Sequence[Bucket], used: Sequence[bool]) -> None:
    """Set every parameter's ``.grad`` to its view of the flat vector that holds the summed gradients.

    Args:
        buckets: gradient buckets, each a flat vector of several parameters' summed gradients.
        used: for each parameter, bucket by bucket, whether any rank had a gradient; where False, ``.grad`` becomes
            None.
    """
    start = 0
    for bucket in buckets:
        bucket.expose(used[start : start + len(bucket.parameters)])
        start += len(bucket.parameters)
