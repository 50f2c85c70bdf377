"""DiLoCo: logical workers make local steps; every H steps an outer optimizer steps along their mean change.

Douillard et al. 2023, arXiv 2311.08105, Algorithm 1. The inner optimizer is the run's optimizer (the paper: AdamW), and
its state stays with the worker; the outer optimizer is SGD with Nesterov momentum. Memory beside that of ``local_sgd``:
two copies of the parameters a device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from tutti.checkpoint.state_shards import mine_of, read_local, stored_name
from tutti.config.sync_config import DiLoCoConfig
from tutti.parallel.local_sgd.local_sgd import OUTER, LocalSGDSync
from tutti.torch_compat import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub, foreach_sub_
from tutti.types.optimizer_protocols import OptimizerFactory
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.step_records import StepContext, StepStats, UpdateResult

_PARAMETER, _MOMENTUM = f"{OUTER}/parameter/", f"{OUTER}/momentum/"


class DiLoCoSync(LocalSGDSync):
    """DiLoCo: logical workers step their own parameters; every H steps an outer step follows their mean change.

    Douillard et al. 2023, arXiv 2311.08105, Algorithm 1. Logical workers are N fixed shares of the global batch; a rank
    computes one or more of them. Every H steps the outer optimizer, SGD with Nesterov momentum, takes the workers' mean
    change as its gradient, and all workers go on from the result. Every rank makes the same outer update from the same
    mean, without a collective beyond those of local SGD.

    Args:
        config: options of the strategy: steps between outer updates, and rate and momentum of the outer SGD.
        run_context: communicators and settings of the run.
    """

    def __init__(self, config: DiLoCoConfig, run_context: RunContext) -> None:
        super().__init__(config, run_context)
        self._options = config

    def attach(self, replica: ReplicaRunner, make_optimizer: OptimizerFactory) -> GradientReadyHook:
        """Make parameters and an inner optimizer for each logical worker of this rank, and DiLoCo's outer parameters.

        A logical worker is one of N fixed shares of the global batch. Collective over the data ranks: they compare the
        model's names, shapes and dtypes, rank 0 broadcasts its values, and trial steps of the inner optimizer are
        compared by an all-gather. The outer optimizer is SGD, with the learning rate, momentum and Nesterov option of
        the strategy ``diloco``; its parameters start at the initial weights, its momentum at zero.

        Args:
            replica: the model on this rank, with its runner.
            make_optimizer: called once for each worker of this rank with a list of (name, parameter); returns that
                worker's inner optimizer, which is the run's optimizer, or None where there is nothing to train.

        Returns:
            A gradient-ready hook that does nothing: each worker's gradients are used by its own optimizer.

        Raises:
            MismatchError: ranks hold models with different parameters or buffers.
            UsageError: a step of the inner optimizer draws from PyTorch's global random generator.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        grad_hook = super().attach(replica, make_optimizer)
        self._outer = [p.data.clone() for _, p in self._trained]
        self._velocities = [torch.zeros_like(outer) for outer in self._outer]
        return grad_hook

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Report the workers' inner updates, or make the update of a synchronous step on every worker's copy.

        In DiLoCo each logical worker (fixed share of the global batch) makes inner updates of its own copy of the
        parameters, in ``end_worker``. A run may begin with synchronous steps, which average gradients. The last of them
        also sets the outer parameters to the updated parameters; outer updates are made in ``reduce_gradients``.
        Collective over the data ranks only where a gradient was non-finite: an all-gather of the parameters' names.

        Args:
            stats: result of ``reduce_gradients`` in this step: norm of the gradient, and whether the gradient is
                finite.
            step_context: the step under way: its number decides whether the step is synchronous, and its ``lr_factor``
                multiplies the optimizers' initial learning rates.

        Returns:
            An ``UpdateResult``: ``updates`` is 1, or 0 for a synchronous update that was skipped because a gradient was
            not finite; ``skipped`` is True if any worker's update was skipped, and then ``nonfinite`` has the names of
            parameters whose gradient is not finite; ``in_sync`` is True where all workers have the same parameters
            after the step.

        Raises:
            UsageError: an optimizer does not take sparse gradients (synchronous steps).
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        updated = super().optimizer_step(stats, step_context)
        self._follow_synchronous(step_context)
        return updated

    def end_step(self, step_context: StepContext) -> bool:
        """Make the outer update if it is due after this step of a custom training loop.

        Collective over the data ranks where the outer update is due (every H-th step), which needs the mean of the
        logical workers' parameters: an all-to-all and an all-gather for each dtype, and an all-gather of names if the
        model has frozen parameters. All workers (fixed shares of the global batch) go on from the result, which is
        written into their parameters in place. The last of the synchronous steps, with which a run may begin, sets the
        outer parameters to the updated parameters.

        Args:
            step_context: the step that ends; all its updates have been made.

        Returns:
            Whether the outer update has been made.

        Raises:
            UsageError: this rank has several workers, and the script has written parameters since the last update.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        due = super().end_step(step_context)
        self._follow_synchronous(step_context)
        return due

    def _follow_synchronous(self, step_context: StepContext) -> None:
        """Set the outer parameters to the model's after the last of the synchronous steps."""
        if step_context.local_step + 1 == self._joint_steps:
            foreach_copy_(self._outer, next(iter(self._copies.values())))

    def replicated(self) -> Mapping[str, Tensor] | None:
        """Return the tensors of which all ranks must hold equal copies. Not collective.

        The caller compares digests of the tensors over ranks.

        Returns:
            A mapping from names to tensors, not copied, never None: the parameters of DiLoCo's outer optimizer as
            ``outer/parameter/NAME``, their momentum as ``outer/momentum/NAME``; by their names in the model the
            parameters that were never trained, and the trained ones while they are equal on all logical workers (shares
            of the global batch).

        Raises:
            UsageError: this rank has several workers, and the script has written parameters since the last update.
        """
        names = [name for name, _ in self._trained]
        outer = {_PARAMETER + name: t for name, t in zip(names, self._outer, strict=True)}
        outer |= {_MOMENTUM + name: t for name, t in zip(names, self._velocities, strict=True)}
        return {**(super().replicated() or {}), **outer}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's part of a checkpoint by group: ``model``, ``optim`` and ``workers``.

        In DiLoCo each logical worker, a fixed share of the global batch, has its own parameters, inner optimizer and
        buffers, and an outer optimizer steps along the mean change of the workers' parameters. Collective over the data
        ranks, which average the workers' parameters and buffers for the group ``model`` by all-to-alls and all-gathers.
        Tensors of ``optim`` and ``workers`` are not copied: the next step changes them.

        Returns:
            Three groups, each a mapping from names to tensors: ``model`` has some of the parameters and buffers
            averaged over the workers, shared out over the ranks; ``optim`` has, on the rank of worker 0, that worker's
            inner optimizer state under ``"{parameter name}/{state key}"``, and is empty on other ranks; ``workers``
            has, for each worker of this rank by its index, ``"{worker}/parameter/{name}"``,
            ``"{worker}/optimizer/{name}/{state key}"`` and the buffers ``"{worker}/{buffer name}"``, and further this
            rank's part of the outer optimizer's parameters and momentum, ``"outer/parameter/{name}"`` and
            ``"outer/momentum/{name}"``.

        Raises:
            UsageError: this rank has several workers, and the script has written parameters since the last update, or a
                buffer that forwards write too, other than by a reset to zeros, or to ones for a variance (each worker
                has its own value of it).
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        state, comm = super().state(), self._run_context.comms.replica
        names = [name for name, _ in self._trained]
        outer = {_PARAMETER + name: t for name, t in zip(names, self._outer, strict=True)}
        outer |= {_MOMENTUM + name: t for name, t in zip(names, self._velocities, strict=True)}
        return {**state, "workers": {**state["workers"], **mine_of(outer, comm.rank, comm.size)}}

    def load(self, saved: SavedState) -> None:
        """Restore the logical workers, and the outer parameters with their momentum, from a checkpoint. Not collective.

        In DiLoCo each logical worker, one of N fixed shares of the global batch, gets its own parameters, inner
        optimizer state and buffers; an outer optimizer steps along the workers' mean change. With another number of
        workers, or from another strategy's checkpoint, all workers get the parameters of the group ``model`` (the mean
        over the workers that were saved) and the state of the group ``optim``. Without outer state in the checkpoint,
        the outer parameters take the values of the group ``model`` with zero momentum.

        Args:
            saved: the checkpoint, with the groups ``model``, ``optim`` and ``workers``.

        Raises:
            CheckpointError: the checkpoint lacks a parameter or buffer, or a file of it differs from its manifest.
        """
        super().load(saved)
        names = saved.names("workers")
        for (name, _), outer, velocity in zip(self._trained, self._outer, self._velocities, strict=True):
            spec = self._replica.specs[name]
            if (momentum := stored_name(names, name, spec, _MOMENTUM)) in names:
                outer.copy_(saved.get("workers", stored_name(names, name, spec, _PARAMETER)))
                velocity.copy_(saved.get("workers", momentum))
            else:
                outer.copy_(read_local(saved, "model", name, self._replica, outer.shape))
                velocity.zero_()

    def _train(self, names: Collection[str]) -> None:
        """Give the outer optimizer a copy of each new parameter, too, with zero momentum; the other ones' stay."""
        known = {
            name: pair
            for (name, _), pair in zip(self._trained, zip(self._outer, self._velocities, strict=True), strict=True)
        }
        super()._train(names)
        pairs = [known.get(name) or (p.data.clone(), torch.zeros_like(p.data)) for name, p in self._trained]
        self._outer, self._velocities = [outer for outer, _ in pairs], [velocity for _, velocity in pairs]

    def _write(self, means: Sequence[Tensor]) -> None:
        options, moving = self._options, []
        for (_, parameter), *tensors in zip(self._trained, self._outer, means, self._velocities, strict=True):
            if parameter.requires_grad:
                moving.append(tensors)
            else:
                # Frozen since the last outer update: the mean is its value, and momentum must not move it on.
                tensors[0].copy_(tensors[1])
        if moving:
            outer, mean, velocity = zip(*moving, strict=True)
            outer_step(outer, mean, velocity, options.outer_lr, options.outer_momentum, options.nesterov)
        super()._write(self._outer)


def outer_step(
    parameters: Sequence[Tensor],
    means: Sequence[Tensor],
    velocities: Sequence[Tensor],
    lr: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Make one outer update of DiLoCo, in place.

    With θᵢ, the parameters of logical worker i (a fixed share of the global batch) after its H inner steps: Δ = θ -
    mean(θᵢ); v ← μ·v + Δ; θ ← θ - γ·(Δ + μ·v), or θ ← θ - γ·v without Nesterov's form. Not collective. Source:
    Douillard et al. 2023, arXiv 2311.08105, Algorithm 1.

    Args:
        parameters: θ, the outer parameters, with which all workers began the present H steps; updated.
        means: mean(θᵢ), means of the workers' parameters now, in the order of ``parameters``; they stay as they are.
        velocities: v, in the same order; updated.
        lr: γ; with lr 1 and momentum 0 the result is the mean of the workers.
        momentum: μ.
        nesterov: True for Nesterov's form.
    """
    thetas, moved = list(parameters), list(velocities)
    changes = foreach_sub(thetas, list(means))
    foreach_mul_(moved, momentum)
    foreach_add_(moved, changes)
    if nesterov:
        foreach_add_(changes, moved, alpha=momentum)
    foreach_sub_(thetas, changes if nesterov else moved, alpha=lr)
