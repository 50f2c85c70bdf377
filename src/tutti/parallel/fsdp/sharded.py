"""ZeRO and FSDP: shard optimizer state, gradients and parameters over the ranks of the shard axis.

ZeRO: Rajbhandari et al. 2019, arXiv 1910.02054. Every parameter is cut into blocks of rows, one for each of the ranks
that share a copy (``shards``); the optimizer of a rank has its rows. Elementwise optimizers need no more; layer-wise
optimizers receive the norms of whole layers. With several copies (HSDP) the rows' gradients are all-reduced over them.

Stage 1 is tutti's own (``ZeroSharding``), stages 2 and 3 are PyTorch's FSDP2 (``FullySharded``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import (
    cut_state,
    load_optimizer,
    mine_of,
    optimizer_tensors,
    read_local,
    written,
)
from tutti.config.sync_config import RowsConfig
from tutti.device import is_accelerator
from tutti.nn.swap import parameters
from tutti.optim.layerwise import LayerWise
from tutti.optim.mixing import needs_closure
from tutti.optim.mixing_rules import agreed_mixing, refuse_closure, refuse_exchanges, refuse_modules, refuse_parts
from tutti.optim.muon import Muon
from tutti.optim.several import acting, members_of, stepping, trained_by
from tutti.parallel.ddp.buckets import ReducedSums, Tail
from tutti.parallel.ddp.copied_gradients import share_gradients
from tutti.parallel.ddp.gradient_arithmetic import scale_all, squares_of
from tutti.parallel.ddp.host_parameters import OffloadedUpdate
from tutti.parallel.ddp.optimizer_step import gather_nonfinite_names, optimizer_step
from tutti.parallel.ddp.step_agreement import layout_key_of, refuse_mismatch
from tutti.parallel.ddp.sync_module_states import agree_on_state, broadcast_state
from tutti.parallel.ddp.worker_buffers import WorkerBuffers
from tutti.parallel.fsdp.fsdp_collectives import same_modules
from tutti.parallel.fsdp.fsdp_refusals import refuse_gradient_of_rows, refuse_offload, refuse_rows_written
from tutti.parallel.fsdp.model_cut import cut_model
from tutti.parallel.fsdp.row_collectives import RowGatherer, RowNormReducer, along_rows
from tutti.parallel.fsdp.row_optimizer_state import load_optimizer_rows, optimizer_slices
from tutti.parallel.fsdp.sharded_parameter import ShardedParameter, local_rows
from tutti.parallel.fsdp.zero_sharding import ZeroSharding
from tutti.parallel.grad_norm import norm_across_model
from tutti.parallel.loss_stats import LossCounter
from tutti.parallel.normalisation import clip_norm, divisor_of_backward, finite_by_norm, is_finite, mean_factor
from tutti.parallel.split_optimizer import SliceRegions, support_split_tensors
from tutti.parallel.whole_tensors import WholeTensors, along_slices, gather_axis, gatherers_of_optimizers, refuse_growth
from tutti.torch_compat import foreach_copy_
from tutti.types.custom_loop_sync import GradientPlace
from tutti.types.gradient_sync import OwnGradients, UpdatedSlice
from tutti.types.micro_batch import LossSums
from tutti.types.optimizer_protocols import OptimizerFactory
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import ShardSpec, TensorSlice
from tutti.types.step_records import StepContext, StepStats, UpdateResult

if TYPE_CHECKING:
    from tutti.parallel.fsdp.sharded_reads import ShardedReads


class ShardedSync:
    """Sharded data parallelism (ZeRO stages 1 to 3): reduce-scatter gradients, update rows, all-gather parameters.

    Each rank of a shard group updates its rows (a block of the first dimension) of every parameter. The global batch is
    split among N logical workers (fixed shares), a number that does not depend on the number of ranks. The object is
    also the gradient-ready hook of the replica's backward, of which it uses ``prepare_for_backward`` alone.

    Args:
        config: options of the strategy ``sharded``, such as the ZeRO stage and CPU offload.
        run_context: communicators and settings of the run.

    Attributes:
        loss_normalisation: ``"step"``: backward divides losses by the samples of the global batch.
        shares_parameters: whether other ranks write into the memory of this rank's parameters; False here.
        by_worker: False: a rank's gradients are summed over its logical workers before they are reduced.
        optimizers: the optimizers over this rank's rows, set by ``attach``; empty where the rank has nothing to train.
        accumulated: whether the most recent ``add_gradients`` was given gradients.
    """

    loss_normalisation: Literal["step", "worker"] = "step"
    shares_parameters: bool = False
    by_worker = accumulated = False

    def __init__(self, config: RowsConfig, run_context: RunContext) -> None:
        self._config, self._run_context = config, run_context
        self._shards, self._copies = run_context.comms.axis("shard"), run_context.comms.axis("replica")
        self._counting = LossCounter()
        self._acting_on: Sequence[nn.Parameter] | None = None
        self._offloaded: OffloadedUpdate | None = None
        if config.offload == "optimizer":
            self._offloaded = OffloadedUpdate(self._shards.device)
        self._uncut: list[tuple[str, nn.Parameter]] = []
        self._reads: ShardedReads | None = None
        self._begun_step = -1

    def attach(self, replica: ReplicaRunner, make_optimizer: OptimizerFactory) -> GradientReadyHook:
        """Verify and broadcast the model, cut its parameters into rows and build the optimizer over this rank's rows.

        Called once, before the first step of sharded data parallelism. In ZeRO stage 1 the model keeps whole
        parameters: new objects replace the trainable parameters in the modules, and the original objects become this
        rank's rows (blocks of the first dimension), views of the new objects. In stages 2 and 3 FSDP2 shards the model
        itself, frozen parameters included. Parameters that FSDP2 cannot shard, such as 0-d tensors or tensors of
        another dtype, stay whole and, where trainable, are cut as in stage 1. With one shard rank nothing is cut.
        Collective over all ranks of the run: the data ranks (those that share out a global batch) all-gather digests of
        their models and receive data rank 0's state by broadcast; all ranks all-gather the result of a trial step of
        the optimizer, and may receive by broadcast which modules FSDP2 wraps.

        Args:
            replica: runs forward and backward of this rank's part of the model. The values of its parameters and
                buffers become those of data rank 0; its parameters are replaced (stage 1) or sharded (stages 2 and 3)
                in its modules.
            make_optimizer: called once, with a list of (name, parameter) of all parameters, frozen ones included: this
                rank's rows of each parameter that is cut, other parameters in full; returns the optimizer, or None
                where this rank has nothing to train.

        Returns:
            This object itself, as the gradient-ready hook for ``ReplicaRunner.run`` and ``backward``, which call its
            ``prepare_for_backward``. It is not connected to autograd, because ``gradient_ready`` does nothing here.

        Raises:
            MismatchError: names, shapes, dtypes, order or trainability of the parameters or buffers differ between data
                ranks.
            UsageError: FSDP2 cannot shard the model, or the optimizer cannot step on this rank's part of the tensors or
                with ``offload``, or draws from PyTorch's global random generator in the trial step.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        comm = self._run_context.comms.replica
        comm.share_memory()
        self._shards.share_memory(like=comm)
        agree_on_state(comm, replica.parts)
        broadcast_state(comm, replica.parts)
        in_turn = not self._run_context.shards_parameters
        self._buffers = WorkerBuffers(replica.parts, self._run_context, replica.not_owned, in_turn)
        named = parameters(replica.parts)
        for _, parameter in named:
            # FSDP2 takes contiguous parameters only, and the sharded gradients are contiguous.
            parameter.data = parameter.data.contiguous()
        self._replica, self._slices = replica, replica.specs
        self._engines, self._reads = cut_model(replica, named, self._config, self._run_context)
        held = {id(parameter) for part in replica.parts for parameter in part.parameters()}
        for name, rows in named:
            if rows.requires_grad and id(rows) not in held:
                rows.register_post_accumulate_grad_hook(partial(refuse_gradient_of_rows, name))
        self._named = list(named)
        self._index()
        self._optimizer = self._make(make_optimizer)
        self._whole = gatherers_of_optimizers(self._optimizer, lambda member: self._complete(member, self._slices))
        self.optimizers: Sequence[Optimizer] = (self._optimizer,) if self._optimizer else ()
        return self

    def _make(self, make_optimizer: OptimizerFactory) -> Optimizer | None:
        """Make the optimizer, in host memory if its state is to be there.

        Raises:
            UsageError: the optimizer is only for parameters on a device.
        """
        with self._updating([p for _, p in self._named]):
            made = make_optimizer(self._named)
        for member in members_of(made) if self._config.offload else ():
            if any(group.get("capturable") for group in member.param_groups):
                refuse_offload("capturable=True", "leave out one of the two")
            if self._offloaded is not None and needs_closure(member):
                refuse_offload(f"{type(member).__name__}, which needs a closure", "leave out offload")
        return made

    def _updating(self, members: Sequence[nn.Parameter] | None = None) -> AbstractContextManager[None]:
        """Return a context in which parameters with offloaded optimizer state, and their gradients, are on the host.

        ``members``: the parameters; None for those of the optimizers that act.
        """
        if self._offloaded is None:
            return nullcontext()
        if members is None:
            acting = [each for optimizer in self.optimizers for each in stepping(optimizer)]
            members = [p for each in acting for group in each.param_groups for p in group["params"]]
        return self._offloaded.on_host(members)

    def _index(self) -> None:
        """Collect the rows of all engines, and the layout key of their digests."""
        self._rows = [rows for engine in self._engines for rows in engine.rows]
        self._trained = [rows for engine in self._engines for rows in engine.trained]
        if self._reads is not None:
            self._reads.cover(self._rows, self._zero_parameters())
        cut = {rows.name for rows in self._rows}
        self._fixed = {name: p for name, p in parameters(self._replica.parts) if name not in cut}
        leaves = {rows.name: rows.parameter for rows in self._rows}
        self._named = [(name, leaves.get(name, p)) for name, p in self._named]
        layout = [(rows.name, rows.local, rows.parameter.dtype) for rows in self._trained]
        self._tail = Tail(len(layout), layout_key_of(layout))

    def _complete(self, optimizer: Optimizer | None, slices: Mapping[str, ShardSpec]) -> WholeTensors | None:
        """Prepare one optimizer for tensors of which this rank has rows, tensor slices, or rows of slices. Collective.

        Args:
            optimizer: the optimizer; None for one without parameters on this rank.
            slices: spec of each parameter before it was cut into rows, by name.

        Returns:
            The gatherer of whole tensors for an optimizer whose step on rows or slices differs from the step on whole
            tensors (``tutti.optim.mixing``); None for others.

        Raises:
            UsageError: the optimizer needs tensors of several stages together, or whole tensors and a closure; or its
                step calls collectives.
        """
        mesh = self._run_context.mesh
        mixing = agreed_mixing(optimizer, self._run_context)
        refuse_exchanges(optimizer, mixing)
        refuse_parts(optimizer, mixing, mesh.stage, "stages of the model")
        if optimizer is None:
            return None
        # Frozen parameters, too: once the script unfreezes them, these objects are their rows.
        held = {rows.parameter: (rows.name, rows.local) for rows in self._rows}
        held |= {p: (name, tuple(p.shape)) for name, p in self._fixed.items()}
        norms, wholes = None, None
        if isinstance(optimizer, LayerWise) and self._shards.size > 1:
            optimizer.norms = norms = RowNormReducer(self._shards)
        if isinstance(optimizer, Muon) and self._shards.size > 1:
            optimizer.wholes = wholes = RowGatherer(self._shards, {p: local for p, (_, local) in held.items()})
        if self._run_context.mesh.tensor > 1:
            found = {p: SliceRegions.of(slices[name], local) for p, (name, local) in held.items()}
            split: dict[Tensor, SliceRegions] = {p: part for p, part in found.items() if part is not None}
            support_split_tensors(optimizer, split, self._run_context.comms.axis("tensor"), norms, wholes)
        if (mixing.rows or self._shards.size == 1) and ((mixing.rows and mixing.columns) or mesh.tensor == 1):
            cut_state(optimizer, {rows.parameter: rows.spec for rows in self._rows})
            return None
        refuse_closure(optimizer, mixing)
        refuse_modules(optimizer, mixing)
        return self._gathering(optimizer, slices, together=not mixing.tensors)

    def _gathering(self, optimizer: Optimizer, slices: Mapping[str, ShardSpec], together: bool) -> WholeTensors:
        """Build the gatherer of rows over ``shard``, then of slices of this rank's own tensors over ``tensor``.

        Collective. With ``together`` one rank owns all tensors.
        """
        members = set(trained_by(optimizer, [rows.parameter for rows in self._trained]))
        trained = [rows for rows in self._trained if rows.parameter in members]
        sizes = [math.prod(rows.spec.shape) for rows in trained]
        axes = [gather_axis(self._shards, along_rows(trained, self._shards), together, sizes)]
        if self._run_context.mesh.tensor > 1:
            line, mine = self._run_context.comms.axis("tensor"), [r for r in trained if axes[0].owns(r.parameter)]
            here = [(r.parameter, r.local, SliceRegions.of(slices[r.name], r.local)) for r in mine]
            axes.append(gather_axis(line, along_slices(here, line, together), together))
        return WholeTensors(axes, optimizer)

    def prepare_for_backward(self, part: LossSums | None) -> None:
        """Start to send this rank's buffers (batch-norm statistics) to the next rank that shares its logical worker.

        A logical worker is one of N fixed shares of the global batch. Where there are more data ranks than workers,
        several ranks compute micro-batches of one worker; elsewhere nothing is sent. Does not block: the point-to-point
        sends are completed in ``reduce_gradients``. Called before the backward in which gradients become complete.
        Gradients need no preparation: FSDP2 has hooks of its own, and ZeRO stage 1 sends in ``reduce_gradients``.

        Args:
            part: unused; other strategies send these loss sums along with the gradients.

        Raises:
            UsageError: ranks share a logical worker, a forward of this rank has changed a buffer in this step, and one
                of two conditions holds: FSDP2 shards the model, whose collective forwards ranks cannot compute one
                after the other; or no forward of any rank changed a buffer in the first step. Batch-norm statistics
                count as buffers here in reproducible mode only.
        """
        self._buffers.pass_on()

    def gradient_ready(self, parameter: Tensor) -> None:
        """Do nothing when backward has completed the gradient of ``parameter``: FSDP2 and ZeRO do not need this hook.

        FSDP2 reduces the gradient by hooks of its own; in ZeRO stage 1 ``reduce_gradients`` reduces it after all
        backwards of the step. Data parallelism (DDP) starts an all-reduce here.

        Args:
            parameter: unused; the parameter whose gradient is complete.
        """

    def begin_worker(self, worker: int, step_context: StepContext) -> None:
        """Load a logical worker's own buffers (batch-norm statistics) into the model, before its forwards in this step.

        A logical worker is one of N fixed shares of the global batch. Parameters are the same for all of them. The
        optimizer's parameter groups hold this rank's rows; where the script has written these rows since the last
        update, the first call in a step all-gathers the parameters over the shard ranks (ZeRO stage 1). Where several
        ranks share the worker, the call blocks until the previous of them has sent its buffers.

        Args:
            worker: index of the logical worker among all N, from 0; one that runs on this rank.
            step_context: the step under way, of which the number is read.

        Raises:
            UsageError: the script has written a buffer between the steps, in one of two cases. First, several ranks
                share this worker. Second, this rank computes several workers, forwards write the buffer too, so that
                each worker has its own value of it, and the write is no reset to zeros, or to ones for a variance; on
                accelerators ``reduce_gradients`` raises this second error.
            PeerError: a rank of the all-gather, or the previous rank of a shared worker, is lost or late.
        """
        if self._begun_step != step_context.local_step:
            self._begun_step = step_context.local_step
            self._gather_written()
        self._buffers.enter(worker, step_context.local_step)

    def end_worker(self, worker: int, part: LossSums | None) -> None:
        """Add the loss sums of a logical worker to this rank's sums of the step, after the worker's last backward.

        A logical worker is one of N fixed shares of the global batch. Its gradients need no action: backward has
        accumulated them. Not collective.

        Args:
            worker: unused.
            part: sums of the worker's losses and metrics over its samples; None if the worker had no samples on this
                rank.
        """
        self._counting.add(part)

    def reduce_gradients(self, step_context: StepContext) -> StepStats:
        """Reduce-scatter gradients over the shard ranks, sum them over copies (HSDP) and divide by the global count.

        The shard ranks hold one copy of the parameters together, each some rows of every parameter. The count is of
        samples or tokens, as the loss function reports it. Collective over all ranks and blocking: reduce-scatters over
        the shard ranks (with FSDP2 done in backward), all-reduces of the rows over the copies, of loss sums and norm
        over the data ranks, and of the norm over the stages and tensor ranks of a replica, and broadcasts of the
        gradients of parameters that several stages (tied weights) or tensor ranks hold in full. Afterwards the
        ``.grad`` of this rank's rows is the gradient of the mean loss over the global batch, not yet clipped; ``.grad``
        is None for a parameter for which no rank computed a gradient.

        Args:
            step_context: the step under way, with its number, and with the loss scale that gradients are divided by.

        Returns:
            A ``StepStats`` of Python numbers, equal on all ranks: ``loss``, and ``metrics`` by name, as means over the
            global batch; ``count``, the number of samples or tokens; ``grad_norm``, the L2 norm of the complete
            gradient; ``finite``, whether all gradients are finite; and ``stop``, whether a rank asks to stop.

        Raises:
            MismatchError: ranks are in different steps.
            PeerError: a rank is lost, or does not take part within the timeout.
            UsageError: in one of four cases. Since the step began, the script has written this rank's rows in the
                optimizer's groups; forwards have not seen these values. With FSDP2, the script has written an unsharded
                parameter between a forward and its backward. The script has edited a parameter or gradient, and the
                edits differ between the ranks that hold its parts. Or, on an accelerator, this rank computes several
                logical workers (shares of the global batch, each with buffers of its own), and the script has written a
                buffer that forwards write too, other than by a reset to zeros, or to ones for a variance.
        """
        if self._rows_written():
            refuse_rows_written(step_context.local_step)
        if self._reads is not None and (made := self._reads.edits.take()):
            # By this step's forwards.
            edits, place = [*step_context.edits, *made], self._reads.edits.line
            step_context = replace(step_context, edits=edits, edited_in=place)
        if self._uncut:
            new, self._uncut = self._uncut, []
            self._cut(new)
        self._buffers.finish()
        used = [flag for engine in self._engines for flag in engine.used()]
        for engine in self._engines:
            engine.reduce_scatter_gradients(step_context.local_step + 1)
        for index, (rows, seen) in enumerate(self._pairs()):
            if not (seen.requires_grad and rows.parameter.requires_grad):
                # Frozen by the script after it was sharded: FSDP2 still computes its gradient.
                used[index], rows.parameter.grad, seen.grad = False, None, None
        self._sum_over_copies(step_context)
        self._share_copies()
        sums, square = self._agree(step_context, self._counting.take(), used)
        square, stop = norm_across_model(self._run_context.comms.model, square, sums.stop, step_context)
        self._buffers.verify()
        for (rows, seen), flag in zip(self._pairs(), sums.used, strict=True):
            if not flag:
                # FSDP2 sets zeros where no backward reached a parameter; the optimizer would still decay it.
                rows.parameter.grad = seen.grad = None
        factor = mean_factor(divisor_of_backward(step_context), sums.samples) / step_context.loss_scale
        if factor != 1.0:
            scale_all(self._gradients(), factor)
        norm = math.sqrt(square) * factor
        return self._counting.stats(sums, norm, finite_by_norm(norm, self._all_finite), stop)

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Clip gradients and step the optimizers on this rank's rows, then all-gather the parameters (ZeRO stage 1).

        Called on all ranks, after ``reduce_gradients``. Gradients are scaled so that their norm is at most the run's
        clipping norm, if the run has one. Collective in ZeRO stage 1: an all-gather of the updated rows over the shard
        ranks; with FSDP2 the next forward all-gathers. Collective too where an optimizer needs whole tensors or their
        norms, which it gathers or sums over the shard and tensor ranks. If any gradient is not finite, no rank updates,
        and all ranks of the run all-gather the names of the parameters concerned.

        Args:
            stats: result of ``reduce_gradients`` in this step: norm of the gradient, and whether the gradient is
                finite.
            step_context: the step under way; its ``lr_factor`` multiplies the optimizers' initial learning rates.

        Returns:
            An ``UpdateResult``: ``updates`` is 1, or 0 if a gradient was not finite; then ``skipped`` is True, and
            ``nonfinite`` has the names of the parameters with gradients that are not finite (at most three from each
            rank).

        Raises:
            UsageError: an optimizer does not take sparse gradients.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        nonfinite: tuple[str, ...] = ()
        if self._reads is not None:
            self._reads.end()
        if stats.finite:
            norm = self.clip_gradients(stats.grad_norm)
            with self._updating():
                for optimizer in self.optimizers:
                    optimizer_step(optimizer, step_context.lr_factor, norm, self._whole)
            self._gather()
        else:
            trained = [(rows.name, rows.parameter) for rows in self._trained]
            nonfinite = tuple(dict.fromkeys(gather_nonfinite_names(self._run_context.comms.world, trained)))
        return UpdateResult.joint(stats, nonfinite)

    def _zero_parameters(self) -> list[nn.Parameter]:
        """Return the full parameters of the model that other rows than this rank's are gathered into (ZeRO stage 1)."""
        return [p for engine in self._engines if isinstance(engine, ZeroSharding) for p in engine.script_parameters()]

    def _rows_written(self) -> bool:
        """Return whether the script has written rows in the optimizer's groups since the parameters were gathered."""
        seen = self._reads is not None and self._reads.written
        return seen or any(engine.rows_written() for engine in self._engines)

    def _gather_written(self) -> None:
        """All-gather parameters whose rows the script has written in the optimizer's groups, as on every rank."""
        if self._rows_written():
            self._gather()

    def _gather(self) -> None:
        """Make the next forward use the rows' values. Collective in stage 1."""
        for engine in self._engines:
            engine.all_gather_parameters()
        if self._reads is not None:
            self._reads.written = False

    def clear(self) -> None:
        """Set the ``.grad`` of the sharded model's parameters, and of this rank's rows of them, to None.

        The optimizer has the rows as its parameters; the model has DTensors (FSDP2) or full parameters (ZeRO stage 1).
        Not collective.
        """
        for engine in self._engines:
            engine.clear()

    def abandon_step(self) -> bool:
        """Return False: training cannot go on after an exception within a step of sharded data parallelism.

        Other ranks may wait in the collectives of a forward or backward that this rank has not made. (With other
        strategies True means that the step's gradients were dropped and the next step can begin.)
        """
        return False

    def merged(self) -> dict[str, Tensor]:
        """Return the sharded model's parameters as this rank holds them, and buffers merged over logical workers.

        Logical workers are N fixed shares of the global batch, each with its own buffers. Batch-norm statistics are
        pooled over all workers, other floating buffers averaged, and of integers the largest is taken. Collective over
        the data ranks: an all-gather of all workers' buffers (none for N = 1); in ZeRO stage 1 an all-gather of the
        rows over the shard ranks too if the script has written them.

        Returns:
            A dict from names in the model to tensors: for a parameter that FSDP2 shards this rank's rows, as a plain
            tensor; all other parameters (under tensor parallelism this rank's slice) and the buffers in full.
            Parameters are not copied: the tensors are the live ones, which the next update writes. Buffers are new
            tensors, or with a single logical worker the model's own.

        Raises:
            UsageError: this rank computes several logical workers, and the script has written a buffer that forwards
                write too, other than by a reset to zeros, or to ones for a variance: each worker has its own value of
                it.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        self._gather_written()
        named = {name: p.data for name, p in parameters(self._replica.parts)}
        return {**named, **self._replica.sharded, **self._buffers.merged()}

    def replicated(self) -> Mapping[str, Tensor] | None:
        """Return the tensors that must be bitwise equal on all ranks with the same shard (HSDP copies).

        The caller compares digests of the tensors over these ranks. Not collective, unless the script has written this
        rank's rows in the optimizer's parameter groups: then ZeRO stage 1 all-gathers the rows over the shard ranks
        first.

        Returns:
            A mapping, never None, from names in the model to tensors, not copied: unsharded parameters, this rank's
            rows of the parameters that FSDP2 shards and, in a run of one logical worker (share of the global batch with
            its own buffers), buffers.
        """
        self._gather_written()
        named = {name: p.data for name, p in parameters(self._replica.parts)}
        return {**named, **self._replica.sharded, **self._buffers.replicated()}

    def state(self) -> Mapping[str, Mapping[str, Tensor | TensorSlice]]:
        """Return the tensors that this rank writes into a checkpoint. Collective over the data ranks.

        The data ranks all-gather the buffers of all logical workers (the N fixed shares of the global batch, each with
        buffers of its own) and merge them; for N = 1 there is no all-gather, unless ranks share the worker and the last
        step ended without a backward. Parameters and optimizer state are not sent.

        Returns:
            Three groups, each a mapping from names to tensors: ``model`` has this rank's rows of the sharded
            parameters, as ``TensorSlice`` (rows and their place in the full tensor), and some of the parameters and
            buffers that are not sharded, by names in the model; ``optim`` has under ``"{parameter name}/{state key}"``
            the optimizer state of these rows and of some parameters that are not sharded; where an optimizer steps on
            whole tensors, ``optim`` has the state of those whole tensors that this rank updates, in place of the rows'
            state; ``workers`` has the buffers of each logical worker of this rank under ``"{index of the
            worker}/{buffer name}"``, and is empty for N = 1; of ranks that share a worker only the first has its
            buffers. Copies of the same rows (HSDP) and unsharded tensors are shared out by name over the ranks that
            hold them, so that each is written once. Only the merged buffers are new tensors for N > 1; all others share
            memory with the live tensors, which the next step changes, so the caller writes or copies them before it.

        Raises:
            UsageError: this rank computes several logical workers, and the script has written a buffer that forwards
                write too, other than by a reset to zeros, or to ones for a variance: each worker has its own value of
                it.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        comm, copies = self._run_context.comms.replica, self._copies
        buffers = self._buffers.merged()
        fixed = {name: p.data for name, p in self._fixed.items()}
        whole = written({**fixed, **buffers}, self._replica, comm)
        # The ranks with the same rows share out their names, so that each row is written once.
        chosen = mine_of({rows.name: rows.parameter.data for rows in self._rows}, copies.rank, copies.size)
        mine = [rows for rows in self._rows if rows.name in chosen and rows.name not in self._replica.not_owned]
        slices = {rows.name: rows.tensor_slice(rows.parameter.data) for rows in mine}
        model = {**whole, **{name: part for name, part in slices.items() if part is not None}}
        return {"model": model, "optim": self._optimizer_state(mine), "workers": self._buffers.state()}

    def load(self, saved: SavedState) -> None:
        """Restore the parameters, optimizer state and buffers of the sharded model from a checkpoint, in place.

        Called on all ranks. Each rank reads only its rows of the sharded tensors. ZeRO stage 1 then all-gathers the
        full parameters over the shard ranks (those that hold one copy of the parameters together); with FSDP2 the call
        is not collective, and the next forward all-gathers. The optimizer state of frozen parameters is restored too,
        because the script may unfreeze them. Parameters without saved optimizer state keep the state that they have.

        Args:
            saved: the checkpoint, written by a run with any strategy and any number of ranks.

        Raises:
            CheckpointError: the checkpoint lacks a tensor of the model, or one of its files is damaged.
            PeerError: in the all-gather of ZeRO stage 1, a rank is lost, or does not take part within the timeout.
        """
        for rows in self._rows:
            rows.parameter.data.copy_(rows.read(saved, "model", rows.known(saved.names("model"))))
        for name, parameter in self._fixed.items():
            parameter.data.copy_(read_local(saved, "model", name, self._replica, parameter.shape))
        self._gather()
        self._buffers.load(saved)
        if self._optimizer:
            whole = self._whole
            # The state of frozen rows too, because the script may unfreeze them.
            rows_here = [rows for rows in self._rows if whole is None or not whole.gathers(rows.parameter)]
            uncut = self._uncut_members(self._optimizer)
            with self._updating([*(rows.parameter for rows in self._rows), *(p for _, p in uncut)]):
                load_optimizer_rows(self._optimizer, rows_here, saved)
                load_optimizer(self._optimizer, uncut, saved, "optim", specs=self._slices)
                if whole is not None:
                    named, specs = [(rows.name, rows.parameter) for rows in self._trained], self._replica.specs
                    whole.load(named, saved, specs)

    def own_gradients(self) -> OwnGradients:
        """Return where this rank's own gradients are before the reduce-scatter, for measuring the gradient noise scale.

        Parameters that another rank of the replica counts in the gradient norm (weights tied over pipeline stages) are
        left out. Not collective.

        Returns:
            An ``OwnGradients``. Its ``parameters`` is a list of the trained parameters in whose ``.grad`` backward
            leaves this rank's own gradient (ZeRO stage 1; empty where FSDP2 shards all). Its ``take_squares`` is None
            in ZeRO stage 1. Where FSDP2 reduces gradients within backward, ``take_squares`` is a function without
            arguments, which returns the sum of squares of the elements of this rank's own gradients since its previous
            call, and resets the sum. This call starts that measurement. In ZeRO stage 1 of one copy of a whole model
            its ``slices`` returns the rows that this rank updates, whose state ``optimizers`` have.
        """
        not_owned = self._replica.not_owned
        counted: list[nn.Parameter] = []
        names: list[str] = []
        meters = []
        for engine in self._engines:
            meter = engine.gradient_meter()
            if meter is not None:
                meters.append(meter)
                continue
            pairs = list(zip(engine.trained, engine.script_parameters(), strict=True))
            counted += [seen for rows, seen in pairs if seen.requires_grad and rows.name not in not_owned]
            names += [rows.name for rows, seen in pairs if seen.requires_grad and rows.name not in not_owned]
        if not meters and self._run_context.comms.model.size == self._copies.size == 1:
            return OwnGradients(counted, optimizers=self.optimizers, names=names, slices=self._updated_slices)
        if not meters:
            return OwnGradients(counted)
        return OwnGradients(counted, lambda: sum(meter() for meter in meters))

    def _updated_slices(self) -> list[UpdatedSlice]:
        return [UpdatedSlice(rows.name, rows.parameter, rows.tensor_slice) for rows in self._trained]

    def facts(self) -> dict[str, object]:
        """Return an empty dict: sharded data parallelism adds no entries to the run's ``summary.json``."""
        return {}

    # --- custom training loops -------------------------------------------------------------------------------------

    @property
    def gradient_at(self) -> GradientPlace:
        """Place of a parameter's complete gradient after the reduction, as one of four words.

        ``rank``: whole on this rank, with a single shard. ``rows`` (ZeRO stage 1): in rows over the shard ranks, in the
        ``.grad`` of the optimizer's parameters, not of the model's. ``shards`` (FSDP2): in the ``.grad`` of the model's
        DTensors. ``sliced_rows``: with tensor parallelism, split over tensor ranks, each slice in rows over the shard
        ranks.
        """
        if self._run_context.mesh.tensor > 1:
            return "sliced_rows"
        if self._shards.size == 1:
            return "rank"
        return "rows" if self._config.stage == 1 else "shards"

    def begin_custom_loop(self) -> None:
        """Prepare for a custom training loop, in which a script may clear ``.grad`` between a forward and its backward.

        With FSDP2 the model then has other parameter objects, its unsharded ones. From now on, clearing their ``.grad``
        also clears the sharded gradient. ZeRO stage 1 needs no preparation for gradients. Not collective.

        The call also changes the rule for module buffers that the script writes, as ``AllReduceSync.begin_custom_loop``
        says: until ``leave_custom_loop`` the rank's last logical worker alone takes the script's value.
        """
        self._buffers.begin_custom_loop()
        if self._reads is not None:
            from tutti.parallel.fsdp.fsdp_wrap_policy import root_modules

            self._reads.stay([root for part in self._replica.parts for root in root_modules(part)])
        for engine in self._engines:
            engine.begin_custom_loop()

    def leave_custom_loop(self) -> None:
        """Refuse the script's writes to module buffers again, by the rule of ``CustomLoopSync``. Not collective."""
        self._buffers.leave_custom_loop()

    def named_trained(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return the trained parameters of the user's model as a list of (name, parameter).

        The parameter objects are DTensors with FSDP2, full parameters with ZeRO stage 1; never the rows that the
        optimizer has. Parameters that the script has unfrozen after a forward of this step, not yet sharded, come last.
        """
        return [*((rows.name, seen) for rows, seen in self._pairs()), *self._uncut]

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trained parameters of the user's model: DTensors with FSDP2, full parameters with ZeRO stage 1.

        The order is that of ``named_trained()``. Parameters that the script has unfrozen after a forward of this step,
        not yet sharded, come last.
        """
        return [
            *(seen for engine in self._engines for seen in engine.script_parameters()),
            *(p for _, p in self._uncut),
        ]

    def _pairs(self) -> list[tuple[ShardedParameter, nn.Parameter]]:
        """Return the trained rows, each with the parameter that the script's model has in its place."""
        seen = (seen for engine in self._engines for seen in engine.script_parameters())
        return list(zip(self._trained, seen, strict=True))

    def script_parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the trained parameters of the user's model whose rows ``optimizer`` updates on this rank.

        Args:
            optimizer: an optimizer whose parameter groups hold this rank's rows.

        Returns:
            The model's parameter objects in the order of ``script_parameters()``: DTensors with FSDP2, full parameters
            with ZeRO stage 1.
        """
        own = {p for group in optimizer.param_groups for p in group["params"]}
        uncut = [p for _, p in self._uncut if p in own]
        return [*(seen for rows, seen in self._pairs() if rows.parameter in own or seen in own), *uncut]

    def trained_tensors(self) -> list[Tensor]:
        """Return this rank's rows of all trained parameters, which the optimizers update, as detached tensors.

        The result is a list in the order of ``named_trained()``; the tensors share memory with the rows. A parameter
        that is not yet sharded, because the script has unfrozen it after a forward of this step, is there in full, at
        the end.
        """
        return [*(rows.parameter.data for rows in self._trained), *(p.data for _, p in self._uncut)]

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the reduced gradients of this rank's rows of the trained parameters, and set their ``.grad`` to None.

        Each shard rank holds some rows of every parameter. The ``.grad`` of the model's parameters is None afterwards,
        too. Not collective.

        Returns:
            The gradients of this rank's rows, with FSDP2 copies; the key is the optimizer's parameter, that is the
            tensor of rows. Rows without a gradient, also where the script has set the gradient to None, have no entry.
        """
        return {p: gradient for engine in self._engines for p, gradient in engine.pop_gradients().items()}

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier backwards to this rank's rows of the gradients just reduced (gradient accumulation).

        Not collective. Sets the attribute ``accumulated`` to whether ``held`` has gradients. Afterwards the script
        finds the sums in ``.grad``, of DTensors with FSDP2 and of full parameters in ZeRO stage 1: some of these are
        placeholders, with which a script can compute as ``ShardingEngine.add_gradients`` describes.

        Args:
            held: the earlier gradients as ``pop_gradients`` returned them: the key is the optimizer's parameter (the
                tensor of rows), the value its gradient. May be empty.
        """
        self.accumulated = bool(held)
        for engine in self._engines:
            engine.add_gradients(held)

    def pop_reached(self) -> list[bool]:
        """Return for each trained parameter whether an FSDP2 backward on this rank gave it a gradient.

        A custom training loop that sets the gradients of a micro-batch aside keeps these flags with them, for
        ``mark_reached``. The record covers the backwards since the previous call of this method or of
        ``reduce_gradients``, and this call clears it. Not collective.

        Returns:
            One bool for each parameter in ``script_parameters()`` that is sharded, in order. Always False for
            parameters that ZeRO stage 1 shards, for which there is no record: backward has given them a gradient if
            their ``.grad`` is not None.
        """
        return [flag for engine in self._engines for flag in engine.pop_reached()]

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Record that an FSDP2 backward gave parameters a gradient here, for the next reduction to count them.

        Called when a custom training loop puts gradients back that it had set aside, with the flags of ``pop_reached``.
        The reduction sets ``.grad`` to None for each parameter that no rank has recorded. Without effect on parameters
        of ZeRO stage 1. Not collective.

        Args:
            used: a flag for each trained parameter that is sharded, in the order of ``script_parameters()``: True
                records a gradient, False leaves the record as it is.
        """
        rest = list(used)
        for engine in self._engines:
            count = len(engine.script_parameters())
            engine.mark_reached(rest[:count])
            rest = rest[count:]

    def apply_clearing(self) -> None:
        """Clear the sharded gradients of parameters whose ``.grad`` the script has cleared after a forward.

        Between a forward and its backward, FSDP2's model has unsharded parameters, whose ``.grad`` are placeholders
        from ``show_gradients``. Where the script has set a placeholder to None or zeros, the sharded gradient becomes
        so too. All placeholders are removed. ZeRO stage 1 does nothing.
        """
        for engine in self._engines:
            engine.apply_clearing()

    def show_gradients(self) -> None:
        """Put placeholders into the ``.grad`` of FSDP2's unsharded parameters whose sharded gradient is not None.

        The unsharded parameters are in the model between a forward and its backward. A placeholder raises UsageError
        when the script reads it; the script can clear it, which ``apply_clearing`` carries over to the sharded
        gradient. With ZeRO stage 1 this does nothing.
        """
        for engine in self._engines:
            engine.show_gradients()

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Set the ``.grad`` of this rank's rows to the gradients that the script has left in the model's parameters.

        Called before the optimizer step, which uses the rows and their ``.grad``. Where the script has cleared the
        gradient, the rows' gradient becomes None or zeros; where it has assigned a tensor, this rank's part of the
        tensor; where it has edited in place, the edited values. Not collective.

        Args:
            edited: the model's parameters whose ``.grad`` the script has edited, or replaced by another tensor;
                parameters that the script has only cleared need not be among them.
        """
        for engine in self._engines:
            engine.apply_edits(edited)

    def on_zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Clear the ``.grad`` of the user's model for the parameters whose rows belong to ``optimizer``.

        Called after ``optimizer.zero_grad()``, which has cleared the gradients of the rows. Not collective.

        Args:
            optimizer: the script's optimizer, whose parameters are this rank's rows.
            set_to_none: True sets gradients to None, False zeroes them in place.
        """
        own = {p for group in optimizer.param_groups for p in group["params"]}
        for engine in self._engines:
            engine.on_zero_grad(own, set_to_none)

    def norm_of(self, members: Sequence[nn.Parameter], step_context: StepContext) -> float:
        """Return the L2 norm of the complete gradients of some parameters, for a script that clips them.

        Collective: an all-reduce over the shard ranks, and one over the stages and tensor ranks of a replica. Called
        after ``reduce_gradients``, on all of these ranks.

        Args:
            members: some of ``script_parameters()``, the trained parameters as the model has them; the same on all
                ranks. Parameters without gradient count as 0.
            step_context: facts of the step under way; the ranks of a replica compare its number.

        Returns:
            The norm over the ranks' rows together, a Python float, equal on all ranks.

        Raises:
            MismatchError: the ranks of a replica are in different steps.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        own = set(members)
        pairs = self._pairs()
        not_owned = self._replica.not_owned
        counted = [rows.parameter.grad for rows, seen in pairs if seen in own and rows.name not in not_owned]
        square = torch.tensor([sum(squares_of([g for g in counted if g is not None]))], dtype=torch.float64)
        there = square.to(self._shards.device)
        self._shards.start_all_reduce(
            there, f"all_reduce of the gradient norm in step {step_context.local_step + 1}"
        ).wait()
        whole, _ = norm_across_model(self._run_context.comms.model, float(there), False, step_context)
        return math.sqrt(whole)

    @contextmanager
    def stepping(self, index: int | None, members: Sequence[nn.Parameter]) -> Iterator[None]:
        """Return a context that restricts ``optimizer_step`` to one of several optimizers, in clipping and stepping.

        Args:
            index: position of the optimizer among those of the script, from 0; None for all of them.
            members: the parameters of the model that this optimizer trains, whose gradients are clipped; ignored where
                ``index`` is None.
        """
        with acting(self._optimizer, index):
            self._acting_on = None if index is None else members
            try:
                yield
            finally:
                self._acting_on = None

    def clip_gradients(self, norm: float) -> float:
        """Scale this rank's rows of the gradients so that the whole norm is at most the run's clipping norm.

        Within ``stepping`` of one optimizer only the gradients of that optimizer are scaled. Not collective. Does
        nothing in a run without a clipping norm.

        Args:
            norm: L2 norm of the gradients that are to be scaled, over all ranks' rows; equal on all ranks.

        Returns:
            The norm afterwards.
        """
        return clip_norm(norm, self._run_context.clip, lambda factor: scale_all(self._gradients(), factor))

    def steps_whole(self, optimizer: Optimizer) -> bool:
        """Return whether this strategy steps ``optimizer``, and the optimizer updates full parameters on this rank.

        Only then may its step have a closure. True only for an optimizer that the strategy has built, on one shard
        (parameters are not cut into rows) and without CPU offload.

        Args:
            optimizer: any optimizer, such as one that the script steps by itself.
        """
        if self._config.offload:
            return False
        return self._shards.size == 1 and any(optimizer is own for own in members_of(self._optimizer))

    def adopt(self, optimizer: Optimizer) -> None:
        """Replace parameters of the user's model by this rank's rows in the groups of ``optimizer``, in place.

        The optimizer of a sharded model updates this rank's rows of each parameter. Called after the script has added
        groups with ``add_param_group``; DTensors (FSDP2) and full parameters (ZeRO stage 1) in the groups become the
        tensors of rows. Parameters that are not sharded stay. Not collective.

        Args:
            optimizer: the script's optimizer, with the new groups.

        Raises:
            UsageError: an optimizer steps on whole tensors, gathered from the ranks' rows, and the script has added a
                parameter to it.
        """
        own = {shown: rows for engine in self._engines for shown, rows in engine.owners().items()}
        for group in optimizer.param_groups:
            group["params"] = [own.get(p, p) for p in group["params"]]
        if self._whole is not None:
            self._whole.check_members(self._named)

    def reattach(self, names: Sequence[str], late: bool = False) -> None:
        """Train the parameters that the script has unfrozen: cut unsharded ones into rows, and reduce their gradients.

        Unsharded are parameters that were frozen when ZeRO stage 1 sharded the model, and in stages 2 and 3 parameters
        that FSDP2 did not take; FSDP2 has sharded all others, frozen ones included, and now reduces their gradients.
        Where a parameter is cut, a new object takes its place in the model, with its ``.grad``; the original object,
        which the optimizer has, becomes this rank's rows. Parameters without elements stay whole. Collective over the
        data ranks: an all-gather that compares which parameters are trainable, and with FSDP2, after its first forward,
        all-gathers of the wrapped modules' parameters over the shard ranks.

        Args:
            names: names of parameters whose ``requires_grad`` the script has set to True since the previous
                ``reattach``; at least one.
            late: True if a forward of this step has already used these parameters; unsharded ones are then cut after
                the step's backward, in ``reduce_gradients``.

        Raises:
            UsageError: the optimizer steps on whole tensors, gathered from the ranks' rows; parameters cannot be added
                to such an optimizer.
            MismatchError: ranks have unfrozen different parameters.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        if self._whole is not None:
            refuse_growth(self._optimizer, names[0])
        agree_on_state(self._run_context.comms.replica, self._replica.parts)
        wanted = set(names)
        for engine in self._engines:
            engine.train(wanted)
        self._index()
        new = [(name, p) for name, p in self._fixed.items() if name in wanted and p.numel()]
        if late:
            # This step's forward used the uncut parameters: cut them after its backward.
            self._uncut += new
        elif new:
            self._cut(new)

    def _cut(self, new: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Cut further parameters into rows; their whole gradients move to the model's new parameters."""
        gradients = [p.grad for _, p in new]
        for _, parameter in new:
            parameter.grad = None
        sliced = ZeroSharding(new, self._replica.parts, self._slices, self._shards)
        for seen, gradient in zip(sliced.script_parameters(), gradients, strict=True):
            seen.grad = gradient
        self._replica.replaced(sliced.replaced)
        self._engines.append(sliced)
        self._index()
        if self._optimizer is not None:
            # Whole tensors are made by the optimizer's constructor, slices of them are loaded from a checkpoint.
            cut_state(self._optimizer, {rows.parameter: rows.spec for rows in sliced.rows})
            cut_state(self._optimizer, {rows.parameter: self._within_slice(rows) for rows in sliced.rows})

    def _within_slice(self, rows: ShardedParameter) -> ShardSpec:
        """Return the place of this rank's rows in the tensor that they are cut from."""
        whole = ShardSpec(rows.local, (0,) * len(rows.local))
        return local_rows(rows.name, rows.parameter, whole, rows.local, self._shards).spec

    def _optimizer_state(self, mine: Sequence[ShardedParameter]) -> dict[str, Tensor | TensorSlice]:
        """Return the tensors of the optimizer's state that this rank writes; ``mine``: the rows that it writes."""
        optimizer, whole = self._optimizer, self._whole
        if optimizer is None:
            return {}
        cut = [rows for rows in mine if whole is None or not whole.gathers(rows.parameter)]
        found = optimizer_slices(optimizer, cut, self._shards.rank == 0)
        if whole is not None:
            found |= whole.tensors([(rows.name, rows.parameter) for rows in mine])
        uncut = self._uncut_members(optimizer)
        shapes, comm = {name: tuple(p.shape) for name, p in uncut}, self._run_context.comms.replica
        return found | written(optimizer_tensors(optimizer, uncut), self._replica, comm, shapes)

    def _uncut_members(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        """Return the optimizer's parameters that are not cut into rows, such as parameters that were always frozen."""
        members = {p for group in optimizer.param_groups for p in group["params"]}
        return [(name, p) for name, p in self._fixed.items() if p in members]

    def _gradients(self) -> list[Tensor]:
        if self._acting_on is not None:
            chosen, pairs = set(self._acting_on), self._pairs()
            return [r.parameter.grad for r, seen in pairs if seen in chosen and r.parameter.grad is not None]
        return [rows.parameter.grad for rows in self._trained if rows.parameter.grad is not None]

    def _counted(self) -> list[Tensor]:
        """Return the gradients that this rank counts in the norm: without ``not_owned`` tensors of the replica."""
        counted = [rows.parameter for rows in self._trained if rows.name not in self._replica.not_owned]
        return [p.grad for p in counted if p.grad is not None]

    def _sum_over_copies(self, step_context: StepContext) -> None:
        """All-reduce the rows' gradients over the ranks that hold the same rows (HSDP), once for each dtype."""
        if self._copies.size == 1:
            return
        for rows in self._trained:
            if rows.parameter.grad is None:
                rows.parameter.grad = torch.zeros_like(rows.parameter)
        for dtype in sorted({rows.parameter.dtype for rows in self._trained}, key=str):
            gradients = [g for g in self._gradients() if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in gradients])
            self._copies.start_all_reduce(
                flat, f"sum of gradients over copies in step {step_context.local_step + 1}"
            ).wait()
            views = [v.view_as(g) for v, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)]
            foreach_copy_(gradients, views)

    def _share_copies(self) -> None:
        """Make gradients of a replica's copies of rows equal, where rounding may differ. Collective there.

        Copies are tied weights on several stages and unsplit tensors on tensor ranks. On CPUs backwards are
        deterministic, and only sums over more than two copies (HSDP) are added in an order that depends on a tensor's
        place in the message.
        """
        comms, specs = self._run_context.comms, self._replica.specs
        if self._copies.size > 2:
            for comm, copied in self._replica.stage_copies:
                share_gradients(copied, comm)
        if self._run_context.mesh.tensor > 1 and (self._copies.size > 2 or is_accelerator(comms.world.device)):
            whole = [rows.parameter for rows in self._trained if tuple(rows.local) == tuple(specs[rows.name].shape)]
            share_gradients(whole, comms.axis("tensor"))

    def _agree(
        self, step_context: StepContext, loss_sums: Tensor | None, used: Sequence[bool]
    ) -> tuple[ReducedSums, float]:
        """Sum loss sums, used flags and the squared gradient norm over all data ranks.

        Collective: one all-reduce. Raises MismatchError where ranks are in different steps.

        Args:
            step_context: facts of the step under way, such as its number and loss scale.
            loss_sums: ``LossSums.sums`` of this rank; None for no samples.
            used: for each trained parameter whether it had a gradient here.
        """
        comm = self._run_context.comms.replica
        # All copies (HSDP) have the same gradient: count the first one's only.
        square = sum(squares_of(self._counted())) if self._copies.rank == 0 else 0.0
        message = torch.zeros(self._tail.size + 1, dtype=torch.float64, device=comm.device)
        self._tail.fill(message[:-1], step_context, loss_sums, used)
        message[-1] = square
        with same_modules(text := f"all_reduce of loss sums in step {step_context.local_step + 1}"):
            comm.sum_in_place(message, text)
        numbers = message.tolist()
        if not self._tail.same(numbers, step_context, comm.size):
            refuse_mismatch(comm, step_context)
        return self._tail.read(numbers[: self._tail.size]), numbers[-1]

    def _all_finite(self) -> bool:
        """Return whether every gradient element is finite; called where the norm is not. Collective: an all-reduce.

        False without a look at the elements, and without the all-reduce, where a replica lives on several ranks.
        """
        if self._run_context.comms.model.size > 1:
            return False
        bad = torch.zeros(1, device=self._run_context.comms.replica.device)
        bad += sum(not is_finite(g) for g in self._gradients())
        self._run_context.comms.replica.start_all_reduce(bad, "all_reduce of what is not finite").wait()
        return not bool(bad)
