"""``tutti train`` and ``tutti run`` as a user starts them, with a task of the user's own, small enough for faults."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.forkserver import Process
from tests.launching import SAFETY_NET, SOURCE, Result, Running

_TASK = """
import os, random, signal, sys, time
import torch
from torch import nn
from tutti.tasks.task import Task

RANK = int(os.environ.get("RANK", "0"))
HERE = {here!r}

class Samples:
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), index % 3

def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

def loss(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)

{body}

def task():
    return Task(name="own", model=model, loss=loss, train=Samples())
"""
_CLEARED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def write_task(folder: Path, body: str = "") -> str:
    """A task file whose names ``body`` overrides; what ``tutti train`` is given."""
    (folder / "own.py").write_text(_TASK.format(here=str(folder), body=textwrap.dedent(body)), encoding="utf-8")
    return "own.py:task"


@contextmanager
def starting(
    folder: Path, *words: str, program: tuple[str, ...] = ("-m", "tutti"), **environ: str
) -> Iterator[Running]:
    """``tutti words…`` under way in ``folder``; whatever is left of it at the end is killed."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    outer = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    own = {"PYTHONPATH": str(SOURCE), "TMPDIR": str(temporary), "COLUMNS": "100"}
    process = Process([*program, *words], folder, outer | own | environ)
    running = Running(process, folder)
    try:
        yield running
    finally:
        for left in running.workers():
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()
        process.communicate()


def tutti(folder: Path, *words: str, **environ: str) -> Result:
    """Run ``tutti words…`` to its end."""
    with starting(folder, *words, **environ) as running:
        out, err = running.launcher.communicate(timeout=SAFETY_NET)
        return Result(running.launcher.returncode, out, err)


def complaint(result: Result) -> list[str]:
    """What the user reads about a failure: all from the first line that begins with ``tutti:``."""
    lines = result.err.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("tutti:")), len(lines))
    return lines[first:]
