"""Serve ``import horovod`` and its submodules in this process, without a distribution of that name."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import socket
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tutti.launcher.launch import run_script
from tutti.process_context import read_identity

SERVED = (
    "horovod",
    "horovod.torch",
    "horovod.torch.mpi_ops",
    "horovod.torch.compression",
    "horovod.torch.elastic",
    "horovod.torch.elastic.sampler",
    "horovod.torch.elastic.state",
    "horovod.torch.functions",
    "horovod.torch.optimizer",
    "horovod.torch.sync_batch_norm",
    "horovod.common",
    "horovod.common.elastic",
    "horovod.common.exceptions",
    "horovod.common.process_sets",
    "horovod.common.util",
    "horovod.runner",
)
"""Modules that a script can import; each is tutti's module of that name."""

_LOST = {
    "horovod.keras": "Keras",
    "horovod.tensorflow": "TensorFlow",
    "horovod.mxnet": "MXNet",
    "horovod.spark": "Spark",
    "horovod.ray": "Ray",
}

_EQUIVALENT = """The same in PyTorch:

    import horovod.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

docs/migrating-from-horovod.md has whole scripts."""

_SPAWNED = Path(__file__).with_name("spawned")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``horovod`` and its submodules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        lost = next((name for name in _LOST if fullname == name or fullname.startswith(name + ".")), None)
        if lost is not None:
            served = ", ".join(sorted(SERVED))
            raise ImportError(f"tutti does not serve {fullname} ({_LOST[lost]}); it serves {served}. {_EQUIVALENT}")
        if fullname not in SERVED:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Alias(spec.name, importlib.import_module(f"tutti.{spec.name}"))

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.setdefault("__version__", "0.28.1")


class _Alias(ModuleType):
    """A module with another's names."""

    def __init__(self, name: str, served: ModuleType) -> None:
        super().__init__(name, served.__doc__)
        self.__dict__["_served"] = served

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_served"], name)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *dir(self.__dict__["_served"])})


def install(replace: bool = False) -> bool:
    """Make ``import horovod`` load tutti's implementation in this process, and in those that it spawns, from now on.

    A real Horovod that is installed or already imported wins, unless ``replace`` is given. tutti serves
    ``horovod.torch``, ``horovod.common`` and ``horovod.runner``; to import ``horovod.tensorflow``, ``horovod.keras``,
    ``horovod.mxnet``, ``horovod.spark`` or ``horovod.ray`` then raises ImportError. A second call changes nothing.

    Args:
        replace: take the place of a real Horovod that is installed.

    Returns:
        Whether ``import horovod`` loads tutti; False where a real Horovod wins.

    Raises:
        ImportError: with ``replace``, where another ``horovod`` is imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if "horovod" in sys.modules:
        if replace:
            raise ImportError("horovod is imported already; call tutti.horovod.install before it")
        return False
    found = None if replace else importlib.util.find_spec("horovod")
    if found is not None and found.origin != str(_SPAWNED / "horovod.py"):
        return False
    sys.meta_path.insert(0, _Finder())
    # The first is the folder of the script, in which a real Horovod may be.
    sys.path.insert(0 if replace else 1, str(_SPAWNED))
    return True


def serve_spawned() -> None:
    """Make ``import horovod`` load tutti's implementation in a process that ``multiprocessing`` has spawned.

    Called by the first ``import horovod`` of that process, which finds the file ``spawned/horovod.py``. Loader
    processes of the contexts ``spawn`` and ``forkserver`` import the script anew, and with it ``horovod``.
    """
    sys.meta_path.insert(0, _Finder())
    del sys.modules["horovod"]
    importlib.import_module("horovod")


def export_rank(environ: MutableMapping[str, str]) -> None:
    """Set the variables by which ``horovodrun`` tells a script its rank, for scripts that read them.

    The variables are ``HOROVOD_RANK`` and ``HOROVOD_SIZE`` (of the job), ``HOROVOD_LOCAL_RANK`` and
    ``HOROVOD_LOCAL_SIZE`` (on this node), ``HOROVOD_CROSS_RANK`` and ``HOROVOD_CROSS_SIZE`` (index of this node and
    number of nodes); and ``HOROVOD_HOSTNAME`` (name of this node), unless a launcher has set it. Nothing is set where
    ``RANK`` and ``WORLD_SIZE`` are missing, which tutti's launcher and torchrun set: for example in a process of an
    elastic job that has no rank yet.

    Args:
        environ: environment variables of this rank; the variables are added to it.

    Raises:
        UsageError: the launcher's variables contradict each other.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        identity = read_identity(environ)
        for field in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            environ[f"HOROVOD_{field.upper()}"] = str(getattr(identity, field))
        environ.setdefault("HOROVOD_HOSTNAME", socket.gethostname())


def run_horovod_script(script: str, argv: list[str], module: bool = False) -> None:
    """Run a script or module as ``__main__`` in this process, with ``import horovod`` served by tutti.

    A real Horovod that is installed is imported instead. Returns when the script ends; exceptions of the script are
    passed on.

    Args:
        script: path of the script, or name of the module.
        argv: arguments of the script, without its own name.
        module: whether ``script`` names a module.

    Raises:
        UsageError: the launcher's environment variables contradict each other.
    """
    install()
    export_rank(os.environ)
    run_script(script, argv, module)
