"""A task's model split over tensor ranks, of which one is traced: its TP plan, slices and collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tutti.comm.differentiable import TensorRanks
from tutti.config.layout_config import TensorConfig
from tutti.parallel.tensor.tp_apply import closed_blocks, find_tp_plan, is_parted, split_layers
from tutti.parallel.tensor.tp_plan_by_hand import check_asked, roles_asked
from tutti.planning.memory_plan import repeated_sample, task_model
from tutti.planning.planned_run import PlannedRun
from tutti.tasks.task import Task
from tutti.workload.message_log import MessageLog


class TensorSplit:
    """Plans how tensor parallelism splits a model's layers over ranks, and builds the model of the first rank.

    The plan is that of a run on CPUs. It is found on real tensors, because whether a block can be split is proved by
    computing.

    Args:
        task: model and loss.
        sample: batch of one sample.
        config: configuration of the run.
        layout: options of tensor parallelism.
        ranks: number of tensor ranks.

    Attributes:
        ranks: number of tensor ranks.
        returns_slices: whether some layers return tensors that are split over ranks; such a model cannot be traced on
            fake tensors.
        closed: names of the modules inside of which the model must not be cut into pipeline stages.

    Raises:
        UsageError: a plan that the user has written by hand cannot be carried out.
    """

    def __init__(self, task: Task, sample: Any, config: PlannedRun, layout: TensorConfig, ranks: int) -> None:
        self._task, self._config, self._layout = task, config, layout
        self.ranks = ranks
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)

        def trial(model: nn.Module, most: int = 2) -> Any:
            with torch.autocast("cpu", narrow or torch.bfloat16, enabled=narrow is not None):
                return task.loss(model, repeated_sample(sample, most, config))

        model = task_model(task, config)
        self._plan = find_tp_plan(model, ranks, layout, trial, torch.device("cpu"))
        check_asked(self._plan, roles_asked(model, layout.styles) if layout.plan else {})
        self.returns_slices, self.closed = is_parted(self._plan, layout), closed_blocks(self._plan)

    def build(self, log: MessageLog | None = None) -> nn.Module:
        """Build the task's model with the first tensor-parallel rank's slice of every split layer, the largest slice.

        How the layers are split over the ranks was found when this object was created. Only this process takes part:
        the collectives of the model's split layers are recorded and not performed.

        Args:
            log: receives the collectives that forwards and backwards of the built model would make; None discards them,
                for a caller that needs only the sizes of the model.

        Returns:
            The model, whose split layers hold the first rank's slices.
        """
        model = task_model(self._task, self._config)
        ranks = TensorRanks(log or MessageLog(self.ranks))
        split_layers(model, self._plan, ranks, sequence=self._layout.sequence)
        return model
