"""Functions of ``horovod.common.util``: what Horovod was built with, and environment variables for a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tutti.horovod.torch.job import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = ["ccl_built", "ddl_built", "env", "extension_available", "gloo_built", "mpi_built", "nccl_built"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework can be used by ``import horovod.NAME``: True for ``torch`` alone.

    Args:
        ext_base_name: name of the framework: ``torch``, ``tensorflow`` or ``mxnet``.
        verbose: accepted for Horovod's signature; no effect.
    """
    return ext_base_name == "torch"


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables of this process within a ``with`` block, and restore them after it.

    Args:
        kwargs: values by name; a variable whose value is None stays as it is.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
