"""Functions of ``horovod.common.util``: what Horovod was built with, and environment variables for a block."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tutti.horovod.torch.job import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = ["ccl_built", "ddl_built", "env", "extension_available", "gloo_built", "mpi_built", "nccl_built"]


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
