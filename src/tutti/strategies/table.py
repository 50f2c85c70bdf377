"""One row a strategy: which classes make it, with which options, and what it promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tutti.exchanges.config import (
    AllReduceConfig,
    CentralConfig,
    DiLoCoConfig,
    ParameterServerConfig,
    PeriodicConfig,
    ShardedConfig,
    SplitConfig,
)
from tutti.layouts.config import HybridConfig, LayersConfig, PipelineConfig, TensorConfig, WholeConfig
from tutti.spec import StrategyOptions


@dataclass(frozen=True)
class Strategy:
    """One row: which classes make it, with which options, and what it promises.

    Attributes:
        layout, exchange: ``module:class`` below ``tutti.layouts`` and ``tutti.exchanges``.
        layout_config, exchange_config: their options; field names do not overlap.
        summary: one line for people.
        reproducible: bit-identical on any number of data ranks in reproducible mode (has a tolerance-0 row).
        workers_together: all workers make one update, from the sum of their gradients.
        own_loop: works with ``run.backward`` and a gated ``optimizer.step``.
        one_model: workers hold the same weights at any time, so that their samples may be normalised together.
        averages: all ranks see the same parameters after an update, so that their average can be kept.
        worker_gradients: each worker's own gradient can be seen before the sum.
        outlives: ranks go on where one is killed; none needs another for a step.
        in_step: every rank makes as many steps as the run has.
        most_devices: largest number of devices; None for no limit.
        needs: module, package and extra that it does not work without.
    """

    layout: str
    layout_config: type[StrategyOptions]
    exchange: str
    exchange_config: type[StrategyOptions]
    summary: str
    reproducible: bool = True
    workers_together: bool = True
    own_loop: bool = True
    one_model: bool = True
    averages: bool = True
    worker_gradients: bool = True
    outlives: bool = False
    in_step: bool = True
    most_devices: int | None = None
    needs: tuple[str, str, str] | None = None


_WHOLE, _ALLREDUCE = ("whole:Whole", WholeConfig), ("allreduce:AllReduce", AllReduceConfig)

TABLE: Mapping[str, Strategy] = {
    "single": Strategy(*_WHOLE, *_ALLREDUCE, "one device; still any number of workers", most_devices=1),
    "mirrored": Strategy(*_WHOLE, *_ALLREDUCE, "a copy on every device, gradients summed"),
    "model_parallel": Strategy(
        "pipeline:Pipeline",
        LayersConfig,
        *_ALLREDUCE,
        "layers on different devices, which work in turn",
        own_loop=False,
    ),
    "pipeline": Strategy(
        "pipeline:Pipeline",
        PipelineConfig,
        *_ALLREDUCE,
        "layers on different devices, with micro-batches under way on all of them",
        own_loop=False,
    ),
    "tensor": Strategy(
        "tensor:Tensor",
        TensorConfig,
        *_ALLREDUCE,
        "each layer split over devices that compute it together",
        reproducible=False,
    ),
    "hybrid": Strategy(
        "hybrid:Hybrid",
        HybridConfig,
        "allreduce:AllReduce",
        SplitConfig,
        "replicas × shards × stages × split layers, on one grid",
        reproducible=False,
        own_loop=False,
    ),
    "central_storage": Strategy(
        *_WHOLE, "central:Central", CentralConfig, "one copy of parameters and optimizer state in the host's memory"
    ),
    "local_sgd": Strategy(
        *_WHOLE,
        "periodic:Periodic",
        PeriodicConfig,
        "every worker trains alone, parameters averaged every H steps",
        workers_together=False,
        own_loop=False,
        one_model=False,
    ),
    "diloco": Strategy(
        *_WHOLE,
        "diloco:DiLoCo",
        DiLoCoConfig,
        "every worker trains alone, an outer optimizer steps along their mean change",
        workers_together=False,
        own_loop=False,
        one_model=False,
    ),
    "parameter_server": Strategy(
        *_WHOLE,
        "server.synchronous:Synchronous",
        ParameterServerConfig,
        "parameters and optimizer on servers, to which workers push their gradients",
        needs=("zmq", "pyzmq", "server"),
    ),
    "sharded": Strategy(
        *_WHOLE,
        "sharded:Sharded",
        ShardedConfig,
        "optimizer state, gradients and parameters shared out over the devices",
        reproducible=False,
        worker_gradients=False,
    ),
}
