"""The layout of data parallelism: every rank holds the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tutti.config.layout_config import WholeConfig
from tutti.nn import ac_policy
from tutti.parallel.ddp import loss_output
from tutti.parallel.ddp.replica_part import ReplicaPart
from tutti.types import GradientReadyHook, LossFn, LossSums, MicroBatch, RunContext


class WholeLayout:
    """The layout of ``single``, ``mirrored`` and all other strategies with the whole model on every rank."""

    def __init__(self, config: WholeConfig, run_context: RunContext) -> None:
        self._run_context = run_context

    def build(self, plain: nn.Module) -> WholeRunner:
        """Move the whole model to this rank's device and return its runner. Not collective.

        Activation checkpointing and ``torch.compile`` are applied in place.

        Raises:
            UsageError: activation checkpointing matches no module.
        """
        ac_policy.check_units(plain, self._run_context.activation_checkpointing)
        return WholeRunner(plain, self._run_context)


class WholeRunner(ReplicaPart):
    """One whole model on this rank's device."""

    custom_loop = True

    def run(self, micro_batches: Sequence[MicroBatch], loss: LossFn, grad_hook: GradientReadyHook | None) -> LossSums:
        """Run forward and, with a gradient-ready hook, backward of one logical worker's micro-batches.

        Gradients are accumulated in ``.grad``.

        Args:
            micro_batches: the worker's, in order; at least one.
            loss: the user's loss function ``loss_fn(model, batch)``; ``read_loss`` says what it may return.
            grad_hook: gradient-ready hook, told before the last backward; None for forwards only.

        Returns:
            The worker's loss sums over its micro-batches.

        Raises:
            UsageError: the loss has an unknown form or requires no gradient.
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

    def begin(self, micro_batch: MicroBatch) -> None:
        """Seed the model's random number streams (dropout) for a micro-batch, before a custom loop's forward.

        Args:
            micro_batch: the micro-batch; its key determines the streams.
        """
        self.enter(micro_batch)

    def backward(
        self,
        result: Any,
        micro_batch: MicroBatch,
        before: LossSums | None,
        grad_hook: GradientReadyHook,
        retain_graph: bool = False,
    ) -> LossSums:
        """Run backward of one micro-batch.

        Args:
            result: what the loss function returned (see ``loss_output.read_loss``).
            micro_batch: the micro-batch of the forward.
            before: loss sums of the worker's earlier micro-batches; None for the first.
            grad_hook: gradient-ready hook, told before the worker's last backward.
            retain_graph: as of ``Tensor.backward``.

        Returns:
            The worker's loss sums so far.

        Raises:
            UsageError: the loss has an unknown form or requires no gradient.
        """
        self.draws.check()
        objective, start, part = loss_output.read_loss(result, micro_batch)
        loss_output.check_trains(objective)
        total = part if before is None else before + part
        # A dummy micro-batch runs backward only where that has collectives (SyncBatchNorm, FSDP2), with zero gradient.
        if micro_batch.samples and micro_batch.last:
            grad_hook.prepare_for_backward(total)
        if micro_batch.samples or self.peers is not None or self.sharded:
            objective.backward(start, retain_graph=retain_graph)
        if not micro_batch.samples:
            self.forget()
        return total
