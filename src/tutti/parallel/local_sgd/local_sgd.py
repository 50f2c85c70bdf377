"""Local SGD: each logical worker trains its own copy of the parameters; every H steps the copies are averaged.

Stich 2019, arXiv 1805.09767. With H = 1 and plain SGD it is synchronous data parallelism. Momentum and other optimizer
state stay with the worker. Memory: parameters and optimizer state once a worker, not once a device.

Post-local SGD (Lin et al. 2018, arXiv 1808.07217) begins with synchronous steps: every worker makes the update of the
whole global batch, on its own copy and with its own optimizer, so that all copies are equal until the local steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import load_optimizer, mine_of, optimizer_tensors, read_local, stored_name
from tutti.comm.tree_sum import TreeSum
from tutti.config.sync_config import LocalSGDConfig
from tutti.errors import UsageError
from tutti.nn.swap import parameters
from tutti.optim.mixing_rules import agreed_mixing, refuse_exchanges
from tutti.optim.several import slots
from tutti.parallel.ddp.buckets import METRICS
from tutti.parallel.ddp.gradient_arithmetic import scale_all
from tutti.parallel.ddp.optimizer_step import gather_nonfinite_names, optimizer_step
from tutti.parallel.ddp.reducers import Reducer, TreeReducer
from tutti.parallel.ddp.sparse_gradients import with_sparse_gradients
from tutti.parallel.ddp.step_agreement import DIGESTS, digests, digests_agree, refuse_mismatch
from tutti.parallel.ddp.sync_module_states import agree_on_state, broadcast_state
from tutti.parallel.ddp.worker_buffers import WorkerBuffers
from tutti.parallel.ddp.write_guard import WriteGuard
from tutti.parallel.local_sgd.local_gradients import LocalGradients
from tutti.parallel.loss_stats import LossCounter
from tutti.parallel.normalisation import clip_norm, finite_by_norm, is_finite, nonfinite_names, own_mean, own_sum
from tutti.torch_compat import foreach_copy_, tensor_version
from tutti.types.gradient_sync import OwnGradients
from tutti.types.micro_batch import LossSums
from tutti.types.optimizer_protocols import OptimizerFactory
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner, SilentHook
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.step_records import StepContext, StepStats, UpdateResult

OUTER, _PARAMETER = "outer", "/parameter/"

STEP_SUMS = 6 + METRICS + DIGESTS
"""Numbers that all workers add up in each local step, in float64: loss sums, norms, flags and digests."""


class LocalSGDSync(LocalGradients):
    """Local SGD: each logical worker steps its own copy of the parameters; the copies are averaged every H steps.

    Stich 2019, arXiv 1805.09767. Logical workers are N fixed shares of the global batch; a rank computes one or more of
    them. Inner updates are made in ``end_worker``, averages in ``reduce_gradients``. With post-local SGD the first
    steps are synchronous: all copies make the same update with the gradient of the whole global batch. Sums over
    workers go through a fixed summation tree: the same bits for any number of ranks.

    Args:
        config: options of the strategy: steps between averages, and length of the synchronous phase.
        run_context: communicators and settings of the run.

    Attributes:
        loss_normalisation: ``"worker"``: a worker's gradient is the mean over its own samples.
        shares_parameters: whether other ranks write into the memory of this rank's parameters; False here.
        optimizers: one optimizer for each of this rank's workers, in their order, set by ``attach``; empty where
            nothing is trained.
    """

    loss_normalisation: Literal["step", "worker"] = "worker"
    shares_parameters: bool = False

    def __init__(self, config: LocalSGDConfig, run_context: RunContext) -> None:
        self._period, self._run_context = config.period, run_context
        self._joint_steps = int(config.together.value)
        self._counting = LossCounter()
        self._nonfinite: dict[str, None] = {}
        self._equal, self._has_differed = True, False
        self._averaged: dict[str, int] = {}  # version counters of parameters after the last average, by name

    def attach(self, replica: ReplicaRunner, make_optimizer: OptimizerFactory) -> GradientReadyHook:
        """Make a copy of the trained parameters and an optimizer for each logical worker of this rank (local SGD).

        A logical worker is one of N fixed shares of the global batch; a rank computes one or more. Before the copies
        are made, all data ranks compare the model's names, shapes and dtypes, and rank 0 broadcasts its values. Trial
        steps of the optimizer on small tensors of their own are compared by an all-gather. Collective over the data
        ranks. The model's parameters stay the copy of this rank's first worker.

        Args:
            replica: the model on this rank, with its runner.
            make_optimizer: called once for each worker of this rank with a list of (name, parameter) of all parameters
                of the model, the same objects for every worker; returns that worker's optimizer, or None where there is
                nothing to train.

        Returns:
            A gradient-ready hook that does nothing: each worker's gradients are used by its own optimizer.

        Raises:
            MismatchError: ranks hold models with different parameters or buffers.
            UsageError: a step of the optimizer draws from PyTorch's global random generator.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        comm, mine = self._run_context.comms.replica, self._run_context.mine
        agree_on_state(comm, replica.parts)
        broadcast_state(comm, replica.parts)
        self._named = parameters(replica.parts)
        self._trained = [(name, p) for name, p in self._named if p.requires_grad]
        self._copies = {w: [p.data if w == mine[0] else p.data.clone() for _, p in self._trained] for w in mine}
        made = {w: make_optimizer(self._named) for w in mine}
        self._optimizer_of = {w: optimizer for w, optimizer in made.items() if optimizer is not None}
        for member in slots(next(iter(self._optimizer_of.values()), None)):
            refuse_exchanges(member, agreed_mixing(member, self._run_context))
        self.optimizers: Sequence[Optimizer] = tuple(self._optimizer_of.values())
        self._buffers = WorkerBuffers(replica.parts, self._run_context)
        workers = self._run_context.workers
        self._replica, self._make_optimizer = replica, make_optimizer
        self._loaded_worker = mine[0] if len(mine) else -1
        self._guard = WriteGuard(
            "the model holds one of this rank's workers, and the others have parameters of their own"
        )
        self._frozen_guard = WriteGuard("the workers of a rank share it")
        self._note()
        self._note_frozen()
        self._make_sums()
        self._step_sums = TreeSum(comm, workers, STEP_SUMS, torch.float64)
        return SilentHook()

    def begin_worker(self, worker: int, step_context: StepContext) -> None:
        """Put a logical worker's own parameters and buffers into the model, before its forwards. Not collective.

        A logical worker is one of N fixed shares of the global batch, with its own copy of the parameters in local SGD.
        The parameters' ``.data`` becomes that copy's memory, so that no values are copied.

        Args:
            worker: index of the logical worker, one of this rank's.
            step_context: the step under way; kept for ``end_worker``, which divides by its loss scale and multiplies
                the initial learning rate by its ``lr_factor``.

        Raises:
            UsageError: this rank has several workers, and the script has written parameters since the last update, or a
                buffer that forwards write too, other than by a reset to zeros, or to ones for a variance (each worker
                has its own value of it). The write would change one worker's copy only.
        """
        self._step_context = step_context
        if worker == self._run_context.mine[0]:
            self._check_frozen(f"step {step_context.local_step + 1}", self._frozen_guard.written_cheaply)
            self._check_masks(f"step {step_context.local_step + 1}")
        alone = self._jointly(step_context) is None
        self._equal, self._has_differed = self._equal and not alone, self._has_differed or alone
        self._take_written(f"step {step_context.local_step + 1}")
        self._buffers.enter(worker)
        self._put(worker)

    def end_worker(self, worker: int, part: LossSums | None) -> None:
        """Step a logical worker's own optimizer with the clipped gradient; skip the step if the gradient is not finite.

        A logical worker is one of N fixed shares of the global batch. The gradient is that of the mean loss over the
        worker's own samples or tokens. In a synchronous step (the first ones of post-local SGD) no optimizer steps
        here: the gradient is added to the sum over all workers. Loss sums are added up for ``reduce_gradients`` in both
        cases. Not collective. Called after the worker's last backward; in a local step all ``.grad`` are None
        afterwards.

        Args:
            worker: index of the logical worker, the one given to ``begin_worker`` before.
            part: the worker's sums of loss, count and metrics over its samples in this step; None if the worker had no
                samples: then its optimizer does not step.

        Raises:
            UsageError: a gradient is sparse, and the optimizer does not take sparse gradients; in a synchronous step, a
                gradient is sparse although no module that holds the parameter has an attribute ``sparse`` that is True;
                or, on an accelerator, this rank has several workers, and the script has written a buffer of which each
                worker has its own value, such as running statistics of batch norm, other than to reset it.
        """
        self._take_assigned(worker)
        if (reducer := self._jointly(self._step_context)) is not None:
            self._contribute(reducer, worker, part)
            return
        norm = self._make_own(part)
        if part is not None and finite_by_norm(norm):
            gradients = [p.grad for _, p in self._trained if p.grad is not None]
            left = clip_norm(norm, self._run_context.clip, partial(scale_all, gradients))
            optimizer_step(self._optimizer_of[worker], self._step_context.lr_factor, left)
        for _, parameter in self._trained:
            parameter.grad = None
        self._note()
        self._tell(worker, part, norm)

    def end_own(self, worker: int, part: LossSums | None) -> None:
        """Scale ``.grad`` to the gradient of the mean over the worker's own samples, and add up the worker's loss sums.

        A custom training loop, which has one logical worker a rank (fixed share of the global batch), calls this after
        the worker's last backward in a local step, one for which ``is_local_step`` is True, in place of ``end_worker``;
        in the synchronous steps of post-local SGD it calls ``end_worker``. ``reduce_losses`` adds up the loss sums over
        ranks. Divides ``.grad``, in which the worker's backwards have accumulated, in place by the worker's count of
        samples or tokens and by the loss scale. Nothing is clipped or stepped: the script reads the gradient, and its
        optimizer's step becomes ``step_own``. Not collective.

        Args:
            worker: index of the logical worker, the one given to ``begin_worker`` before.
            part: the worker's sums of loss, count and metrics; None if the worker has no samples in this step: then
                ``.grad`` stays, and the worker counts nothing in the means.
        """
        self._tell(worker, part, self._make_own(part))

    def _make_own(self, part: LossSums | None) -> float:
        """Scale ``.grad`` to the mean over a worker's own samples, and return its norm; 0 for a worker without any."""
        if part is None:
            return 0.0
        gradients = [p.grad for _, p in self._trained if p.grad is not None]
        norm = own_mean(gradients, part, self._step_context.loss_scale)
        self._buffers.verify()
        if not finite_by_norm(norm):
            self._nonfinite |= dict.fromkeys(nonfinite_names((name, p.grad) for name, p in self._trained))
        return norm

    def _tell(self, worker: int, part: LossSums | None, norm: float) -> None:
        """Add a worker's loss sums and the norm of its gradient to the sums over all workers."""
        bad = not finite_by_norm(norm)
        message = torch.zeros(STEP_SUMS, dtype=torch.float64)
        message[:4] = torch.tensor([0.0 if bad else norm, bad, part is not None, self._step_context.stop])
        if part is not None:
            self._counting.note(part)
            message[4 : 4 + len(part.sums)] = part.sums.double().cpu()
        message[-DIGESTS:] = torch.tensor(digests(self._step_context))
        self._step_sums.add(worker, message)

    def reduce_gradients(self, step_context: StepContext) -> StepStats:
        """Sum the loss sums of all logical workers and, in every H-th step, average the workers' parameters.

        A logical worker is one of N fixed shares of the global batch; local SGD averages every H steps. Collective over
        the data ranks: for each sum over workers (loss sums in each step, parameters of each dtype in an averaging one)
        an all-to-all and an all-gather; and in an averaging step of a model with frozen parameters an all-gather of
        names. In a synchronous step (the first ones of post-local SGD) the gradients are summed instead, and divided by
        the global count.

        Args:
            step_context: the step under way: its number decides whether the step is synchronous and whether parameters
                are averaged, and is compared over the ranks, as its batch size is.

        Returns:
            A ``StepStats``, equal on all ranks, with the attributes ``loss`` and ``metrics`` (by name), means over all
            workers' samples or tokens; ``count``, their number; ``grad_norm``, the gradient's L2 norm before clipping
            (in a local step the mean of the norms of the workers with finite gradients); ``finite``, whether all
            gradients are finite; and ``stop``, whether a rank asks to stop.

        Raises:
            MismatchError: ranks are in different steps.
            UsageError: this rank has several workers, and the script has written a frozen parameter while the workers'
                parameters differ; or, on an accelerator, this rank has several workers, and the script has written a
                buffer that forwards write too, other than by a reset to zeros, or to ones for a variance (each worker
                has its own value of it).
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        self._buffers.finish()
        if (reducer := self._jointly(step_context)) is not None:
            return self._together(reducer, step_context)
        stats = self.reduce_losses(step_context)
        if self._due(step_context):
            self._adopt_frozen(f"step {step_context.local_step + 1}")
            self._write(self._average())
        return stats

    def reduce_losses(self, step_context: StepContext) -> StepStats:
        """Return loss, metrics and mean gradient norm of a local step over all logical workers.

        A logical worker is one of N fixed shares of the global batch. Sums the numbers that ``end_worker`` or
        ``end_own`` has noted. Collective over the data ranks: an all-to-all and an all-gather.

        Args:
            step_context: the step under way: its number and batch size are compared over the ranks.

        Returns:
            A ``StepStats``, equal on all ranks, with the attributes ``loss`` and ``metrics`` (by name), means over all
            workers' samples or tokens; ``count``, their number; ``grad_norm``, the mean of the L2 norms, before
            clipping, of the workers with finite gradients; ``finite``, whether all gradients are finite; and ``stop``,
            whether a rank asks to stop.

        Raises:
            MismatchError: ranks are in different steps, or make different calls.
            UsageError: on an accelerator, this rank has several workers, and the script has written a buffer that
                forwards write too, other than by a reset to zeros, or to ones for a variance (each worker has its own
                value of it).
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        norm, bad, active, stop, loss, count, *metrics = self._step_sums.total().tolist()
        self._buffers.verify()
        if not digests_agree(metrics[METRICS:], digests(step_context), self._run_context.workers):
            refuse_mismatch(self._run_context.comms.replica, step_context)
        divisor = count or math.nan
        named = self._counting.means(metrics, divisor)
        return StepStats(loss / divisor, count, named, norm / max(active - bad, 1), finite=bad == 0, stop=stop > 0)

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Report the updates that ``end_worker`` has made already; in a synchronous step, update every worker's copy.

        In local SGD each logical worker (fixed share of the global batch) updates its own copy of the parameters. In
        the first steps of post-local SGD, the synchronous ones, all copies make the same update here. Collective over
        the data ranks only where a gradient was non-finite: an all-gather of the parameters' names.

        Args:
            stats: result of ``reduce_gradients`` in this step: norm of the gradient, and whether the gradient is
                finite.
            step_context: the step under way: its number decides whether the step is synchronous, and its ``lr_factor``
                multiplies the optimizers' initial learning rates.

        Returns:
            An ``UpdateResult``: ``updates`` is 1, or 0 for a synchronous update that was skipped because a gradient was
            not finite; ``skipped`` is True if any worker's update was skipped, and then ``nonfinite`` has the names of
            parameters whose gradient is not finite (of each rank up to three); ``in_sync`` is True in synchronous
            steps and in steps that end with an average of the workers' parameters.

        Raises:
            UsageError: an optimizer does not take sparse gradients (synchronous steps).
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        if not self.is_local_step(step_context):
            return self._update_all(stats, step_context)
        self._equal = self._due(step_context)
        nonfinite: dict[str, None] = {}
        if not stats.finite:
            found, self._nonfinite = "\n".join(list(self._nonfinite)[:3]), {}
            gathered = self._run_context.comms.replica.all_gather_strings(
                found, "names of gradients that are not finite"
            )
            nonfinite = dict.fromkeys(name for text in gathered for name in text.splitlines())
        return UpdateResult(1, skipped=not stats.finite, nonfinite=tuple(nonfinite), in_sync=self._due(step_context))

    def is_local_step(self, step_context: StepContext) -> bool:
        """Return whether each logical worker makes updates of its own in this step; False in synchronous steps.

        A logical worker is one of N fixed shares of the global batch. The first steps of post-local SGD are
        synchronous.

        Args:
            step_context: the step under way.
        """
        return self._jointly(step_context) is None

    def end_step(self, step_context: StepContext) -> bool:
        """Average the workers' parameters if that is due after this step of a custom training loop.

        A worker is a logical worker, one of N fixed shares of the global batch. Collective over the data ranks where
        the average is due (every H-th step): an all-to-all and an all-gather for each dtype of parameters, and an
        all-gather of names if the model has frozen parameters; otherwise nothing is sent. The means are written into
        the workers' parameters in place.

        Args:
            step_context: the step that ends; all its updates have been made.

        Returns:
            Whether the parameters have been averaged.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        due = self._due(step_context)
        if due:
            self._take_written(f"step {step_context.local_step + 1}")
            self._adopt_frozen(f"step {step_context.local_step + 1}")
            self._write(self._average())
        if self.is_local_step(step_context):
            self._equal = due
        return due

    def clear(self) -> None:
        """Set ``.grad`` of all trained parameters of the model on this rank to None. Not collective."""
        for _, parameter in self._trained:
            parameter.grad = None

    def abandon_step(self) -> bool:
        """Return False: training cannot go on after an exception within a step of local SGD.

        Some of the logical workers (fixed shares of the global batch) may have made their own updates in it already.
        (With other strategies True means that the step's gradients were dropped and the next step can begin.)
        """
        return False

    def merged(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of one model, averaged over all logical workers.

        A logical worker is one of N fixed shares of the global batch, with its own parameters and buffers. Trained
        parameters are the mean of the workers' parameters. Batch-norm statistics are pooled over the workers, other
        floating buffers averaged, and of integers the largest is taken. Collective over the data ranks: the sum over
        the workers takes an all-to-all and an all-gather for each dtype, the buffers an all-gather for each dtype, and
        frozen parameters an all-gather of the names of those that the script has written. The workers' own parameters
        stay as they are.

        Returns:
            A dict from names of all parameters and buffers in the model to tensors, with the same bits on every rank.
            Trained parameters, and the buffers with N > 1, are new tensors; parameters that were never trained, and the
            buffers with N = 1, are the model's own.

        Raises:
            UsageError: this rank has several workers, and the script has written parameters since the last update, or a
                buffer that forwards write too, other than by a reset to zeros, or to ones for a variance (each worker
                has its own value of it).
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        self._take_written("after the last step")
        self._check_masks("after the last step")
        self._adopt_frozen("after the last step")
        averages = dict(zip((name for name, _ in self._trained), self._average(), strict=True))
        return {**self._fixed(), **averages, **self._buffers.merged()}

    def replicated(self) -> Mapping[str, Tensor] | None:
        """Return the parameters of which all ranks must hold equal copies. Not collective.

        Between two averages of local SGD each logical worker (share of the global batch) has its own trained
        parameters; right after an average, and in synchronous steps, all are equal. The caller compares digests of the
        tensors over ranks. If this rank has one worker, that worker takes over any ``.data`` that the script has
        assigned.

        Returns:
            A mapping, never None, from names in the model to tensors, not copied. It has the frozen parameters that the
            script has not written, and while all workers are equal also the trained parameters. A trained parameter
            that the script has written after an average is left out: the ``eval()`` of a Schedule-Free optimizer, for
            example, changes each worker's copy by the worker's own optimizer state. Before the first average such
            writes do not count.

        Raises:
            UsageError: this rank has several workers, and the script has written trained parameters since the last
                update, or after the first local step masks of ``torch.nn.utils.prune``, computed from one worker's
                weights.
        """
        self._take_written("after the last step")
        self._check_masks("after the last step")
        first, written = next(iter(self._copies.values())), set(self._frozen_guard.written(self._frozen()))
        trained = {
            name: copy
            for (name, parameter), copy in zip(self._trained, first, strict=True)
            if self._equal and tensor_version(parameter) == self._averaged.get(name, tensor_version(parameter))
        }
        return {**{name: fixed for name, fixed in self._fixed().items() if name not in written}, **trained}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's part of a checkpoint by group: ``model``, ``optim`` and ``workers``.

        In local SGD each logical worker, a fixed share of the global batch, has its own parameters, optimizer and
        buffers. Collective over the data ranks, which average the workers' parameters and buffers for the group
        ``model`` by all-to-alls and all-gathers. Tensors of ``optim`` and ``workers`` are not copied: the next step
        changes them.

        Returns:
            Three groups, each a mapping from names to tensors: ``model`` has some of the parameters and buffers
            averaged over the workers, shared out over the ranks; ``optim`` has, on the rank of worker 0, that worker's
            optimizer state under ``"{parameter name}/{state key}"``, and is empty on other ranks; ``workers`` has, for
            each worker of this rank by its index, ``"{worker}/parameter/{name}"``, ``"{worker}/optimizer/{name}/{state
            key}"`` and the buffers ``"{worker}/{buffer name}"``.

        Raises:
            UsageError: this rank has several workers, and the script has written parameters since the last update, or a
                buffer that forwards write too, other than by a reset to zeros, or to ones for a variance (each worker
                has its own value of it).
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        comm = self._run_context.comms.replica
        self._take_written("after the last step")
        self._check_masks("after the last step")
        self._adopt_frozen("after the last step")
        own: dict[str, Tensor] = dict(self._buffers.state())
        for worker, copies in self._copies.items():
            own |= {f"{worker}{_PARAMETER}{name}": c for (name, _), c in zip(self._trained, copies, strict=True)}
            if worker in self._optimizer_of:
                tensors = optimizer_tensors(self._optimizer_of[worker], self._named)
                own |= {f"{worker}/optimizer/{name}": tensor for name, tensor in tensors.items()}
        first = optimizer_tensors(self._optimizer_of[0], self._named) if 0 in self._optimizer_of else {}
        return {"model": mine_of(self.merged(), comm.rank, comm.size), "optim": first, "workers": own}

    def load(self, saved: SavedState) -> None:
        """Restore every logical worker's parameters, optimizer state and buffers from a checkpoint. Not collective.

        In local SGD each logical worker is a fixed share of the global batch with a model copy of its own. Where the
        checkpoint was saved with another number of workers, or by another strategy, all workers start from the
        parameters and buffers of the group ``model`` (merged over the workers that were saved) and the optimizer state
        of the group ``optim``.

        Args:
            saved: the checkpoint, with the groups ``model``, ``optim`` and ``workers``.

        Raises:
            CheckpointError: the checkpoint lacks a parameter or buffer, or a file of it differs from its manifest.
        """
        names, specs = saved.names("workers"), self._replica.specs
        owners = {entry.partition(_PARAMETER)[0] for entry in names if _PARAMETER in entry} - {OUTER}
        same = owners == {str(worker) for worker in range(self._run_context.workers)}
        self._equal = not same
        # Parameters that were trained before the checkpoint and are frozen now still differ between the workers.
        there = {entry.partition(_PARAMETER)[2] for entry in names}
        before = {name for name in self._fixed() if {name, *specs[name].tied} & there}
        if before:
            self._train(before)
        for name, tensor in self._fixed().items():
            tensor.copy_(read_local(saved, "model", name, self._replica, tensor.shape))
        for worker, copies in self._copies.items():
            for (name, _), copy in zip(self._trained, copies, strict=True):
                own = stored_name(names, name, specs[name], f"{worker}{_PARAMETER}")
                if same and own in names:
                    copy.copy_(saved.get("workers", own))
                else:
                    copy.copy_(read_local(saved, "model", name, self._replica, copy.shape))
            if worker in self._optimizer_of:
                group, prefix = ("workers", f"{worker}/optimizer/") if same else ("optim", "")
                load_optimizer(self._optimizer_of[worker], self._named, saved, group, prefix, specs)
        self._buffers.load(saved)
        self._note()
        self._note_frozen()

    def own_gradients(self) -> OwnGradients:
        """Return the parameters in whose ``.grad`` backward leaves a logical worker's gradient, before its update.

        The gradient noise scale is measured with these gradients. Each worker (share of the global batch) computes with
        its own copy of the parameters, which ``begin_worker`` puts into the model. Not collective.

        Returns:
            An ``OwnGradients``: ``parameters``, the trained parameters; ``optimizer_of``, the optimizer of each worker
            of this rank; and ``equal_before``, which says before which steps all workers have the same parameters.
        """
        trained = [p for _, p in self._trained if p.requires_grad]
        return OwnGradients(trained, optimizer_of=self._optimizer_of, equal_before=self._equal_before)

    def facts(self) -> dict[str, object]:
        """Return the data-parallel collectives that this rank has called so far, for ``summary.json``. Not collective.

        Returns:
            ``{"collectives": {KIND: {"calls": N, "bytes": N}}}``: number of calls and bytes of the tensors, both
            integers, by the kind of collective that was called, such as ``all_to_all`` and ``all_gather``.
        """
        return {"collectives": self._run_context.comms.replica.collective_facts()}

    def adopt(self, optimizer: Optimizer) -> None:
        """Do nothing when the script has added parameter groups to its optimizer.

        In local SGD a rank has one optimizer for each logical worker (share of the global batch); the optimizers of the
        other workers take over the groups of ``optimizer`` without this call.

        Args:
            optimizer: unused; the script's optimizer, with the new groups.
        """

    def reattach(self, names: Sequence[str], late: bool = False) -> None:
        """Train parameters that were frozen: give each logical worker its own copy of them (local SGD).

        A logical worker is one of N fixed shares of the global batch. Also builds the optimizer of a worker that had
        nothing to train before. Collective over the data ranks: an all-gather of digests of the names, shapes, dtypes
        and ``requires_grad`` of the model's parameters and buffers, which the ranks compare.

        Args:
            names: names of parameters whose ``requires_grad`` the script has set to True since the last call. All other
                parameters with ``requires_grad`` are trained as well.
            late: unused; True if a forward of this step has been computed already.

        Raises:
            MismatchError: the ranks' models or their ``requires_grad`` differ.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        agree_on_state(self._run_context.comms.replica, self._replica.parts)
        self._train(names)
        for worker in self._run_context.mine:
            if worker not in self._optimizer_of and (made := self._make_optimizer(self._named)) is not None:
                self._optimizer_of[worker] = made
        self.optimizers = tuple(self._optimizer_of.values())

    def _fixed(self) -> dict[str, Tensor]:
        """Return the parameters that were never trained, of which all workers have the same."""
        return {name: p.data for name, p in self._frozen()}

    def _frozen(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) of the parameters that ``_fixed`` returns."""
        trained = {name for name, _ in self._trained}
        return [(name, p) for name, p in self._named if name not in trained]

    def _note_frozen(self) -> None:
        """Record the norms of parameters that were never trained, to find those that the script writes."""
        self._frozen_guard.note(self._frozen())

    def _check_frozen(self, where: str, find: Callable[[Sequence[tuple[str, nn.Parameter]]], list[str]]) -> None:
        """Refuse writes of frozen parameters by the script while this rank's workers, which share them, differ.

        With one worker on a rank they are the worker's own; see ``_adopt_frozen``. ``find`` returns the names of those
        that were written.
        """
        if len(self._run_context.mine) < 2 or not (frozen := self._frozen()):
            return
        if self._equal:
            self._note_frozen()
        elif written := find(frozen):
            raise UsageError(
                f"the script or a forward has written the frozen parameter {written[0]} while logical workers differ",
                where=where,
                why="the workers of a rank share it, and each would compute it from parameters of its own, of which the"
                " model holds those of one",
                remedy=f"take as many workers as data ranks ({self._run_context.comms.replica.size}); or give"
                " tutti.prepare ema=…; or keep the tensor outside of the model and compute it from run.state()",
            )

    def _adopt_frozen(self, where: str) -> None:
        """Average frozen parameters that a script or forward has written from now on: workers have values of their own.

        An example is a teacher that follows the worker's parameters. Collective if the model has frozen parameters: an
        all-gather of names.
        """
        self._check_frozen(where, self._frozen_guard.written)
        if frozen := self._frozen():
            text = "\n".join(self._frozen_guard.written(frozen))
            found = self._run_context.comms.replica.all_gather_strings(text, "frozen parameters that were written")
            if names := {name for each in found for name in each.splitlines()}:
                self._train(names)

    def _train(self, names: Collection[str]) -> None:
        """Give each worker its own copy of these parameters, and of all others that are trainable."""
        before = {name: place for place, (name, _) in enumerate(self._trained)}
        self._trained = [(name, p) for name, p in self._named if p.requires_grad or name in before or name in names]
        for worker, copies in self._copies.items():
            # Frozen parameters were equal on all workers; from now on each worker has its own copy.
            self._copies[worker] = [
                copies[before[name]] if name in before else p.data if worker == self._loaded_worker else p.data.clone()
                for name, p in self._trained
            ]
        self._make_sums()
        self._note()
        self._note_frozen()

    def _make_sums(self) -> None:
        comm, workers = self._run_context.comms.replica, self._run_context.workers
        self._sums = {
            dtype: TreeSum(comm, workers, sum(p.numel() for _, p in self._trained if p.dtype == dtype), dtype)
            for dtype in sorted({p.dtype for _, p in self._trained}, key=str)
        }
        self._reducer: Reducer | None = None
        if self._joint_steps:
            make = partial(TreeReducer, run_context=self._run_context)
            self._reducer = with_sparse_gradients(make, self._named, self._replica.parts, self._run_context)

    def _put(self, worker: int) -> None:
        """Put this worker's parameters into the model."""
        self._loaded_worker = worker
        for (_, parameter), copy in zip(self._trained, self._copies[worker], strict=True):
            if parameter.data_ptr() != copy.data_ptr():
                parameter.data = copy

    def _take_written(self, where: str) -> None:
        """Let a rank's only worker go on from ``.data`` that the script has assigned; with several, refuse writes.

        Args:
            where: place in the run for the error message.
        """
        if len(self._run_context.mine) > 1:
            self._guard.check(self._trained, where)
            return
        for worker in self._copies:
            self._take_assigned(worker)

    def _check_masks(self, where: str) -> None:
        """Refuse masks of ``torch.nn.utils.prune`` that the script has computed of one of several workers' weights."""
        trained = {name for name, _ in self._trained} if self._has_differed else set[str]()
        masks = [name for name in self._buffers.written() if name.endswith("_mask")] if trained else []
        for mask in masks:
            if (weight := f"{mask.removesuffix('_mask')}_orig") in trained:
                raise UsageError(
                    f"the script has pruned {weight}, of which each logical worker of this rank has its own",
                    where=where,
                    why="torch.nn.utils.prune takes the weights of the last forward, which are those of one worker",
                    remedy=f"take as many workers as data ranks ({self._run_context.comms.replica.size})",
                )

    def _take_assigned(self, worker: int) -> None:
        """Let a worker, whose parameters the model has, go on from ``.data`` that a forward or the script assigned."""
        copies = self._copies[worker]
        for place, (_, parameter) in enumerate(self._trained):
            if parameter.data_ptr() != copies[place].data_ptr():
                copies[place] = parameter.data

    def _due(self, step_context: StepContext) -> bool:
        """Return whether the copies are averaged at the end of this step."""
        after = step_context.local_step + 1
        return after > self._joint_steps and self._equal_before(after)

    def _equal_before(self, step: int) -> bool:
        """Return whether all workers have the same parameters before a step, by its number from 0."""
        return step <= self._joint_steps or (step - self._joint_steps) % self._period == 0

    def _jointly(self, step_context: StepContext) -> Reducer | None:
        """Return the reducer of gradients in a synchronous step; None in a local step."""
        return self._reducer if step_context.local_step < self._joint_steps else None

    def _contribute(self, reducer: Reducer, worker: int, part: LossSums | None) -> None:
        """Add a worker's gradient to a synchronous step, rescaled from the mean over its samples to their sum.

        ``part``: the worker's loss sums, None if it had no samples.
        """
        if part is not None:
            self._counting.note(part)
            gradients = [p.grad for _, p in self._trained if p.grad is not None]
            own_sum(gradients, part, self._step_context.loss_scale)
        reducer.collect(self._step_context, worker, None if part is None else part.sums)

    def _together(self, reducer: Reducer, step_context: StepContext) -> StepStats:
        """Complete a synchronous step's gradient, the mean over the global batch. Collective."""
        sums = reducer.finish(step_context, None)
        count = sums.samples or math.nan
        reducer.scale(1 / count)
        norm = math.sqrt(sum(reducer.squares()))
        self._buffers.verify()
        finite = finite_by_norm(norm, lambda: all(is_finite(p.grad) for _, p in self._trained))
        return self._counting.stats(sums, norm, finite, sums.stop)

    def _update_all(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Make the same update on every worker's copy, or none where the gradient is non-finite."""
        nonfinite: tuple[str, ...] = ()
        if stats.finite:
            norm = self.clip_gradients(stats.grad_norm)
            for worker, optimizer in self._optimizer_of.items():
                self._put(worker)
                optimizer_step(optimizer, step_context.lr_factor, norm)
            self._note()
        else:
            nonfinite = gather_nonfinite_names(self._run_context.comms.replica, self._named)
        return UpdateResult.joint(stats, nonfinite)

    def _average(self) -> list[Tensor]:
        """Return the mean of each trained parameter over all N workers, the same bits on every rank. Collective."""
        means: dict[int, Tensor] = {}
        for dtype, total in self._sums.items():
            members = [i for i, (_, p) in enumerate(self._trained) if p.dtype == dtype]
            for worker in self._run_context.mine:
                total.add(worker, torch.cat([self._copies[worker][i].reshape(-1) for i in members]))
            flat = total.total().div_(self._run_context.workers)
            pieces = flat.split([self._trained[i][1].numel() for i in members])
            means |= {i: piece.view(self._trained[i][1].shape) for i, piece in zip(members, pieces, strict=True)}
        return [means[i] for i in range(len(self._trained))]

    def _write(self, means: Sequence[Tensor]) -> None:
        for copies in self._copies.values():
            foreach_copy_(copies, list(means))
        self._averaged = {name: tensor_version(parameter) for name, parameter in self._trained}
        self._note()

    def _note(self) -> None:
        """Record the parameters' norms for the write guard, where this rank has several workers."""
        if len(self._run_context.mine) > 1:
            self._guard.note(self._trained)
