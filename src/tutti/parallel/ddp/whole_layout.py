"""The layout of data parallelism: every rank holds the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tutti.config.layout_config import WholeConfig
from tutti.nn import ac_policy
from tutti.parallel.ddp import loss_output
from tutti.parallel.ddp.replica_part import ReplicaPart
from tutti.types import GradientReadyHook, LossFn, LossSums, MicroBatch, RunContext


class WholeLayout:
    """Places the whole model on every rank, for strategies such as ``single`` and ``mirrored`` (DDP).

    Args:
        config: options of the layout; unused, as there are none.
        run_context: communicators and settings of the run.
    """

    def __init__(self, config: WholeConfig, run_context: RunContext) -> None:
        self._run_context = run_context

    def build(self, plain: nn.Module) -> WholeRunner:
        """Move the whole model to this rank's device and return the object that runs forward and backward.

        Activation checkpointing and ``torch.compile``, as the run asks for them, are applied in place. Not collective.

        Args:
            plain: the script's model, changed in place.

        Returns:
            A ``WholeRunner``, whose ``run`` computes forward and backward of micro-batches on this rank.

        Raises:
            UsageError: a module named for activation checkpointing is not in the model, or none of the model's modules
                matches the option; or ``torch.compile`` with the run's options cannot compile for this device or for
                this model.
        """
        ac_policy.check_units(plain, self._run_context.activation_checkpointing)
        return WholeRunner(plain, self._run_context)


class WholeRunner(ReplicaPart):
    """Runs forward and backward of one whole model on this rank's device, as plain data parallelism does."""

    def run(self, micro_batches: Sequence[MicroBatch], loss: LossFn, grad_hook: GradientReadyHook | None) -> LossSums:
        """Run forward and, with a gradient-ready hook, backward of one logical worker's micro-batches.

        A logical worker is one of N fixed shares of the global batch. The whole model is on this rank. Gradients are
        accumulated in ``.grad``.

        Args:
            micro_batches: the worker's micro-batches, in order; at least one.
            loss: the user's loss function ``loss_fn(model, batch)``, which returns a mean, ``(sum, count)`` or ``(sum,
                count, metric_sums)``.
            grad_hook: gradient-ready hook, whose ``prepare_for_backward`` is called before the worker's last backward;
                None for forwards only.

        Returns:
            A ``LossSums`` over the worker's micro-batches: the float tensor ``sums`` holds loss sum, count and metric
            sums in this order, ``names`` the names of the metrics, ``samples`` the number of samples.

        Raises:
            UsageError: the loss has an unknown form or requires no gradient.
            ValueError: ``micro_batches`` is empty.
        """
        model, total = self.parts[0], None
        for micro_batch in micro_batches:
            self.begin(micro_batch)
            with self.script_code():
                result = loss(model, micro_batch.batch)
            if grad_hook is not None:
                total = self.backward(result, micro_batch, total, grad_hook)
            else:
                part = loss_output.read_loss(result, micro_batch)[2]
                total = part if total is None else total + part
        if total is None:
            raise ValueError("run needs at least one micro-batch")
        return total
