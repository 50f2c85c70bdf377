"""Drop-in for Horovod: ``import tutti.horovod.torch as hvd`` has the names, behaviour and messages of Horovod 0.28.

``install`` lets unedited scripts with ``import horovod.torch as hvd`` run; so do ``python -m tutti.horovod script.py``
and ``tutti run --horovod``. The package has the names of ``tutti.horovod.torch`` too, loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tutti.horovod.installing import install
from tutti.horovod.run_function import run

__all__ = ["install", "run"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    served = import_module("tutti.horovod.torch")
    try:
        return getattr(served, name)
    except AttributeError:
        raise AttributeError(f"module 'tutti.horovod' has no attribute '{name}'") from None
