"""Split the layers of a replica over several devices, which compute each of them together (Megatron-LM).

Shoeybi et al. 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tutti.config.layout_config import TensorConfig
from tutti.errors import UsageError
from tutti.nn import ac_policy
from tutti.parallel.ddp.whole_layout import WholeRunner
from tutti.parallel.tensor.loss_parallel_plan import Outputs
from tutti.parallel.tensor.tp_apply import TensorParallelizer
from tutti.torch_compat import next_node_sequence, node_sequence
from tutti.types import GradientReadyHook, LossFn, LossSums, MicroBatch, RunContext


class TensorLayout:
    """Model layout of ``tensor``: each rank holds a slice of every layer in the TP plan."""

    def __init__(self, config: TensorConfig, run_context: RunContext) -> None:
        self._config, self._run_context = config, run_context

    def build(self, plain: nn.Module) -> WholeRunner:
        """Slice the layers of the TP plan in place; see ``TensorParallelizer``. Collective."""
        ac_policy.check_units(plain, self._run_context.activation_checkpointing)
        division = TensorParallelizer(plain, self._run_context, self._config)
        division.apply()
        if not division.plan:
            replica = WholeRunner(plain, self._run_context)
        else:
            replica = TensorRunner(plain, self._run_context, division.split_parameters(), division.parted)
        division.mark(replica)
        return replica


class TensorRunner(WholeRunner):
    """Runs a model with split layers, whose output may be split.

    The run's loss function takes the output split, every other caller whole.

    Args:
        module: the model.
        run_context: of the run.
        split: parameters of which this rank has a slice, by name.
        parted: whether the output may be split.
    """

    def __init__(
        self, module: nn.Module, run_context: RunContext, split: Mapping[str, nn.Parameter], parted: bool
    ) -> None:
        super().__init__(module, run_context)
        self._outputs = Outputs(module) if parted else None
        self._split = {parameter: name for name, parameter in split.items()}
        self._forwards: list[tuple[int, int]] = []
        self._began = 0
        module.register_forward_pre_hook(self._begin_forward)
        module.register_forward_hook(self._end_forward)

    def run(self, micro_batches: Sequence[MicroBatch], loss: LossFn, grad_hook: GradientReadyHook | None) -> LossSums:
        """Run as a whole model, with outputs left split for the loss function."""
        if self._outputs is None:
            return super().run(micro_batches, loss, grad_hook)
        with self._outputs.kept():
            return super().run(micro_batches, loss, grad_hook)

    def _begin_forward(self, *_: Any) -> None:
        self._began = next_node_sequence()

    def _end_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._forwards.append((self._began, next_node_sequence()))

    def begin(self, micro_batch: MicroBatch) -> None:
        """Enter a micro-batch's RNG stream, and forget the forwards of the one before."""
        self._forwards.clear()
        super().begin(micro_batch)

    def backward(self, result: Any, *args: Any, **kwargs: Any) -> LossSums:
        """Run backward as ``WholeRunner``.

        Raises:
            UsageError: the loss reads a split parameter outside of the model's forward.
        """
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self._check_reads(tensor.grad_fn)
        return super().backward(result, *args, **kwargs)

    def _check_reads(self, root: torch.autograd.graph.Node) -> None:
        """Raise UsageError where the graph outside of the model's forwards leads to a split parameter."""
        ahead, seen = [root], {root}
        while ahead:
            node = ahead.pop()
            number = node_sequence(node)
            if number is None:
                name = self._split.get(getattr(node, "variable"))  # noqa: B009
                if name is not None:
                    raise UsageError(
                        f"the loss reads {name}, of which each tensor rank has a slice",
                        why="a penalty on a slice is not that on the whole parameter",
                        remedy="take weight_decay of the optimizer for a penalty on weights, leave the layer whole by"
                        f" tensor:whole={name.rpartition('.')[0]}, or take --strategy mirrored or sharded:stage=2",
                    )
            elif any(low <= number < high for low, high in self._forwards):
                continue
            for below, _ in node.next_functions:
                if below is not None and below not in seen:
                    seen.add(below)
                    ahead.append(below)
