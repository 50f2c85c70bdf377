"""Synchronous data parallelism: all-reduce gradients over the data ranks, then apply the same update on each.

Goyal et al. 2017, arXiv 1706.02677, §2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import cut_state, load_optimizer, mine_of, optimizer_tensors, read_local, written
from tutti.comm.scheduled_all_reduce import ScheduledAllReduce
from tutti.config.sync_config import AllReduceConfig
from tutti.device import is_accelerator
from tutti.errors import UsageError
from tutti.nn.swap import parameters
from tutti.optim.factory import is_known
from tutti.optim.mixing_rules import agreed_mixing, refuse_closure, refuse_exchanges, refuse_modules, refuse_parts
from tutti.optim.several import acting, members_of, slots, trained_by
from tutti.parallel.ddp.buckets import FIRST_BYTES, ReducedSums, largest_vector
from tutti.parallel.ddp.concealed_gradients import ConcealedGradients
from tutti.parallel.ddp.copied_gradients import share_gradients
from tutti.parallel.ddp.gradient_arithmetic import accumulated, scale_all, squares_of
from tutti.parallel.ddp.optimizer_step import gather_nonfinite_names, optimizer_step
from tutti.parallel.ddp.reducers import WIRE_DTYPES, OverlappedReducer, Reducer, StartedSum, TreeReducer
from tutti.parallel.ddp.shared_memory_reducer import attach_shared
from tutti.parallel.ddp.sparse_gradients import SparseReducer, with_sparse_gradients
from tutti.parallel.ddp.sync_module_states import agree_on_optimizer_state, agree_on_state, broadcast_state
from tutti.parallel.ddp.unsharded_gradients import UnshardedGradients
from tutti.parallel.ddp.update_first import LEAST_WAIT, PendingSums, can_launch_first
from tutti.parallel.ddp.worker_buffers import WorkerBuffers
from tutti.parallel.grad_norm import ReplicaSums
from tutti.parallel.loss_stats import LossCounter
from tutti.parallel.normalisation import (
    clip_norm,
    divisor_of_backward,
    finite_by_norm,
    is_finite,
    mean_factor,
)
from tutti.parallel.split_optimizer import SliceRegions, support_split_tensors
from tutti.parallel.whole_tensors import (
    WholeTensors,
    WholeTensorsOf,
    along_slices,
    gather_axis,
    gatherers_of_optimizers,
    refuse_growth,
)
from tutti.types.custom_loop_sync import GradientPlace
from tutti.types.gradient_sync import OwnGradients
from tutti.types.micro_batch import LossSums
from tutti.types.optimizer_protocols import NamedParameters, OptimizerFactory
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import ShardSpec, TensorSlice
from tutti.types.step_records import GradientVariance, PendingStats, StepContext, StepStats, UpdateResult

_BUCKET_MB = 25.0


class AllReduceSync(UnshardedGradients):
    """Synchronous data parallelism (DDP): all-reduce gradients over the data ranks, then step the optimizers on each.

    The global batch is split among N logical workers (fixed shares), a number that does not depend on the number of
    ranks; each data rank computes the micro-batches of one or more workers, or shares a worker with other ranks. The
    object is also the hook that autograd calls for each complete gradient. Subclasses keep parameters or optimizer
    state elsewhere. They override ``_unite`` (equal state on all ranks before the first step), ``_complete``
    (optimizers of split tensors), ``_make_reducer`` (the sum of gradients), ``_updating`` (where optimizers compute),
    and ``_all_finite`` and ``_nonfinite_names`` (the search for non-finite gradients).

    Args:
        config: bucket size, number format of messages (``wire``), and the algorithm of the all-reduce.
        run_context: communicators and settings of the run.

    Attributes:
        loss_normalisation: ``"step"``: backward divides losses by the samples of the global batch.
        shares_parameters: whether other ranks write into the memory of this rank's parameters; False here.
        optimizers: the optimizers of this rank, set by ``attach``; empty where the rank has nothing to train.
        gradient_ready: called with a parameter whose gradient backward has completed; may start to send it. Set by
            ``attach`` and ``reattach``.
        accumulated: whether the most recent ``add_gradients`` was given gradients.
        gradient_at: where complete gradients are: ``rank`` (whole on this rank), ``slices`` (tensor parallelism) or
            ``stages`` (whole on the ranks of the parameter's stage).
    """

    loss_normalisation: Literal["step", "worker"] = "step"
    shares_parameters: bool = False
    accumulated = False
    _updates_on_device = True
    # Set by ``attach``; all parameters by name, the trained ones, and the gatherers for optimizers of whole tensors.
    optimizers: Sequence[Optimizer]
    gradient_ready: Callable[[Tensor], None]
    _replica: ReplicaRunner
    _named: NamedParameters
    _parameters: list[nn.Parameter]
    _buffers: WorkerBuffers
    _reducer: Reducer
    _make_optimizer: OptimizerFactory
    _optimizer: Optimizer | None
    _whole: WholeTensorsOf | None

    def __init__(self, config: AllReduceConfig, run_context: RunContext) -> None:
        self._config, self._run_context = config, run_context
        self._step_context = StepContext(0, 0)
        self._counting = LossCounter()
        self._worker, self._last_worker = -1, run_context.mine[-1] if len(run_context.mine) else -1
        self._scheduled: ScheduledAllReduce | None = None
        self._replica_sums = ReplicaSums(run_context.comms.model)
        # Parameters of the optimizer that steps, within ``stepping``.
        self._acting_on: Sequence[nn.Parameter] | None = None
        mesh = run_context.mesh
        self.gradient_at: GradientPlace = "stages" if mesh.stage > 1 else "slices" if mesh.tensor > 1 else "rank"
        self._concealed = ConcealedGradients(run_context, self.gradient_at)
        self._has_custom_loop = False
        # Whether the last backward of this step may have begun to send gradients.
        self._may_have_sent = False

    def attach(self, replica: ReplicaRunner, make_optimizer: OptimizerFactory) -> GradientReadyHook:
        """Verify and broadcast the model, plan the buckets of the gradient all-reduce and build the optimizer.

        Called once, before the first step of synchronous data parallelism. Collective over all ranks of the run: the
        data ranks (those that share out a global batch) all-gather digests of their models, receive data rank 0's state
        by broadcast and set up the memory or links of their all-reduce; all ranks all-gather the result of a trial step
        of the optimizer.

        Args:
            replica: this rank's part of the model; its parameters and buffers are overwritten by those of data rank 0.
            make_optimizer: builds the optimizer from this rank's (name, parameter) pairs; it may return None, where
                this rank has nothing to train.

        Returns:
            This object itself, which is also the gradient-ready hook. Where the sum of gradients overlaps with backward
            (several data ranks, and neither reproducible mode nor a measured gradient variance), ``attach`` has
            registered its ``gradient_ready`` by ``replica.connect``, so that autograd calls it when a parameter's
            gradient is complete.

        Raises:
            MismatchError: the data ranks hold models with different parameters or buffers.
            PeerError: a rank has ended, or did not make the call in time.
            UsageError: an optimizer needs tensors of several pipeline stages together, or whole tensors and a closure;
                a trial step draws from PyTorch's global random generator; or ``algorithm=shared_memory``, and the ranks
                cannot share memory.
        """
        named = parameters(replica.parts)
        self._unite(replica, named)
        self._replica, self._parameters = replica, [p for _, p in named if p.requires_grad]
        self._named = named
        self._concealed.attach(replica)
        self._buffers = WorkerBuffers(replica.parts, self._run_context, replica.not_owned)
        self._reducer = self._new_reducer()
        self._make_optimizer = make_optimizer
        self._optimizer = make_optimizer(named)
        self._whole = gatherers_of_optimizers(self._optimizer, self._complete)
        self.optimizers = (self._optimizer,) if self._optimizer else ()
        self.gradient_ready = self._reducer.gradient_ready
        if self._reducer.listens:
            replica.connect(self)
        return self

    def prepare_for_backward(self, part: LossSums | None) -> None:
        """Let the all-reduce of gradients overlap with the coming backward if that is this rank's last in the step.

        Called before the backward of the last micro-batch of a logical worker (one of N fixed shares of the global
        batch). Does nothing before the rank's last worker: gradients of earlier workers accumulate in ``.grad``. For
        the last worker, the call also sends the buffers (such as batch-norm statistics) to the next rank that computes
        micro-batches of the same worker. Does not block.

        Args:
            part: sums of loss, count and metrics of the current logical worker; None where this rank does not know them
                yet, as on all pipeline stages but the last.

        Raises:
            UsageError: ranks share a logical worker, and a forward has changed a buffer (outside reproducible mode:
                other than batch-norm statistics) after a first step in which no forward of any rank changed one.
        """
        if self._worker == self._last_worker:
            self._may_have_sent = True
            self._buffers.pass_on()
            self._reducer.prepare_for_backward(self._step_context)

    def begin_worker(self, worker: int, step_context: StepContext) -> None:
        """Put a logical worker's buffers (batch-norm statistics) into the model, before the worker's first micro-batch.

        A logical worker is one of N fixed shares of the global batch. All workers have the same parameters, but each
        its own buffers. Where the previous rank computes micro-batches of the same worker, block until that rank has
        sent the buffers.

        Args:
            worker: index of the worker, one of those that this rank computes (``RunContext.mine``).
            step_context: the step under way; kept for the reduction of this step's gradients, in which the ranks
                compare its number, batch size and settings.

        Raises:
            UsageError: the script has written a buffer between the steps. Raised in two cases. First, this rank
                computes several workers, and forwards write the buffer too, so that each worker has its own value;
                allowed are a reset to zeros, or to ones for a variance, and writes in a custom loop
                (``begin_custom_loop``). On accelerators ``reduce_gradients`` raises this error. Second, several ranks
                share this worker; there every such write is refused.
            PeerError: the previous rank of a shared worker is lost, or does not send the buffers within the timeout.
        """
        self._step_context, self._worker = step_context, worker
        self._buffers.enter(worker, step_context.local_step)

    def end_worker(self, worker: int, part: LossSums | None) -> None:
        """Add a logical worker's loss sums to this rank's loss sums, after the worker's last micro-batch.

        A logical worker is one of N fixed shares of the global batch. Where gradients are summed worker by worker
        (reproducible mode, or a measured gradient variance), also add the worker's gradients to the summation tree and
        set ``.grad`` to None. Otherwise the gradients stay in ``.grad``, where autograd accumulates the rank's workers.

        Args:
            worker: index of the logical worker.
            part: the worker's sums of loss, count and metrics; None if the worker had no samples on this rank.

        Raises:
            UsageError: gradients are summed worker by worker, and one is sparse although no module that holds the
                parameter has an attribute ``sparse`` that is True.
        """
        self._counting.add(part)
        self._reducer.collect(self._step_context, worker, None if part is None else part.sums)

    def reduce_gradients(self, step_context: StepContext) -> StepStats:
        """Complete the all-reduce of gradients and loss sums, and divide the gradients by the global count.

        The count is of samples or tokens, as the loss function reports it. Collective: the all-reduces of gradient
        buckets over the data ranks (in reproducible mode all-to-alls and all-gathers), broadcasts of the gradients of
        parameters that several stages (tied weights) or tensor ranks hold in full, and an all-reduce of the gradient
        norm over the pipeline stages and tensor ranks of a replica. Blocks until all data ranks have sent, with one
        exception: where an accelerator can skip an update by itself, the call may only launch the all-reduces and
        return a ``PendingStats``. The first read of one of its attributes then waits, divides gradients that still need
        a factor, and raises the errors below; ``optimizer_step`` launches the update before this read.

        After the call, or after that first read, every ``.grad`` is the gradient of the mean loss over the global
        batch, without loss scale, and None where no rank had a gradient. It is not clipped before ``optimizer_step``.
        With ``run.step`` and an optimizer of PyTorch or tutti it may be a view of a bucket that the next reduction
        overwrites.

        Args:
            step_context: the step under way, with the loss scale that the gradients contain and whether this rank asks
                to stop.

        Returns:
            A ``StepStats``, equal on all ranks, with the attributes ``loss`` and ``metrics`` (by name), means over the
            global batch; ``count``, of samples or tokens; ``grad_norm``, the L2 norm of the gradient; ``finite``,
            whether all gradients are finite; ``stop``, whether any rank asks to stop; and ``gradient_variance``, None
            where it is not measured. A ``PendingStats`` is a ``StepStats`` whose values are still on the device.

        Raises:
            MismatchError: ranks are in different steps, hold different parameters, or differ in batch size or settings.
            PeerError: a rank is lost, or does not take part within the timeout.
            UsageError: a gradient is sparse although no module that holds the parameter has an attribute ``sparse``
                that is True; the script's edits of parameters or gradients that are split over ranks differ between
                these ranks; on an accelerator, the script has written a buffer that forwards write too, other than by a
                reset to zeros, or to ones for a variance, where this rank computes several logical workers (shares of
                the global batch with buffers of their own); or, where ranks share a worker, a buffer has changed in
                another way than by forwards.
        """
        self._buffers.finish()
        # Before the exchange: behind it other ranks may update parameters that all of a node share.
        step_context.written()
        counted = self._counting.take()
        later = None if counted is None else self._sum_later(step_context, counted)
        if later is not None:
            self._may_have_sent = False
            self._keep_gradients()
            return PendingStats(partial(self._read_pending, later, step_context), partial(self._launch_update, later))
        sums = self._reducer.finish(step_context, counted)
        self._may_have_sent = False
        self._share_copies()
        stats = self._results(sums, step_context)
        self._keep_gradients()
        return stats

    def _results(self, sums: ReducedSums, step_context: StepContext, square: float | None = None) -> StepStats:
        """Divide the gradients by the global count, and return the step's results. Collective as ``_across_stages``.

        Args:
            sums: sums over the data ranks.
            step_context: the step under way.
            square: square of the gradient's norm before the division; None computes it.
        """
        whole = mean_factor(divisor_of_backward(step_context), sums.samples)
        factor = whole / step_context.loss_scale
        if factor != 1.0:
            self._reducer.scale(factor)
            square = None
        squares = self._reducer.squares() if square is None else [square]
        rows = [squares, *([sums.own[:-1]] if sums.own else [])]
        (square, *own), stop = self._across_stages(rows, sums.stop)
        self._buffers.verify()
        variance = GradientVariance(own[0] * sums.samples * whole**2, round(sums.own[-1])) if own else None
        norm = math.sqrt(square)
        finite = finite_by_norm(norm, self._all_finite)
        return self._counting.stats(sums, norm, finite, stop, variance)

    def _keep_gradients(self) -> None:
        """Let a script, or an optimizer of its own class, keep the gradients of this step."""
        if self._has_custom_loop or not all(is_known(type(member)) for member in members_of(self._optimizer)):
            self._release()

    # --- updates before the host has read the results --------------------------------------------------------------

    def _sum_later(self, step_context: StepContext, counted: Tensor) -> PendingSums | None:
        """Sum gradients without waiting for the results, where the update may be launched first; None elsewhere.

        The host must have waited for the device in the previous step. In a custom loop the script sees the gradients
        before the update, so that their factor must be known to be 1.
        """
        reducer = self._reducer
        if not isinstance(reducer, OverlappedReducer) or reducer.waited < LEAST_WAIT:
            return None
        if not self._updates_on_device or self._whole is not None:
            return None
        if self._has_custom_loop and not step_context.whole:
            return None
        if not can_launch_first(self._optimizer, self._run_context, step_context):
            return None
        return reducer.finish_later(step_context, counted)

    def _read_pending(self, later: PendingSums, step_context: StepContext) -> tuple[StepStats, bool]:
        """Wait for the results of a reduction, and finish what depends on them; also return ``later.allowed``."""
        sums, square, allowed = later.read()
        return self._results(sums, step_context, square), allowed

    def _launch_update(self, later: PendingSums, step_context: StepContext) -> None:
        """Clip the gradients and step the optimizers, which changes nothing where ``later.allowed`` is False."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        later.launch_update(self.optimizers, gradients, self._run_context.clip, step_context.lr_factor)

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Clip the gradients and step this rank's optimizers; skip the update where a gradient is not finite.

        Called on every data rank after ``reduce_gradients``; all ranks make the same update. Gradients are scaled so
        that their norm is at most the run's clipping norm, if the run has one. Collective over the ranks of a replica
        where an optimizer gathers whole tensors, and for a skipped update, in which these ranks all-gather the names of
        their non-finite parameters. Otherwise nothing is sent. Within the context ``stepping(i, …)`` only the script's
        optimizer number i steps.

        Args:
            stats: result of ``reduce_gradients`` in this step: norm of the gradient, and whether the gradient is
                finite.
            step_context: the step under way, with the factor on the initial learning rate.

        Returns:
            An ``UpdateResult``: ``updates`` is 1, or 0 if a gradient was not finite; then ``skipped`` is True, and
            ``nonfinite`` has the names of parameters whose gradient is not finite (at most three from each rank).

        Raises:
            UsageError: an optimizer does not take the sparse gradients of its parameters.
            PeerError: in a collective, a rank of the replica is lost, or does not take part within the timeout.
        """
        if isinstance(stats, PendingStats) and stats.update_first(step_context):
            return UpdateResult.joint(stats, ())
        if stats.finite:
            norm = self.clip_gradients(stats.grad_norm)
            with self._updating():
                for optimizer in self.optimizers:
                    optimizer_step(optimizer, step_context.lr_factor, norm, self._whole)
        nonfinite = () if stats.finite else self._nonfinite_names()
        return UpdateResult.joint(stats, nonfinite)

    def clear(self) -> None:
        """Set the ``.grad`` of all trained parameters on this rank to None, after an update. Not collective."""
        self._concealed.forget()
        for parameter in self._parameters:
            parameter.grad = None

    def abandon_step(self) -> bool:
        """Drop the gradients and loss sums of a step that an exception has ended before its update. Not collective.

        Returns:
            Whether training can go on with the next step as if this one had been skipped. True in a run of one rank.
            With several ranks True only if this rank has begun no backward in the step, each rank has the whole model,
            and no logical worker (fixed share of the global batch) is shared by ranks; otherwise other ranks may have
            begun to sum gradients or wait for this one.
        """
        counted = self._counting.take() is not None
        begun = counted or self._may_have_sent or any(p.grad is not None for p in self._parameters)
        self._may_have_sent = False
        self.clear()
        if self._run_context.comms.world.size > 1:
            return not begun and self.gradient_at == "rank" and self._run_context.sharers is None
        self._reducer = self._new_reducer()
        return True

    def merged(self) -> dict[str, Tensor]:
        """Return all parameters and buffers of the trained model on this rank, merged over logical workers.

        Logical workers are the N fixed shares of the global batch, each with buffers of its own. Batch-norm statistics
        are pooled over all workers, other floating buffers averaged, and of integers the largest is taken. Collective
        over the data ranks: an all-gather of all workers' buffers for each dtype. For N = 1 nothing is sent, unless
        ranks share the worker and the last step ended without a backward.

        Returns:
            A dict from names in the model to tensors. Parameters share memory with the model's own, which the next
            update changes. Buffers are new tensors, or for N = 1 the model's own.

        Raises:
            UsageError: this rank computes several logical workers, and the script has written a buffer that forwards
                write too, other than by a reset to zeros, or to ones for a variance: each worker has its own value of
                it.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        return {**{name: p.data for name, p in self._named}, **self._buffers.merged()}

    def replicated(self) -> Mapping[str, Tensor] | None:
        """Return the tensors of the trained model of which all data ranks must hold equal copies. Not collective.

        These are all parameters, and the buffers if the run has a single logical worker (share of the global batch with
        its own buffers). The caller compares digests of the tensors over ranks to find ranks that have diverged.

        Returns:
            A mapping from names in the model to the model's own tensors, not copied; never None in data parallelism.
        """
        return {**{name: p.data for name, p in self._named}, **self._buffers.replicated()}

    def state(self) -> dict[str, Mapping[str, Tensor | TensorSlice]]:
        """Return the tensors that this rank writes into a checkpoint. Collective over the data ranks.

        The data ranks all-gather the buffers of all logical workers (the N fixed shares of the global batch, each with
        buffers of its own) and merge them: batch-norm statistics into those of all samples, other floating-point
        buffers into their mean, integers into the largest. For N = 1 nothing is sent, unless ranks share the worker and
        the last step ended without a backward.

        Returns:
            Three groups, each a mapping from names to tensors: ``model`` has parameters and merged buffers by their
            names in the model; ``optim`` has the optimizer state under ``"{parameter name}/{state key}"``; ``workers``
            has the buffers of each logical worker of this rank under ``"{index of the worker}/{buffer name}"``, and is
            empty for N = 1; of ranks that share a worker only the first has its buffers. The tensors of ``model`` and
            ``optim`` are shared out over the data ranks so that one rank writes each. Under tensor parallelism a value
            is a ``TensorSlice``: this rank's slice and its place in the full tensor. Parameters and optimizer state are
            not copied: the next update changes them, so the caller writes or copies them before it.

        Raises:
            UsageError: this rank computes several logical workers, and the script has written a buffer that forwards
                write too, other than by a reset to zeros, or to ones for a variance: each worker has its own value of
                it.
            MismatchError: the state of an optimizer of the script's own class differs between ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        comm = self._run_context.comms.replica
        return {
            "model": written(self.merged(), self._replica, comm),
            "optim": self._optimizer_state(),
            "workers": self._buffers.state(),
        }

    def load(self, saved: SavedState) -> None:
        """Restore parameters, buffers and optimizer state from a checkpoint, in place, on every rank.

        Not collective. A rank with tensor slices or a pipeline stage reads only its own part. A parameter without
        optimizer state in the checkpoint keeps the state that it has.

        Args:
            saved: the checkpoint, with three groups of tensors: ``model``, ``optim`` and ``workers`` (buffers of each
                logical worker, a fixed share of the global batch).

        Raises:
            CheckpointError: the checkpoint lacks a parameter or buffer, or a file of it differs from its manifest.
        """
        for name, parameter in self._named:
            parameter.data.copy_(read_local(saved, "model", name, self._replica, parameter.shape))
        self._buffers.load(saved)
        if self._optimizer:
            whole, specs = self._whole, self._replica.specs
            named = [(name, p) for name, p in self._named if whole is None or not whole.gathers(p)]
            load_optimizer(self._optimizer, named, saved, "optim", specs=specs)
            if whole is not None:
                whole.load(self._named, saved, specs)

    def own_gradients(self) -> OwnGradients:
        """Return this rank's trained parameters, whose ``.grad`` has the rank's own gradient until the all-reduce.

        The gradient noise scale is measured with these gradients. Parameters that another rank of the replica counts in
        the gradient norm (weights tied over pipeline stages) are left out. Not collective.

        Returns:
            An ``OwnGradients`` with the attributes ``parameters``, the list of these parameters, and ``optimizers``,
            the sequence of the optimizers that update them.
        """
        return OwnGradients(self._counted(), optimizers=self.optimizers)

    def _counted(self) -> list[nn.Parameter]:
        """Return the trained parameters that this rank counts in the gradient's norm."""
        not_owned = self._replica.not_owned
        return [p for name, p in self._named if p.requires_grad and name not in not_owned]

    def facts(self) -> dict[str, object]:
        """Return the messages and bytes of the gradients' sums so far, for ``summary.json``.

        Collective over the data ranks if tutti's own all-reduce schedule (option ``algorithm`` of the strategy, such as
        a ring) sums the gradients.

        Returns:
            With such a schedule ``algorithm``, its name, and ``links``, a list of dicts with the data ranks ``from``
            and ``to`` (indices among the data ranks, from 0), and the numbers of ``messages`` and ``bytes`` sent on
            this link. With sparse gradients also ``collectives``, calls and bytes of this rank's collectives by kind,
            among them the all-gathers of rows. Otherwise an empty dict.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        comm, found = self._run_context.comms.replica, dict[str, object]()
        if isinstance(self._reducer, SparseReducer):
            found["collectives"] = comm.collective_facts()
        if self._scheduled is not None:
            links = [{"from": a, "to": b, **counted._asdict()} for (a, b), counted in comm.traffic().items()]
            found |= {"algorithm": self._scheduled.schedule.name, "links": links}
        return found

    # --- custom training loops -------------------------------------------------------------------------------------

    @property
    def by_worker(self) -> bool:
        """Whether the sum of gradients over ranks adds each logical worker's gradient as a term of its own.

        A logical worker is one of N fixed shares of the global batch. True in reproducible mode, where one fixed
        summation tree over the workers gives the same bits for any number of ranks, and where the variance of the
        workers' gradients is measured (AdaScale). Then the all-reduce does not overlap with backward. If False, each
        rank's term is the sum of the gradients of all workers that it computes, which autograd accumulates in
        ``.grad``.
        """
        return self._run_context.reproducible or self._run_context.gradient_variance

    def begin_custom_loop(self) -> None:
        """Adapt the memory of gradients, and the rule for the script's writes to buffers, to a custom training loop.

        Called before a training loop of the script's own begins. Later reductions put gradients into memory that the
        script may keep: no reduction overwrites it. Not collective.

        Each logical worker, a fixed share of the global batch, has its own copy of buffers such as batch-norm
        statistics. The rule holds on a rank that computes several workers, for a buffer that forwards write, too. A
        write of the script between an update and the next step goes, until ``leave_custom_loop``, to the copy of the
        rank's last worker; outside of custom loops it raises UsageError in the next step, unless it is a reset to
        zeros, or to ones for a variance.
        """
        self._has_custom_loop = True
        self._buffers.begin_custom_loop()

    def leave_custom_loop(self) -> None:
        """Refuse the script's writes to module buffers again, by the rule of ``CustomLoopSync``. Not collective."""
        self._buffers.leave_custom_loop()

    def named_trained(self) -> NamedParameters:
        """Return the trained parameters of the model on this rank as a list of (name, parameter), in the model's order.

        These are the parameters that had ``requires_grad`` when the gradient buckets were last planned: by ``attach``,
        or by ``reattach`` for parameters that the script unfroze.
        """
        trained = set(self._parameters)
        return [(name, p) for name, p in self._named if p in trained]

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trained parameters on this rank as the user's model has them, in the model's order.

        In data parallelism they are the same objects that the optimizer updates; strategies that shard parameters
        (FSDP, ZeRO) return the model's unsharded parameters or DTensors here. With pipeline stages the parameters of
        other stages are among them, whose ``.grad`` has placeholders.
        """
        return self._concealed.script_parameters() if self.gradient_at == "stages" else self._parameters

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that previous reductions left in ``.grad``, and set every ``.grad`` to None.

        To accumulate gradients over several reductions, a custom training loop calls ``pop_gradients`` before the next
        backward, and gives the result to ``add_gradients`` after its reduction. Not collective.

        Returns:
            The gradients by parameter, not copied; parameters with ``.grad`` None, also where the script has cleared
            it, are left out.
        """
        self._concealed.reveal()
        held = {p: gradient for p in self._parameters if (gradient := p.grad) is not None}
        self.clear()
        return held

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add the just reduced gradients in ``.grad`` to the gradients of earlier reductions (gradient accumulation).

        The sums are in the earlier tensors, as with autograd, so that views which the script keeps of ``.grad`` show
        them. Under tensor parallelism, the gradients of parameters that are split over the tensor ranks are afterwards
        replaced by placeholders, because they differ between ranks: a function of a placeholder all-gathers the whole
        gradient over the tensor ranks and computes with it. With pipeline stages every parameter with a gradient gets a
        placeholder, also on ranks of other stages; norms, scaling and clamping then act on the whole gradient. The
        update uses the true gradients. Collective with pipeline stages only: the stages all-gather which parameters
        have a gradient.

        Args:
            held: the earlier gradients by parameter, as ``pop_gradients`` returned them; it may be empty.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        self.accumulated = bool(held)
        for parameter, before in held.items():
            parameter.grad = accumulated(before, parameter.grad)
        self._concealed.conceal(complete=True)

    def _release(self) -> None:
        """Let the script keep each ``.grad``: in this rank's memory, and as another object than the bucket's view."""
        self._reducer.release()
        for parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                parameter.grad = gradient.detach()

    def trained_tensors(self) -> list[Tensor]:
        """Return the ``.data`` of the trained parameters on this rank, in the model's order.

        The tensors are detached from autograd and share memory with the model's parameters.
        """
        return [p.data for p in self._parameters]

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Put gradients that placeholders stand for back into ``.grad``, before the optimizer step.

        Under tensor parallelism and with pipeline stages, ``add_gradients`` has replaced gradients that differ between
        the ranks of a replica by placeholders. A gradient that the script has cleared comes back as None or zeros.
        Every other ``.grad`` stays as the script has left it, clipped for example, and the update uses it. Not
        collective.

        Args:
            edited: unused; parameters whose ``.grad`` the script has edited.
        """
        self._concealed.reveal()

    def norm_of(self, members: Sequence[nn.Parameter], step_context: StepContext) -> float:
        """Return the L2 norm of the reduced gradients of ``members`` together, for a script that clips them.

        Collective: an all-reduce over the pipeline stages and tensor ranks of a replica, each of which adds its own
        tensors (before the first, one all-gather of the message's layout); the result is equal on all of them.

        Args:
            members: some of this rank's trained parameters; a parameter that another rank of the replica counts (a
                weight tied over stages) adds nothing here, and neither does one without a gradient.
            step_context: unused; the ranks compare the step with which ``begin_worker`` was called.

        Returns:
            The square root of the sum of squares over the replica, 0 where no member has a gradient.

        Raises:
            MismatchError: the ranks of the replica are in different steps.
            PeerError: a rank of the replica is lost, or does not take part within the timeout.
        """
        own = set(members)
        counted = [p for name, p in self._named if p in own and name not in self._replica.not_owned]
        square = sum(squares_of([p.grad for p in counted if p.grad is not None]))
        [square], _ = self._across_stages([[square]], stop=False)
        return math.sqrt(square)

    @contextmanager
    def stepping(self, index: int | None, members: Sequence[nn.Parameter]) -> Iterator[None]:
        """Return a context in which ``optimizer_step`` steps only one of the script's several optimizers.

        Within the context ``clip_gradients`` scales the gradients of this optimizer alone, too. On exit, gradients that
        differ between the ranks of a replica (tensor slices, or parameters of one pipeline stage), which
        ``apply_edits`` has put into ``.grad`` for the update, are replaced by the placeholders of ``add_gradients``
        again. Not collective.

        Args:
            index: position of the optimizer among those of the script, from 0; None steps all of them.
            members: parameters of this optimizer, the only ones whose gradients are clipped; ignored where ``index`` is
                None.
        """
        with acting(self._optimizer, index):
            self._acting_on = None if index is None else members
            try:
                yield
            finally:
                self._acting_on = None
                self._concealed.conceal()

    def clip_gradients(self, norm: float) -> float:
        """Scale the gradients in place, so that their norm is at most the run's clipping norm.

        Within ``stepping`` only the gradients of one optimizer are scaled. Not collective. Does nothing in a run
        without a clipping norm.

        Args:
            norm: L2 norm of these gradients of the whole model, equal on all ranks.

        Returns:
            The norm afterwards.
        """
        return clip_norm(norm, self._run_context.clip, self._scale)

    def steps_whole(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` updates full parameters with full gradients on this rank.

        Only then may its step have a closure. False in three cases: with pipeline stages or tensor parallelism; if any
        optimizer of the run needs whole tensors, which its step gathers from the ranks; and for an optimizer that
        ``make_optimizer`` of ``attach`` has not built. Not collective.

        Args:
            optimizer: any optimizer, such as one that the script steps by itself.
        """
        return (
            self._whole is None
            and self.gradient_at == "rank"
            and any(optimizer is own for own in members_of(self._optimizer))
        )

    def adopt(self, optimizer: Optimizer) -> None:
        """Build this rank's optimizer if it has none, after the script has called ``optimizer.add_param_group``.

        A rank has no optimizer if it had no parameter to train before, such as a pipeline stage without trainable
        parameters. Collective over the tensor ranks of such a stage. Does nothing where the rank has one.

        Args:
            optimizer: the script's optimizer, with the new parameter groups; unused, as the optimizer is built from all
                parameters on this rank.

        Raises:
            UsageError: the script has several optimizers, and this rank holds no parameter of one of them; or the
                script has added a parameter to an optimizer whose step all-gathers tensors that are split over ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        if self._whole is not None:
            self._whole.check_members(self._named)
        if self._optimizer is None:
            self._make_missing_optimizer()
        elif None in slots(self._optimizer):
            raise UsageError(
                "a group added to one of several optimizers cannot be combined with a model on several devices",
                why="the optimizer may have no parameters on this device",
                remedy="add the group before tutti.prepare, or take strategy='mirrored'",
            )

    def reattach(self, names: Sequence[str], late: bool = False) -> None:
        """Train parameters that the script has unfrozen: plan the gradient buckets again with them.

        Also builds the optimizer of a rank that had nothing to train before. Collective over the data ranks: an
        all-gather that compares the models, and the set-up of the all-reduce's shared memory. The new gradient-ready
        hook is connected by ``ReplicaRunner.connect``.

        Args:
            names: names of the parameters whose ``requires_grad`` the script has set to True since the previous
                ``reattach``; at least one.
            late: unused; True if a forward of this step has been computed already.

        Raises:
            UsageError: an optimizer's step gathers tensors that are split over ranks, and cannot take more parameters.
            MismatchError: the models of the data ranks differ, in ``requires_grad`` for example.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if self._whole is not None:
            refuse_growth(self._optimizer, names[0])
        agree_on_state(self._run_context.comms.replica, self._replica.parts)
        self._parameters = [p for _, p in self._named if p.requires_grad]
        self._reducer = self._new_reducer()
        self.gradient_ready = self._reducer.gradient_ready
        if self._reducer.listens:
            self._replica.connect(self)
        if self._optimizer is None:
            self._make_missing_optimizer()

    def _make_missing_optimizer(self) -> None:
        """Build the optimizer of a stage that had no parameter to train before. Collective over the tensor ranks."""
        self._optimizer = self._make_optimizer(self._named)
        self.optimizers = (self._optimizer,) if self._optimizer else ()
        self._whole = gatherers_of_optimizers(self._optimizer, self._gatherer)

    def _scale(self, factor: float) -> None:
        if self._has_custom_loop:
            # The script's tensors, and not the reducer's.
            members = self._parameters if self._acting_on is None else self._acting_on
            scale_all([p.grad for p in members if p.grad is not None], factor)
        else:
            self._reducer.scale(factor)

    # --- overridden by subclasses ----------------------------------------------------------------------------------
    def _updating(self) -> AbstractContextManager[None]:
        """Return a context in which parameters and gradients are where this rank's optimizers compute."""
        return nullcontext()

    def _complete(self, optimizer: Optimizer | None) -> WholeTensors | None:
        """Prepare one optimizer for tensors that are split over the tensor ranks. Collective.

        Returns:
            The gatherer of whole tensors for an optimizer whose step on slices differs from the step on whole tensors
            (``tutti.optim.mixing``); None for other optimizers and without tensor parallelism.

        Raises:
            UsageError: the optimizer needs tensors of several stages together, or whole tensors and a closure; or ranks
                hold parts of the model, and its step calls collectives.
        """
        self._mixing = agreed_mixing(optimizer, self._run_context)
        if self._run_context.comms.model.size > 1:
            refuse_exchanges(optimizer, self._mixing)
        refuse_parts(optimizer, self._mixing, self._run_context.mesh.stage, "stages of the model")
        return self._gatherer(optimizer)

    def _gatherer(self, optimizer: Optimizer | None) -> WholeTensors | None:
        """Return the gatherer of whole tensors by the trial of ``_complete``. Collective over the tensor ranks."""
        comms = self._run_context.comms
        if optimizer is None or self._run_context.mesh.tensor == 1:
            return None
        mixing, specs = self._mixing, self._replica.specs
        slices: dict[Tensor, ShardSpec] = {p: specs[name] for name, p in self._named}
        found = {p: SliceRegions.of(spec, p.shape) for p, spec in slices.items()}
        split: dict[Tensor, SliceRegions] = {p: part for p, part in found.items() if part is not None}
        support_split_tensors(optimizer, split, comms.axis("tensor"))
        if mixing.rows and mixing.columns:
            cut_state(optimizer, slices)
            return None
        refuse_closure(optimizer, mixing)
        refuse_modules(optimizer, mixing)
        members = trained_by(optimizer, [p for _, p in self._named])
        parts = along_slices([(p, tuple(p.shape), found[p]) for p in members], comms.axis("tensor"), not mixing.tensors)
        return WholeTensors([gather_axis(comms.axis("tensor"), parts, not mixing.tensors)], optimizer)

    def _optimizer_state(self) -> dict[str, Tensor | TensorSlice]:
        """Return the tensors of the optimizer's state that this rank writes into a checkpoint.

        Collective over the data ranks for an optimizer of the script's own class: see ``agree_on_optimizer_state``.
        """
        comm, optimizer, whole = self._run_context.comms.replica, self._optimizer, self._whole
        if optimizer is None:
            return {}
        named = [(name, p) for name, p in self._named if whole is None or not whole.gathers(p)]
        shapes = {name: tuple(p.shape) for name, p in named}
        tensors = optimizer_tensors(optimizer, named)
        agree_on_optimizer_state(comm, optimizer, tensors)
        found = written(tensors, self._replica, comm, shapes)
        if whole is not None:
            found |= mine_of(whole.tensors(self._named), comm.rank, comm.size)
        return found

    def _unite(self, replica: ReplicaRunner, named: NamedParameters) -> None:
        """Check that the data ranks hold the same model, and broadcast data rank 0's state. Collective."""
        comm = self._run_context.comms.replica
        agree_on_state(comm, replica.parts)
        broadcast_state(comm, replica.parts)

    def _new_reducer(self) -> Reducer:
        return with_sparse_gradients(
            self._make_reducer,
            self._named,
            self._replica.parts,
            self._run_context,
            self._replica.not_owned,
            WIRE_DTYPES.get(self._config.wire),
            self._start_scheduled if self._config.schedule is not None else None,
        )

    def _start_scheduled(self, flat: Tensor, text: str) -> StartedSum:
        """Start an all-reduce by the schedule that ``_make_reducer`` has made."""
        assert self._scheduled is not None
        return self._scheduled.start(flat, text)

    def _share_copies(self) -> None:
        """Make gradients of a replica's copies of parameters equal, where rounding may differ. Collective there.

        Copies are tied weights on several stages and whole tensors on tensor ranks. The fixed tree of ``by_worker``
        rounds alike on all. Stages exchange the gradients of tied weights in their backwards, and a sum over two data
        ranks has one order; gradients of whole tensors come from each tensor rank's own backward, which is
        deterministic on CPUs.
        """
        mesh, comms = self._run_context.mesh, self._run_context.comms
        if self.by_worker:
            return
        if comms.replica.size > 2:
            for comm, copied in self._replica.stage_copies:
                share_gradients(copied, comm)
        if mesh.tensor > 1 and (comms.replica.size > 1 or is_accelerator(comms.world.device)):
            specs = self._replica.specs
            whole = [p for name, p in self._named if tuple(p.shape) == tuple(specs[name].shape)]
            share_gradients(whole, comms.axis("tensor"))

    def _nonfinite_names(self) -> tuple[str, ...]:
        return gather_nonfinite_names(self._run_context.comms.model, self._named)

    def _across_stages(self, rows: Sequence[Sequence[float]], stop: bool) -> tuple[list[float], bool]:
        """Sum each row over the ranks of one replica; also return whether any of them asks to stop.

        Collective: an all-reduce over the ranks of one replica (stages × tensor ranks), and in the first call an
        all-gather of the rows' lengths. Raises MismatchError where the ranks are in different steps.
        """
        # Where rows have a number for each parameter, also a place for each frozen one: a stage that trains more later
        # changes no other's place.
        most = len(self._named) if self.by_worker else len(rows[0])
        return self._replica_sums.total(rows, most, stop, self._step_context)

    def _make_reducer(self, named: NamedParameters) -> Reducer:
        config, run_context, not_owned = self._config, self._run_context, self._replica.not_owned
        if run_context.reproducible or run_context.gradient_variance:
            return TreeReducer(named, run_context, not_owned)
        bytes_ = int((config.bucket_mb or _BUCKET_MB) * 2**20)
        if config.schedule is not None and run_context.comms.replica.size > 1:
            # Dense sums of sparse gradients have pieces of at most ``FIRST_BYTES``.
            largest = max(largest_vector(named, bytes_), FIRST_BYTES)
            if self._scheduled is None:
                self._scheduled = ScheduledAllReduce(run_context.comms, config.schedule, largest)
            # Parameters that are unfrozen later may be on one stage alone, and its data ranks alone call this again.
            self._scheduled.grow(largest)
            return OverlappedReducer(named, run_context, config.wire, bytes_, not_owned, self._scheduled.start)
        if config.algorithm in ("auto", "shared_memory") and config.wire == "fp32" and config.bucket_mb is None:
            shared = attach_shared(named, run_context, not_owned)
            if shared is not None:
                return shared
            dense = any(p.requires_grad for _, p in named)
            if config.algorithm == "shared_memory" and run_context.comms.replica.size > 1 and dense:
                raise UsageError(
                    "these ranks cannot share memory",
                    why="they are on several hosts or on GPUs, the processor is not x86-64, or /dev/shm is too small",
                    remedy="take algorithm=native",
                )
        return OverlappedReducer(named, run_context, config.wire, bytes_, not_owned)

    def _all_finite(self) -> bool:
        """Return whether every gradient element is finite; called where the norm is not.

        False without a look at the elements where a replica lives on several ranks.
        """
        if self._run_context.comms.model.size > 1:
            return False
        return all(is_finite(p.grad) for p in self._parameters)
