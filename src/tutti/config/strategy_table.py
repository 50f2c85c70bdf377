"""The table of strategies: options and capabilities of each; its classes are in `parallel/registry.py`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tutti.config.layout_config import HybridConfig, LayersConfig, PipelineConfig, TensorConfig, WholeConfig
from tutti.config.spec import StrategyOptions
from tutti.config.sync_config import (
    AllReduceConfig,
    CentralConfig,
    DiLoCoConfig,
    LocalSGDConfig,
    ParameterServerConfig,
    ShardedConfig,
    SplitConfig,
)


@dataclass(frozen=True)
class Strategy:
    """One strategy of distributed training, a row of the table: its classes of options, and its capabilities.

    A logical worker is one of N fixed shares of the global batch.

    Attributes:
        layout: dataclass of the options of the model layout, which places a replica of the model on ranks.
        sync: dataclass of the options of the gradient synchronisation, which reduces gradients over replicas and makes
            the updates; no field name occurs in both dataclasses.
        summary: description in one line.
        reproducible: whether ``--reproducible`` gives the same bits on any number of data ranks.
        single_update: whether all logical workers make one update together, from the sum of their gradients.
        custom_loop: whether scripts may have training loops of their own, with ``run.backward`` and ``optimizer.step``.
        local_steps: whether each worker has and updates its own weights; custom training loops then need one worker for
            each data rank.
        shared_weights: whether workers hold the same weights at any time, so that batch norm may pool their samples.
        averages: whether all ranks see the same parameters after an update, so that an average of the weights is
            defined.
        worker_gradients: whether each logical worker's own gradient exists on one rank before the sum.
        own_backward: whether each micro-batch has a backward of its own; False where one backward computes all
            micro-batches of a worker.
        sparse_devices: largest number of devices on which the strategy exchanges sparse gradients, 0 for none; None for
            no limit. On more devices a model runs only if its gradients can be made dense.
        own_copies: whether every rank has its own full copy of parameters and optimizer state, into which a script may
            load without collectives.
        optimizer_here: whether the optimizer's state is on ranks, and not on parameter servers.
        one_copy: whether parameters and optimizer state exist once for all devices, in host memory or on servers.
        fault_tolerant: whether the run goes on when a rank is killed: no rank needs another for a step.
        synchronous: whether every rank makes all steps of the run.
        fixed_addresses: whether parameters are the same tensors at the same addresses in all steps, and no tensor of a
            forward or backward is read by another device or in another step, so that CUDA graphs can be replayed.
        shares_workers: whether several data ranks may share the micro-batches of one logical worker.
        most_devices: largest number of devices; None for no limit.
        needs: a package that the strategy requires, as (name to import, name to install, extra of tutti); None for
            none.
    """

    layout: type[StrategyOptions]
    sync: type[StrategyOptions]
    summary: str
    reproducible: bool = True
    single_update: bool = True
    custom_loop: bool = True
    local_steps: bool = False
    shared_weights: bool = True
    averages: bool = True
    worker_gradients: bool = True
    own_backward: bool = True
    sparse_devices: int | None = 1
    own_copies: bool = False
    optimizer_here: bool = True
    one_copy: bool = False
    fault_tolerant: bool = False
    synchronous: bool = True
    fixed_addresses: bool = False
    shares_workers: bool = True
    most_devices: int | None = None
    needs: tuple[str, str, str] | None = None


ALIASES: Mapping[str, str] = {
    "ddp": "mirrored",
    "fsdp": "sharded",
    "zero": "sharded",
    "tp": "tensor",
    "pp": "pipeline",
}
"""Accepted aliases of strategies' names."""

TABLE: Mapping[str, Strategy] = {
    "single": Strategy(
        WholeConfig,
        AllReduceConfig,
        "one device; still any number of workers",
        sparse_devices=None,
        own_copies=True,
        fixed_addresses=True,
        most_devices=1,
    ),
    "mirrored": Strategy(
        WholeConfig,
        AllReduceConfig,
        "a copy on every device, gradients summed",
        sparse_devices=None,
        own_copies=True,
        fixed_addresses=True,
    ),
    "model_parallel": Strategy(
        LayersConfig,
        AllReduceConfig,
        "layers on different devices, which work in turn",
        own_backward=False,
    ),
    "pipeline": Strategy(
        PipelineConfig,
        AllReduceConfig,
        "layers on different devices, with micro-batches under way on all of them",
        own_backward=False,
    ),
    "tensor": Strategy(
        TensorConfig,
        AllReduceConfig,
        "each layer split over devices that compute it together",
        reproducible=False,
    ),
    "hybrid": Strategy(
        HybridConfig,
        SplitConfig,
        "replicas × shards × stages × split layers, on one device mesh",
        reproducible=False,
        own_backward=False,
    ),
    "central_storage": Strategy(
        WholeConfig,
        CentralConfig,
        "one copy of parameters and optimizer state in the host's memory",
        sparse_devices=None,
        one_copy=True,
    ),
    "local_sgd": Strategy(
        WholeConfig,
        LocalSGDConfig,
        "every worker trains alone, parameters averaged every H steps",
        single_update=False,
        sparse_devices=None,
        local_steps=True,
        shared_weights=False,
        shares_workers=False,
    ),
    "diloco": Strategy(
        WholeConfig,
        DiLoCoConfig,
        "every worker trains alone, an outer optimizer steps along their mean change",
        single_update=False,
        sparse_devices=None,
        local_steps=True,
        shared_weights=False,
        shares_workers=False,
    ),
    "parameter_server": Strategy(
        WholeConfig,
        ParameterServerConfig,
        "parameters and optimizer on servers, to which workers push their gradients",
        sparse_devices=0,
        optimizer_here=False,
        shares_workers=False,
        one_copy=True,
        needs=("zmq", "pyzmq", "server"),
    ),
    "sharded": Strategy(
        WholeConfig,
        ShardedConfig,
        "optimizer state, gradients and parameters shared out over the devices",
        reproducible=False,
        worker_gradients=False,
    ),
}
