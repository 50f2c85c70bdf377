"""tutti: one PyTorch model, trained by many devices as if by one.

Names load when they are first used, so that ``import tutti`` needs nothing but Python.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

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
        "tutti.world.context",
    ),
    "prepare": "tutti.training.prepare",
    "Run": "tutti.training.run",
    "DiagnosisWarning": "tutti.training.diagnoses",
    "spilling": "tutti.nn.spill",
    "Task": "tutti.tasks.task",
}

__all__ = [*_HOME]

if TYPE_CHECKING:
    from tutti.nn.spill import spilling as spilling
    from tutti.tasks.task import Task as Task
    from tutti.training.diagnoses import DiagnosisWarning as DiagnosisWarning
    from tutti.training.prepare import prepare as prepare
    from tutti.training.run import Run as Run
    from tutti.world.context import cross_rank as cross_rank
    from tutti.world.context import cross_size as cross_size
    from tutti.world.context import init as init
    from tutti.world.context import is_initialized as is_initialized
    from tutti.world.context import local_rank as local_rank
    from tutti.world.context import local_size as local_size
    from tutti.world.context import rank as rank
    from tutti.world.context import shutdown as shutdown
    from tutti.world.context import size as size


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tutti' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
