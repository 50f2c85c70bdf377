"""Pipeline and tensor parallelism together: a replica is cut into stages, and each stage is split over tensor ranks."""

from __future__ import annotations

from torch import nn

from tutti.config.layout_config import HybridConfig
from tutti.parallel.ddp.whole_layout import WholeRunner
from tutti.parallel.pipeline.pipeline_layout import PipelineLayout
from tutti.parallel.pipeline.pipeline_runner import PipelineRunner
from tutti.parallel.pipeline.virtual_stage import read_directly
from tutti.parallel.tensor.loss_parallel_plan import Outputs
from tutti.parallel.tensor.tensor_layout import TensorLayout
from tutti.parallel.tensor.tp_apply import TensorParallelizer
from tutti.types.run_context import RunContext


class HybridLayout:
    """Cuts a model into pipeline stages and splits the layers of each over tensor ranks (``--strategy hybrid``).

    Args:
        config: options of the strategy.
        run_context: mesh, communicators and flags of the run.
    """

    def __init__(self, config: HybridConfig, run_context: RunContext) -> None:
        self._config, self._run_context = config, run_context

    def build(self, plain: nn.Module) -> PipelineRunner | WholeRunner:
        """Build this rank's part of the replica: the layers of its pipeline stage, split over the tensor ranks.

        Collective over all ranks of the job with several stages, otherwise over the tensor ranks: the ranks of a
        replica compare their models, the first tensor rank of each stage broadcasts the tensor-parallel plan and all
        values to the other tensor ranks of the stage, and all ranks compare the cuts that they have found. If the run
        has a loss function, it runs a few times before the first step: with two samples on the first tensor ranks, to
        find that plan, and with several stages on each rank with the first micro-batch, to find the cuts.

        Args:
            plain: the whole model, the same on every rank; changed in place: parameters become slices, and placeholders
                stand for tensors of other stages.

        Returns:
            A ``PipelineRunner``, whose ``run`` sends micro-batches through all stages of the replica and computes this
            rank's tensor slices of its stages; with a single stage a ``WholeRunner``, whose ``run`` computes this
            rank's tensor slices of the whole model.

        Raises:
            UsageError: the model cannot be cut into stages, its layers cannot be split over the tensor ranks as the
                options ask, or activation checkpointing matches no module.
            MismatchError: the ranks have built different models.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        run_context, config = self._run_context, self._config
        if run_context.mesh.stage == 1:
            return TensorLayout(config, run_context).build(plain)
        pipeline, division = PipelineLayout(config, run_context), TensorParallelizer(plain, run_context, config)
        holding = pipeline.cut_stages(plain, division.closed)
        models = () if holding is None else holding.models
        for each in models:
            read = [name for nodes in each.cuts.stages for name in read_directly(nodes, each.model)]
            division.check([f"{each.name}.{name}".lstrip(".") for name in read])
        division.apply()
        replica = pipeline.replica(plain, holding)
        for each in models if division.parted else ():
            for virtual_stage in each.virtual_stages:
                # Only the last stage's output, which the loss function takes, may stay split between tensor ranks.
                Outputs(virtual_stage.module, keep=not virtual_stage.outgoing and not each.cuts.several_calls)
        division.mark(replica)
        return replica
