"""Functions of ``horovod.common.util`` that scripts and copies of ``DistributedOptimizer`` use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache as _cache  # noqa: F401 (as in Horovod)

from tutti.horovod.torch.job import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built
from tutti.horovod.torch.optimizer import split_list

__all__ = [
    "ccl_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework can be used by ``import horovod.NAME``: True for ``torch`` alone.

    Args:
        ext_base_name: name of the framework: ``torch``, ``tensorflow`` or ``mxnet``.
        verbose: accepted for Horovod's signature; no effect.
    """
    return ext_base_name == "torch"


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """Return a context manager that sets environment variables of this process, and restores them after its block.

    Args:
        kwargs: values by name; a variable whose value is None stays as it is.
    """
    from tutti.launcher.launch import environment_set

    return environment_set({name: value for name, value in kwargs.items() if value is not None})


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks, at least 1, is a power of two, as ``hvd.Adasum`` demands."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
