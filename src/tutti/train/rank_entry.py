"""Entry point of a rank of ``tutti train``. Importing it loads no torch, as the launcher imports it, too."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

from tutti.config.train_config import TrainConfig
from tutti.errors import no_memory
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.launcher.held_signals import held_signals
from tutti.python_compat import import_uncollected

PRELOADED = ("tutti.train.main", "torch._dynamo")
"""Modules that every rank imports before its first step, the second because every optimizer of torch imports it."""


def run_rank(task: str, config: TrainConfig, directory: Path | None) -> int:
    """Train a task on this rank, and return the exit code of the process. Collective over all ranks.

    The entry point of a rank of ``tutti train``, in a process of tutti's launcher or of a cluster engine. All output to
    stdout goes to stderr.

    Args:
        task: name of a built-in task, or ``file.py:function``.
        config: the resolved configuration.
        directory: the run directory; rank 0's value is used on all ranks. None to write no files.

    Returns:
        0 after success; failures are raised as exceptions.

    Raises:
        TuttiError: an expected failure, with its exit code; a failed allocation is ``NotEnoughMemory``.
    """
    heartbeat.training.enter(Phase.START, 0)
    with held_signals():
        import_uncollected(PRELOADED)
        # Modules stay: no collection is to visit them, and so write to memory that forked ranks share.
        gc.freeze()
        from tutti.train.main import train_rank

    try:
        with contextlib.redirect_stdout(sys.stderr):
            return train_rank(task, config, None if directory is None else str(directory))
    except Exception as error:
        if (foreseen := no_memory(error)) is not None:
            raise foreseen from error
        raise


def run_launched_rank(task: str, config: TrainConfig, directory: Path) -> None:
    """Train a task on this rank, in a process of the launcher; end it by SystemExit if the exit code is not 0.

    Args:
        task: name of a built-in task, or ``file.py:function``.
        config: the resolved configuration.
        directory: the run directory.

    Raises:
        SystemExit: ``run_rank`` returned a non-zero exit code.
        TuttiError: an expected failure, as ``run_rank``.
    """
    if code := run_rank(task, config, directory):
        raise SystemExit(code)
