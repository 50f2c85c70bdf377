"""Queries of ``horovod.common.util``: which libraries and frameworks Horovod was built with."""

from __future__ import annotations

from tutti.horovod.torch.job import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = ["ccl_built", "ddl_built", "extension_available", "gloo_built", "mpi_built", "nccl_built"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework can be used by ``import horovod.NAME``: True for ``torch`` alone.

    Args:
        ext_base_name: name of the framework: ``torch``, ``tensorflow`` or ``mxnet``.
        verbose: accepted for Horovod's signature; no effect.
    """
    return ext_base_name == "torch"
