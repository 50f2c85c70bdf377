"""Profile a few steps with torch's profiler, with the phases of a step as named regions.

The run's own methods are wrapped in these regions while it is profiled, and unwrapped afterwards: a run that is not
profiled has no overhead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from tutti.device import profiled_activities, profiled_time
from tutti.errors import DiskError

if TYPE_CHECKING:
    from tutti.train.run import Run

PHASES = ("data", "forward", "backward", "weight", "exchange", "update")
TABLE = "operations.txt"
_ROWS, _NAME_WIDTH = 20, 45


@contextmanager
def profiled(run: Run, folder: Path) -> Iterator[None]:
    """Profile this rank's part of ``run`` within the block.

    Writes ``folder/rank{N}.json``, a trace for ui.perfetto.dev or chrome://tracing, and on rank 0 ``operations.txt``.
    Raises DiskError where they cannot be written.
    """
    comm, taken = run.context.comms.world, run.taken
    activities = profiled_activities(comm.device)
    # Kineto, the profiler's library, prints every start and stop to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    profiler = torch.profiler.profile(activities=activities)
    with phases(run), profiler:
        yield
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank{comm.global_rank}.json"))
        if comm.global_rank == 0:
            (folder / TABLE).write_text(
                _table(profiler, run.taken - taken, profiled_time(comm.device)), encoding="utf-8"
            )
    except OSError as error:
        raise DiskError("cannot write the profile", where=str(folder), why=error.strerror) from error


@contextmanager
def phases(run: Run, region: Callable[[str], AbstractContextManager[Any]] = record_function) -> Iterator[None]:
    """Run every phase of a step within the block in a ``region`` of the phase's name."""
    forward = (run, "loss_fn") if run.loss_fn is not None else (run.model, "forward")
    named: list[tuple[Any, str, str]] = [
        (run, "_draw", "data"),
        (*forward, "forward"),
        # Every model layout and every custom training loop calls this function.
        (torch.autograd, "backward", "backward"),
        *((split, "inputs", "backward") for split in run.replica.split_backwards),
        *((split, "weights", "weight") for split in run.replica.split_backwards),
        *((run.gradient_sync, method, "exchange") for method in ("begin_worker", "end_worker", "reduce_gradients")),
        (run.gradient_sync, "optimizer_step", "update"),
    ]
    with ExitStack() as stack:
        for owner, attribute, phase in named:
            stack.enter_context(named_as(owner, attribute, partial(_as, phase, region)))
        yield


def _as(
    phase: str,
    region: Callable[[str], AbstractContextManager[Any]],
    inner: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    with region(phase):
        return inner(*args, **options)


@contextmanager
def named_as(owner: Any, attribute: str, around: Callable[..., Any]) -> Iterator[None]:
    """Replace ``owner.attribute(…)`` by ``around(owner.attribute, …)`` within the block.

    Args:
        owner: a module, class or object; its attribute is restored after the block.
        attribute: name of the function or method.
        around: called with the original function and the call's arguments.
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
    spent = {event.key: event.cpu_time_total / 1e3 / max(steps, 1) for event in averages if event.key in PHASES}
    lines = [f"{phase:<10} {spent[phase]:>10.3f} ms a step" for phase in PHASES if phase in spent]
    longest = averages.table(sort_by=column, row_limit=_ROWS, max_name_column_width=_NAME_WIDTH)
    return "\n".join([f"{steps} steps on rank 0", *lines, "", longest, ""])


class Window:
    """Profile or trace a window of steps, counted from the run's present step.

    Args:
        run: the run.
        watch: ``profiled`` or ``traced``, entered before the window's first step and left after its last.
        folder: the folder for its files.
        table: name of the file that rank 0 prints at the end.
        first: first step of the window, from 1; earlier steps are warm-up.
        steps: number of steps in the window.
    """

    def __init__(
        self,
        run: Run,
        watch: Callable[[Run, Path], AbstractContextManager[None]],
        folder: Path,
        table: str,
        first: int,
        steps: int,
    ) -> None:
        self._run, self._watch, self._folder, self._table = run, watch, folder, table
        self._begin, self._end = run.taken + first - 1, run.taken + first - 1 + steps
        self._open = ExitStack()

    def look(self) -> None:
        """Open the window before its first step, close it after its last; call before the first step and after each."""
        if self._run.taken == self._begin:
            self._open.enter_context(self._watch(self._run, self._folder))
        elif self._run.taken == self._end:
            self._open.close()

    def close(self) -> None:
        """Close the window if the run ends within it."""
        self._open.close()

    def table(self) -> str:
        """Return the text that rank 0 prints at the end: the table, and the folder of all files."""
        path = self._folder / self._table
        text = path.read_text(encoding="utf-8") if path.is_file() else "the run ended before the first of its steps\n"
        return f"{text}For ui.perfetto.dev: {self._folder}"
