"""``horovod.runner.run``, another name of ``horovod.run``."""

from __future__ import annotations

from tutti.horovod.run_function import run

__all__ = ["run"]
