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
    "prepare": "tutti.train.prepare",
    "Run": "tutti.train.run",
    "DiagnosisWarning": "tutti.metrics.diagnoses",
    "spilling": "tutti.nn.init_on_disk",
    "Task": "tutti.tasks.task",
}

__all__ = [*_HOME]

if TYPE_CHECKING:
    from tutti.launcher.context import cross_rank as cross_rank
    from tutti.launcher.context import cross_size as cross_size
    from tutti.launcher.context import init as init
    from tutti.launcher.context import is_initialized as is_initialized
    from tutti.launcher.context import local_rank as local_rank
    from tutti.launcher.context import local_size as local_size
    from tutti.launcher.context import rank as rank
    from tutti.launcher.context import shutdown as shutdown
    from tutti.launcher.context import size as size
    from tutti.metrics.diagnoses import DiagnosisWarning as DiagnosisWarning
    from tutti.nn.init_on_disk import spilling as spilling
    from tutti.tasks.task import Task as Task
    from tutti.train.prepare import prepare as prepare
    from tutti.train.run import Run as Run


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tutti' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
