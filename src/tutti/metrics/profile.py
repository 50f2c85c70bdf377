"""Profile steps with torch's profiler: the phases of a step, and the files that a profile becomes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tutti.comm.communicator import Communicator
from tutti.device import profiled_activities, profiled_time
from tutti.errors import DiskError, counted

PHASES = ("data", "forward", "backward", "weight", "exchange", "update")
TABLE = "operations.txt"
_ROWS, _NAME_WIDTH = 20, 45


def make_profiler(device: torch.device) -> torch.profiler.profile:
    """Return a ``torch.profiler.profile`` that records this process's CPU operations and the kernels on ``device``.

    The profiler is not started: the caller calls its ``start`` and ``stop``. Not collective; each rank makes its own.
    Sets the environment variable ``KINETO_LOG_LEVEL`` to 6 if it is unset, so that the profiler writes no log lines.

    Args:
        device: the device of this rank; for a CPU only CPU operations are recorded.
    """
    # Kineto, the profiler's library, prints every start and stop to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    return torch.profiler.profile(activities=profiled_activities(device), acc_events=True)


def write_profile(profiler: torch.profiler.profile, comm: Communicator, folder: Path, steps: int) -> None:
    """Write this rank's profile as ``folder/rank{N}.json``, and on rank 0 a table, ``operations.txt``. Not collective.

    Called on each rank after the last profiled step (``--profile``).

    The JSON is a trace for ui.perfetto.dev or chrome://tracing. The table has the milliseconds that each phase of
    training (such as ``forward``) takes a step, and below the operators with the most time.

    Args:
        profiler: a stopped profiler that has recorded this rank's steps.
        comm: communicator of all ranks; only this rank's number and device are read from it.
        folder: folder of the files, created if it does not exist.
        steps: number of recorded steps, by which the table divides the time of each phase.

    Raises:
        DiskError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank{comm.global_rank}.json"))
        if comm.global_rank == 0:
            (folder / TABLE).write_text(_table(profiler, steps, profiled_time(comm.device)), encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the profile", where=str(folder), why=error.strerror) from error


@contextmanager
def named_as(owner: Any, attribute: str, around: Callable[..., Any]) -> Iterator[None]:
    """Return a context manager that sets a wrapper in place of a function or method while its block runs.

    Profiles and traces use it to record the time that methods of a run take. Every caller in this process gets the
    wrapper, in any thread. At the end of the block, also after an exception, ``owner`` has its former attribute again.

    Args:
        owner: the module, class or object that has the function as an attribute.
        attribute: name of the attribute.
        around: called as ``around(original, *arguments, **named)`` in place of each call of the function, with the
            original function, or bound method, and the arguments of the call; its result is that of the call.
    """
    inner: Callable[..., Any] = getattr(owner, attribute)
    own = attribute in vars(owner)

    @wraps(inner)
    def outer(*args: Any, **options: Any) -> Any:
        return around(inner, *args, **options)

    setattr(owner, attribute, outer)
    try:
        yield
    finally:
        if own:
            setattr(owner, attribute, inner)
        else:
            delattr(owner, attribute)


def _table(profiler: torch.profiler.profile, steps: int, column: str) -> str:
    """Return a table with milliseconds a step of each phase, and the slowest operations."""
    averages = profiler.key_averages()
    spent = Counter[str]()
    for event in averages:
        # On an accelerator each phase is there twice: the host's time, and the span of its kernels, without host time.
        if event.key in PHASES:
            spent[event.key] += event.cpu_time_total / 1e3 / max(steps, 1)
    averages[:] = [event for event in averages if event.key not in PHASES]
    lines = [f"{phase:<10} {spent[phase]:>10.3f} ms a step" for phase in PHASES if phase in spent]
    longest = averages.table(sort_by=column, row_limit=_ROWS, max_name_column_width=_NAME_WIDTH)
    return "\n".join([f"{counted(steps, 'step')} on rank 0", *lines, "", longest, ""])
