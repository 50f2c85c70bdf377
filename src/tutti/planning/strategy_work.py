"""Seconds in which a strategy's Python code keeps a rank busy, besides the model's operators, messages and updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tutti.config.sync_config import AllReduceConfig, CentralConfig, LocalSGDConfig, ParameterServerConfig
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_facts import zero_stage


@dataclass(frozen=True)
class StrategyWork:
    """Seconds of a strategy's Python work on a rank in a training step, as ``tutti bench strategies`` measures them.

    They come on top of the seconds of the model's operators, messages and updates.

    Attributes:
        step: seconds of a step.
        tensor: additional seconds of a step for each of the rank's trainable parameter tensors.
        micro_batch: seconds of a micro-batch.
        unit: additional seconds of a micro-batch for each of the rank's parameter tensors, with FSDP for each wrapped
            module.
    """

    step: float = 0.0
    tensor: float = 0.0
    micro_batch: float = 0.0
    unit: float = 0.0

    def of_step(self, tensors: int) -> float:
        """Return the seconds of the strategy's Python work in a step, without the work in its micro-batches.

        They are ``step`` + ``tensors`` · ``tensor``.

        Args:
            tensors: number of the rank's trainable parameter tensors.
        """
        return self.step + tensors * self.tensor

    def of_micro_batch(self, units: float) -> float:
        """Return the seconds of the strategy's Python work in one micro-batch: ``micro_batch`` + units · ``unit``.

        Args:
            units: number of the rank's parameter tensors, with FSDP of wrapped modules.
        """
        return self.micro_batch + units * self.unit


def strategy_key(config: PlannedRun, shape: Mapping[str, int]) -> str:
    """Return the name under which ``tutti bench strategies`` measures the Python work of a run's strategy.

    Args:
        config: configuration of the run, with a number of devices.
        shape: extents of the device mesh by axis; ``stage``, ``tensor`` and ``shard`` are read.

    Returns:
        ``single``, ``mirrored``, ``schedule`` (an all-reduce by a schedule), ``sharded-1`` to ``sharded-3`` (by ZeRO
        stage), ``local_sgd``, ``central_storage``, ``parameter_server``, ``tensor`` or ``pipeline``; the last two also
        for hybrids.
    """
    sync = config.strategy_choice.sync
    if shape["stage"] > 1:
        return "pipeline"
    if shape["tensor"] > 1:
        return "tensor"
    if stage := zero_stage(config.strategy_choice, shape):
        return f"sharded-{stage}"
    if isinstance(sync, LocalSGDConfig):
        return "local_sgd"
    if isinstance(sync, CentralConfig):
        return "central_storage"
    if isinstance(sync, ParameterServerConfig):
        return "parameter_server"
    if config.data_ranks == 1:
        return "single"
    return "schedule" if isinstance(sync, AllReduceConfig) and sync.schedule is not None else "mirrored"
