"""One training step; the same function for every strategy. "Worker" is the logical worker.

data.next → place → for each worker here: begin_worker · run · end_worker → reduce_gradients → optimizer_step → clear
global      local    load its state · forward, backward · save its state     over ranks     parameters         gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tutti.train.noise_probe import NoiseProbe
from tutti.train.script_checks.hook_watch import HookWatch
from tutti.types.gradient_sync import GradientSync
from tutti.types.micro_batch import LossFn, MicroBatch
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner
from tutti.types.step_records import StepContext, StepStats, UpdateResult


def train_step(
    replica: ReplicaRunner,
    sync: GradientSync,
    grad_hook: GradientReadyHook,
    work: Sequence[tuple[int, Sequence[MicroBatch]]],
    loss: LossFn,
    step_context: StepContext,
    hooks: HookWatch,
    adapt: Callable[[StepStats, StepContext], StepContext] | None = None,
    noise: NoiseProbe | None = None,
) -> tuple[StepStats, UpdateResult]:
    """Train on one global batch: forward and backward passes, gradient reduction, update, clearing of gradients.

    Collective over the data ranks, which reduce gradients, losses and metrics (not with asynchronous servers), and over
    the stages, tensor ranks or shard ranks of a replica where the model is split or sharded; all ranks must call it.
    Afterwards every ``.grad`` is None. A worker is a logical data-parallel worker: it has a fixed share of the global
    batch, and a rank may compute several workers one after another.

    Args:
        replica: this rank's part of the model.
        sync: gradient synchronisation, which reduces gradients over ranks and makes the update.
        grad_hook: gradient-ready hook, called with each parameter whose gradient a backward has completed.
        work: pairs (index of a worker, its micro-batches) of this rank's workers, in order; an empty sequence of
            micro-batches for a worker without samples in this batch.
        loss: the loss function.
        step_context: number of the step, samples of its global batch, factors on learning rate and loss.
        hooks: raises UsageError before the update if the script's gradient hooks saw gradients of another scale.
        adapt: returns the step context of the update from the reduced results (AdaScale); None: ``step_context``.
        noise: measures the gradient noise scale, in some steps; None: in none. A measured step is collective over all
            ranks besides.

    Returns:
        A pair: a ``StepStats`` (``loss``, ``metrics``, ``grad_norm`` and others, Python numbers reduced over the global
        batch) and an ``UpdateResult`` (``updates``, the number of updates made, and ``skipped``, whether the update was
        skipped because a gradient is not finite).

    Raises:
        UsageError: a gradient hook of the script saw gradients of another scale, or the script has written a parameter
            or buffer that the strategy cannot let it write.
        MismatchError: ranks are in different steps.
        PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
    """
    run = replica.run if noise is None else noise.runner(replica, step_context)
    for worker, micro_batches in work:
        sync.begin_worker(worker, step_context)
        part = None
        if micro_batches:
            part = run(micro_batches, loss, grad_hook)
            part.whole = micro_batches[0].whole
            if sync.loss_normalisation == "worker":
                hooks.check_part(part)
        sync.end_worker(worker, part)
    stats = sync.reduce_gradients(step_context)
    if sync.loss_normalisation == "step":
        hooks.check_sum(stats, step_context)
    if noise is not None:
        noise.finish(stats)
    updated = sync.optimizer_step(stats, step_context if adapt is None else adapt(stats, step_context))
    sync.clear()
    return stats.known(), updated
