"""Profile or trace a few steps of a run, with the phases of a step as named regions.

The run's own methods are wrapped in these regions while it is profiled or traced, and unwrapped afterwards: without
either, a run has no overhead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.profiler import record_function

from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError, counted
from tutti.metrics import profile, trace
from tutti.metrics.listener import Listener
from tutti.metrics.profile import make_profiler, named_as, write_profile
from tutti.metrics.trace import TraceRecorder

if TYPE_CHECKING:
    from tutti.train.run import Run

Region: TypeAlias = Callable[[str], AbstractContextManager[Any]]
"""Returns the context manager around one phase, given its name."""


@contextmanager
def profiled(run: Run, folder: Path) -> Iterator[None]:
    """Return a context manager that profiles this rank with PyTorch's profiler, and writes the files to ``folder``.

    Not collective. The files are written at the end of the block; none if an exception leaves it.

    Args:
        run: the run, whose steps are divided into named phases.
        folder: directory for ``rank{N}.json`` and rank 0's ``operations.txt``; made if missing.

    Raises:
        DiskError: the files cannot be written.
    """
    comm, taken = run.context.comms.world, run.local_step
    profiler = make_profiler(comm.device)
    with phases(run), profiler:
        yield
    write_profile(profiler, comm, folder, run.local_step - taken)


@contextmanager
def traced(run: Run, folder: Path) -> Iterator[None]:
    """Return a context manager that measures the phases of every rank's training steps.

    At its end rank 0 writes a timeline to ``folder``. Collective over all ranks: at its beginning two all-gathers that
    compare the step number and align the ranks' clocks, at its end one broadcast of the measured times from each rank.
    If an exception leaves the block, nothing is sent or written.

    Args:
        run: the run, whose steps are divided into named phases.
        folder: directory for ``timeline.svg``, ``trace.json`` and ``shares.txt``.

    Raises:
        DiskError: rank 0 cannot write; raised there alone.
        MismatchError: ranks have taken different numbers of steps.
    """
    recorder = TraceRecorder(run.context.comms.world, run.local_step)
    with phases(run, recorder.during), recorder.waits():
        yield
    recorder.write(folder, run.local_step)


@contextmanager
def phases(run: Run, region: Region = record_function) -> Iterator[None]:
    """Return a context manager within which each phase of a training step runs in a named region, for a profile.

    It replaces methods of the run, and ``torch.autograd.backward`` of this process, by wrappers, and restores them at
    the end. The phases are ``data`` (waiting for a batch), ``forward``, ``backward``, ``weight`` (weight backward of a
    zero-bubble pipeline), ``exchange`` (gradient reduction) and ``update``.

    Args:
        run: the run, whose methods are wrapped within the block.
        region: function that returns the context manager of a region, given the phase's name; by default a record of
            PyTorch's profiler.
    """
    called = [(passes, "pass_forward") for passes in run.replica.passes] or [(run.model, "forward")]
    forwards = called if run.loss_fn is None else [(run, "loss_fn")]
    named: list[tuple[Any, str, str]] = [
        (run, "_draw", "data"),
        *((*forward, "forward") for forward in forwards),
        # Every model layout and every custom training loop calls one of these functions.
        (torch.autograd, "backward", "backward"),
        (run.replica, "run_backward", "backward"),
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
    region: Region,
    inner: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    with region(phase):
        return inner(*args, **options)


class Window:
    """Profiles or traces a range of training steps, counted from the run's present step.

    Args:
        run: the run.
        watch: ``profiled`` or ``traced``, entered before the first step of the range and left after the last.
        folder: folder into which ``watch`` writes its files.
        table: name of the file that rank 0 prints at the end.
        first: first step of the range, from 1; earlier steps are warm-up.
        steps: number of steps in the range.
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
        self._begin, self._end = run.local_step + first - 1, run.local_step + first - 1 + steps
        self._open = ExitStack()
        self._begun = False

    def look(self) -> None:
        """Begin the profile or trace before the first training step to record; end it after the last.

        Call the method on every rank before the first step of the run and after each step; where the range of steps
        neither begins nor ends, it does nothing. Beginning and end of a trace are collective over all ranks
        (``traced``); those of a profile are not.

        Raises:
            DiskError: the files cannot be written at the end; of a trace, on rank 0 alone.
            MismatchError: a trace begins, and ranks have taken different numbers of steps.
        """
        if self._run.local_step == self._begin:
            self._open.enter_context(self._watch(self._run, self._folder))
            self._begun = True
        elif self._run.local_step == self._end:
            self._open.close()

    def close(self) -> None:
        """Stop a profile or trace that is running when training ends within the steps to record; write its files.

        Does nothing otherwise. For a running trace it is collective over all ranks: one broadcast of the measured times
        from each rank.

        Raises:
            DiskError: the files cannot be written; of a trace, on rank 0 alone.
        """
        self._open.close()

    def table(self) -> str:
        """Return the text that rank 0 prints after a profile or trace: a table of times, and the folder of the files.

        The table is the content of ``operations.txt`` (profile) or ``shares.txt`` (trace). If the run ended before the
        first of the steps to record, the text says so in place of the table, also where the folder holds a table of an
        earlier start of the run.
        """
        path = self._folder / self._table
        text = path.read_text(encoding="utf-8") if self._begun else "the run ended before the first of its steps\n"
        return f"{text}For ui.perfetto.dev: {self._folder}"


def planned_windows(
    config: TrainConfig, run: Run, total: int | None, directory: str | None, resumes: bool, listener: Listener
) -> list[Window]:
    """Return the windows of steps to profile and to trace, as the options ``--profile`` and ``--trace`` ask for.

    Args:
        config: the configuration.
        run: the run.
        total: steps of the run; None if unknown.
        directory: the run directory; None for no windows.
        resumes: whether the run is resumed.
        listener: is warned if a resumed run has too few steps left, for which the window is left out.

    Returns:
        A list with a ``Window`` for each of the two options that is set, the profile first.

    Raises:
        UsageError: a run that is not resumed has fewer steps than an option asks for.
    """
    found = []
    for name, watch, table in (("profile", profiled, profile.TABLE), ("trace", traced, trace.TABLE)):
        asked = config.windows.get(name)
        if asked is None or directory is None:
            continue
        first, steps = asked
        left = math.inf if total is None else total - run.global_step
        if first + steps - 1 <= left:
            found.append(Window(run, watch, Path(directory) / name, table, first, steps))
            continue
        message = f"--{name} {getattr(config, name)} needs {counted(first + steps - 1, 'step')}, and the run has {left}"
        if not resumes:
            raise UsageError(message, remedy=f"write --{name} FIRST:STEPS within the run")
        listener.warned(f"{message} left: there will be no {name}")
    return found
