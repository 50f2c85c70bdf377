"""The classes of the strategies, by the options that ask for them. Imports no torch, and a class when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tutti.config.layout_config import HybridConfig, LayersConfig, PipelineConfig, TensorConfig, WholeConfig
from tutti.config.spec import StrategyOptions
from tutti.config.strategy_choice import StrategyChoice
from tutti.config.sync_config import (
    AllReduceConfig,
    CentralConfig,
    DiLoCoConfig,
    LocalSGDConfig,
    ParameterServerConfig,
    ShardedConfig,
    SplitConfig,
)
from tutti.types.custom_loop_sync import CustomLoopSync
from tutti.types.replica_runner import ModelLayout
from tutti.types.run_context import RunContext

LAYOUTS: Mapping[type[StrategyOptions], str] = {
    WholeConfig: "ddp.whole_layout:WholeLayout",
    LayersConfig: "pipeline.pipeline_layout:PipelineLayout",
    PipelineConfig: "pipeline.pipeline_layout:PipelineLayout",
    TensorConfig: "tensor.tensor_layout:TensorLayout",
    HybridConfig: "hybrid_layout:HybridLayout",
}
"""Class that places a replica of the model on ranks, as text ``module:class`` below ``tutti.parallel``, by options."""

SYNCS: Mapping[tuple[type[StrategyOptions], str | None], str] = {
    (AllReduceConfig, None): "ddp.allreduce:AllReduceSync",
    (SplitConfig, None): "ddp.allreduce:AllReduceSync",
    (SplitConfig, "sharded"): "fsdp.sharded:ShardedSync",
    (CentralConfig, None): "central_storage.central_storage:CentralStorageSync",
    (LocalSGDConfig, None): "local_sgd.local_sgd:LocalSGDSync",
    (DiLoCoConfig, None): "local_sgd.diloco:DiLoCoSync",
    (ParameterServerConfig, None): "parameter_server.readable_sums:ReadableServerSync",
    (ParameterServerConfig, "backup"): "parameter_server.synchronous:SynchronousServerSync",
    (ParameterServerConfig, "asynchronous"): "parameter_server.asynchronous:AsynchronousServerSync",
    (ShardedConfig, None): "fsdp.sharded:ShardedSync",
}
"""Class that reduces gradients over replicas and makes the updates, as text of the same form.

The key is the type of the options with their ``variant``, which chooses between classes.
"""


def make_strategy(choice: StrategyChoice, run_context: RunContext) -> tuple[ModelLayout, CustomLoopSync]:
    """Construct the model layout and the gradient synchronisation of a strategy.

    With sharded parameters (ZeRO, FSDP) the first call is collective over all ranks and blocks: the synchronisation
    makes the communicators along the mesh axes ``shard`` and ``replica``. Other strategies send nothing. The caller has
    checked by ``check_strategy`` that the options go together. Neither object has the model yet; the caller hands the
    model to the layout's ``build``, and its result to the synchronisation's ``attach``.

    Args:
        choice: the strategy with its options.
        run_context: communicators and settings of the run.

    Returns:
        A pair. The layout (``ModelLayout``) places a replica of the model on one rank or several: whole, cut into
        pipeline stages, or split over tensor ranks. The synchronisation (``CustomLoopSync``) reduces gradients over the
        replicas and makes the updates.

    Raises:
        RuntimeError, PeerError, MismatchError: while the communicators are made, a rank does not take part in time, has
            ended, or is in another call.
    """
    layout = _load(LAYOUTS[type(choice.layout)])(choice.layout, run_context)
    sync = choice.sync
    return layout, _load(SYNCS[type(sync), sync.variant])(sync, run_context)


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"tutti.parallel.{module}"), attribute)
