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
from tutti.types.micro_batch import LossFn, LossSums, MicroBatch
from tutti.types.replica_runner import GradientReadyHook
from tutti.types.run_context import RunContext


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
        model's blocks and with the loss function, and broadcasts the plan and then all parameters and buffers to the
        others. Collective over the tensor-parallel ranks, which also compare their models; all ranks of the job call
        this together, as the first use of the tensor axis makes process groups. With one rank nothing is sent or split.
        In any case the model moves to this rank's device, and activation checkpointing and ``torch.compile`` are
        applied as the run asks.

        Args:
            plain: the whole model, with the same modules on all ranks; each parameter that the plan splits becomes this
                rank's slice.

        Returns:
            A ``TensorRunner``, whose ``run`` computes forward and backward of micro-batches, and whose ``specs`` have
            the position of each slice in its whole tensor; a ``WholeRunner`` of the unsplit model where no layer is
            split, as with one rank.

        Raises:
            MismatchError: the ranks have built different models.
            UsageError: activation checkpointing matches no module; the model is split already; the user's plan by hand
                cannot be carried out; sequence parallelism is combined with hooks on the gradients of modules; or
                ``torch.compile`` with the run's options cannot compile for this device or for this model.
            PeerError: a rank is lost, or does not take part within the timeout.
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

    Within ``run`` the loss function receives a split output as a ``SplitTensor``; every other caller of the model
    receives the whole output, which the tensor-parallel ranks all-gather. The first forward in training mode and the
    first in evaluation check the reads of split parameters by the model's code, unless the model is compiled. If the
    code asks for sizes of split parameters, the checks stay on in all later forwards, in which the code gets the sizes
    of the whole parameters.

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

        A logical worker is one of N fixed shares of the global batch. All tensor-parallel ranks make this call with the
        same micro-batches; the forwards and backwards of split layers are collective over these ranks. The loss
        function receives the model's output as a ``SplitTensor`` where the tensor-parallel plan leaves the output split
        over ranks.

        Each backward adds gradients to the parameters' ``.grad``; of a split parameter, those of this rank's slice.
        Backward weights each sample's loss by ``MicroBatch.weight``: loss scale / samples of the global batch (of the
        worker's share where each worker has a gradient of its own), so that gradients of all micro-batches are to be
        summed, not averaged. For a ``MicroBatch.whole`` backward starts from loss scale / count.

        Args:
            micro_batches: the logical worker's micro-batches, in order; at least one.
            loss: the user's loss function ``loss_fn(model, batch)``, which returns a mean, ``(sum, count)`` or ``(sum,
                count, metric_sums)``.
            grad_hook: its ``prepare_for_backward`` is called with the loss sums so far, right before the backward of
                the last micro-batch (not of a dummy one, without samples); None for forwards without backward. ``run``
                does not call its ``gradient_ready``: autograd calls the ``gradient_ready`` of the hook that ``connect``
                has registered, usually the same object, for each gradient that a backward accumulates.

        Returns:
            A ``LossSums`` over the micro-batches, equal on all tensor-parallel ranks: the float tensor ``sums`` holds
            loss sum, count and metric sums in this order, ``names`` the names of the metrics, ``samples`` the number of
            samples.

        Raises:
            UsageError: the loss has an unknown form or, with ``grad_hook``, requires no gradient; or the loss function
                or the model's own code reads a split parameter as if it were whole.
            ValueError: ``micro_batches`` is empty.
        """
        if self._outputs is None:
            return super().run(micro_batches, loss, grad_hook)
        with self._outputs.kept():
            return super().run(micro_batches, loss, grad_hook)

    def _begin_forward(self, module: nn.Module, *_: Any) -> None:
        # The first forward is checked as the script's other code is: custom loops have no trial when the plan is made.
        self._forward.close()
        if self._checked[module.training] and not self.asks_sizes():
            self._forward.enter_context(self.model_code())
        self._checked[module.training] = True

    def _end_forward(self, *_: Any) -> None:
        self._forward.close()
