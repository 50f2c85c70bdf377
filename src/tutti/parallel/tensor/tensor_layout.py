"""Split the layers of a replica over several devices, which compute each of them together (Megatron-LM).

Shoeybi et al. 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from tutti.config.layout_config import TensorConfig
from tutti.nn import ac_policy
from tutti.parallel.ddp.whole_layout import WholeRunner
from tutti.parallel.tensor.loss_parallel_plan import Outputs
from tutti.parallel.tensor.tp_apply import TensorParallelizer
from tutti.types import GradientReadyHook, LossFn, LossSums, MicroBatch, RunContext


class TensorLayout:
    """Splits the layers of a model over tensor-parallel ranks (``--strategy tensor``): each rank holds a slice of each.

    Args:
        config: options of tensor parallelism.
        run_context: mesh, communicators and flags of the run.
    """

    def __init__(self, config: TensorConfig, run_context: RunContext) -> None:
        self._config, self._run_context = config, run_context

    def build(self, plain: nn.Module) -> WholeRunner:
        """Split the model's layers over the tensor-parallel ranks, in place; return this rank's runner of the model.

        The first of these ranks finds the tensor-parallel plan, which layers are split and how, by computing with the
        model, and broadcasts the plan and all values to the others. Collective over the tensor-parallel ranks. With one
        rank the model stays as it is.

        Args:
            plain: the whole model, equal on all ranks.

        Returns:
            A ``TensorRunner``, whose ``run`` computes forward and backward of micro-batches, and whose ``specs`` have
            the position of each slice in its whole tensor; a ``WholeRunner`` of the unchanged model where no layer is
            split, as with one rank.

        Raises:
            MismatchError: the ranks have built different models.
            UsageError: activation checkpointing matches no module, or the model cannot be split as the options ask.
        """
        ac_policy.check_units(plain, self._run_context.activation_checkpointing)
        division = TensorParallelizer(plain, self._run_context, self._config)
        division.apply()
        if not division.plan:
            replica = WholeRunner(plain, self._run_context)
        else:
            replica = TensorRunner(plain, self._run_context, division.parted)
        division.mark(replica)
        return replica


class TensorRunner(WholeRunner):
    """Runs forward and backward of a tensor-parallel model, whose output may stay split over ranks.

    The run's loss function receives a split output as a ``SplitTensor``; every other caller receives the whole output.
    The first forward in training mode and the first in evaluation check what the model's code reads of split
    parameters, unless the model is compiled.

    Args:
        module: the model, with layers converted to tensor-parallel ones.
        run_context: mesh, communicators and flags of the run.
        parted: whether the output may stay split.
    """

    def __init__(self, module: nn.Module, run_context: RunContext, parted: bool) -> None:
        super().__init__(module, run_context)
        self._outputs = Outputs(module) if parted else None
        self._forward = ExitStack()
        # Compiled code takes no function mode.
        self._checked = {training: run_context.compile is not None for training in (True, False)}
        module.register_forward_pre_hook(self._begin_forward)
        module.register_forward_hook(self._end_forward, always_call=True)

    def run(self, micro_batches: Sequence[MicroBatch], loss: LossFn, grad_hook: GradientReadyHook | None) -> LossSums:
        """Run one logical worker's micro-batches in order: forward and, with a gradient-ready hook, backward.

        A logical worker is one of N fixed shares of the global batch. The loss function receives the model's output as
        a ``SplitTensor`` where the tensor-parallel plan leaves the output split over ranks. Collective over the
        tensor-parallel ranks, all of which run the same micro-batches.

        Args:
            micro_batches: the logical worker's micro-batches, in order; at least one.
            loss: the user's loss function ``loss_fn(model, batch)``, which returns a mean, ``(sum, count)`` or ``(sum,
                count, metric_sums)``.
            grad_hook: object whose ``prepare_for_backward`` is called before the last micro-batch's backward; None for
                forward alone. The hook given to ``connect`` receives the completed gradients.

        Returns:
            A ``LossSums`` over the micro-batches, on every rank of the replica: the float tensor ``sums`` holds loss
            sum, count and metric sums in this order, ``names`` the names of the metrics, ``samples`` the number of
            samples.
        """
        if self._outputs is None:
            return super().run(micro_batches, loss, grad_hook)
        with self._outputs.kept():
            return super().run(micro_batches, loss, grad_hook)

    def _begin_forward(self, module: nn.Module, *_: Any) -> None:
        # The first forward is checked as the script's other code is: custom loops have no trial when the plan is made.
        self._forward.close()
        if self._checked[module.training]:
            self._forward.enter_context(self.model_code())
        self._checked[module.training] = True

    def _end_forward(self, *_: Any) -> None:
        self._forward.close()
