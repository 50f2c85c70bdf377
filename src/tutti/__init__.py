"""tutti: one PyTorch model, trained by many devices as if by one.

Submodules are imported when a public name is first used, so that ``import tutti`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tutti import distribution

__version__ = distribution.VERSION

_HOME = {
    **dict.fromkeys(
        (
            "init",
            "shutdown",
            "is_initialized",
            "rank",
            "size",
            "local_rank",
            "local_size",
            "cross_rank",
            "cross_size",
        ),
        "tutti.launcher.context",
    ),
    **dict.fromkeys(
        (
            "allreduce",
            "grouped_allreduce",
            "allgather",
            "grouped_allgather",
            "broadcast",
            "reducescatter",
            "grouped_reducescatter",
            "alltoall",
            "barrier",
            "join",
            "broadcast_object",
            "allgather_object",
        ),
        "tutti.comm.collectives",
    ),
    **dict.fromkeys(
        (
            "allreduce_async",
            "grouped_allreduce_async",
            "sparse_allreduce_async",
            "allgather_async",
            "grouped_allgather_async",
            "broadcast_async",
            "grouped_broadcast_async",
            "reducescatter_async",
            "grouped_reducescatter_async",
            "alltoall_async",
        ),
        "tutti.comm.async_collectives",
    ),
    **dict.fromkeys(
        (
            "ProcessSet",
            "add_process_set",
            "remove_process_set",
        ),
        "tutti.comm.process_set",
    ),
    "launch": "tutti.launcher.function_ranks",
    "prepare": "tutti.train.prepare",
    "strategy": "tutti.train.strategy_spec",
    "EarlyStopping": "tutti.train.callbacks",
    "BestModel": "tutti.train.callbacks",
    "JsonLinesLogger": "tutti.train.metric_loggers",
    "TensorBoardLogger": "tutti.train.metric_loggers",
    "TrackioLogger": "tutti.train.metric_loggers",
    "WandbLogger": "tutti.train.metric_loggers",
    "MLflowLogger": "tutti.train.metric_loggers",
    "Run": "tutti.train.run",
    "DiagnosisWarning": "tutti.metrics.diagnoses",
    "spilling": "tutti.nn.init_on_disk",
    "Task": "tutti.tasks.task",
}

__all__ = [*_HOME]

if TYPE_CHECKING:
    from tutti.comm.async_collectives import allgather_async as allgather_async
    from tutti.comm.async_collectives import allreduce_async as allreduce_async
    from tutti.comm.async_collectives import alltoall_async as alltoall_async
    from tutti.comm.async_collectives import broadcast_async as broadcast_async
    from tutti.comm.async_collectives import grouped_allgather_async as grouped_allgather_async
    from tutti.comm.async_collectives import grouped_allreduce_async as grouped_allreduce_async
    from tutti.comm.async_collectives import grouped_broadcast_async as grouped_broadcast_async
    from tutti.comm.async_collectives import grouped_reducescatter_async as grouped_reducescatter_async
    from tutti.comm.async_collectives import reducescatter_async as reducescatter_async
    from tutti.comm.async_collectives import sparse_allreduce_async as sparse_allreduce_async
    from tutti.comm.collectives import allgather as allgather
    from tutti.comm.collectives import allgather_object as allgather_object
    from tutti.comm.collectives import allreduce as allreduce
    from tutti.comm.collectives import alltoall as alltoall
    from tutti.comm.collectives import barrier as barrier
    from tutti.comm.collectives import broadcast as broadcast
    from tutti.comm.collectives import broadcast_object as broadcast_object
    from tutti.comm.collectives import grouped_allgather as grouped_allgather
    from tutti.comm.collectives import grouped_allreduce as grouped_allreduce
    from tutti.comm.collectives import grouped_reducescatter as grouped_reducescatter
    from tutti.comm.collectives import join as join
    from tutti.comm.collectives import reducescatter as reducescatter
    from tutti.comm.process_set import ProcessSet as ProcessSet
    from tutti.comm.process_set import add_process_set as add_process_set
    from tutti.comm.process_set import remove_process_set as remove_process_set
    from tutti.launcher.context import cross_rank as cross_rank
    from tutti.launcher.context import cross_size as cross_size
    from tutti.launcher.context import init as init
    from tutti.launcher.context import is_initialized as is_initialized
    from tutti.launcher.context import local_rank as local_rank
    from tutti.launcher.context import local_size as local_size
    from tutti.launcher.context import rank as rank
    from tutti.launcher.context import shutdown as shutdown
    from tutti.launcher.context import size as size
    from tutti.launcher.function_ranks import launch as launch
    from tutti.metrics.diagnoses import DiagnosisWarning as DiagnosisWarning
    from tutti.nn.init_on_disk import spilling as spilling
    from tutti.tasks.task import Task as Task
    from tutti.train.callbacks import BestModel as BestModel
    from tutti.train.callbacks import EarlyStopping as EarlyStopping
    from tutti.train.metric_loggers import JsonLinesLogger as JsonLinesLogger
    from tutti.train.metric_loggers import MLflowLogger as MLflowLogger
    from tutti.train.metric_loggers import TensorBoardLogger as TensorBoardLogger
    from tutti.train.metric_loggers import TrackioLogger as TrackioLogger
    from tutti.train.metric_loggers import WandbLogger as WandbLogger
    from tutti.train.prepare import prepare as prepare
    from tutti.train.run import Run as Run
    from tutti.train.strategy_spec import strategy as strategy


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tutti' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
