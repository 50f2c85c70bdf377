"""Inject faults into a run from its start to its end, and compare it with the same run without faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tutti.chaos.command import Command, Running, Started, reference
from tutti.chaos.fault_injection import FaultInjection, Rules
from tutti.chaos.fault_outcome import FaultOutcome, Report
from tutti.chaos.faults import Fault
from tutti.chaos.following import unfinished
from tutti.errors import UsageError
from tutti.metrics.records import read_summary

Plan = Callable[[int, int | None], Sequence[Fault]]
"""``plan(processes, steps)`` returns the faults of a run; steps is None if it is unknown."""


Tell = Callable[[int, FaultOutcome], None]
"""Called after each fault with its number, from 1, and its outcome."""


def survive(
    command: Command, plan: Plan, rules: Rules, output: IO[str], known: Path | None, tell: Tell | None = None
) -> Report:
    """Start a training run, inject faults into it, resume it each time a fault ends it, and compare its weights.

    A fault is, for example, SIGKILL to a rank, a stopped process or a full disk. To resume is to start the run again
    with ``tutti train --resume``. Blocks until the run has ended.

    Args:
        command: the run's ``tutti train`` command line.
        plan: function that chooses the faults; called once as ``plan(processes, steps)`` with the number of the run's
            processes and of its training steps (None if unknown), and returns ``Fault``s in increasing order of steps.
        rules: options of injecting the faults, such as the number of devices after a resume.
        output: file for the run's standard output and standard error.
        known: run directory of the same run without faults, whose final weights are compared; None: do not compare.
        tell: called after each fault with its number, from 1, and its outcome; None: not called.

    Returns:
        A ``Report``: the outcome of each fault (``outcomes``), and of the run ``exit_code``, ``steps``, ``executed``
        (steps, repeated ones included), ``seconds``, the SHA-256 hashes of this run's final weights
        (``weights_sha256``) and of those of ``known`` (``reference_sha256``), each None if unknown, and ``left``, a
        list of names of files of unfinished saves.

    Raises:
        UsageError: ``known`` is no finished run; or a fault is for the run's launcher, which is not known, or would
            fill more bytes than ``rules`` permit. Errors that ``plan`` raises are passed on, before the run is started.
        DiskError: the disk cannot be filled.
    """
    summary = _finished(known) if known else {}
    faults = plan(command.devices, summary.get("steps") or command.total())
    begun = time.monotonic()
    with Started(command, output) as run:
        injection = FaultInjection(run, rules)
        injection.inject(faults, tell)
    end = read_summary(command.directory)
    return Report(
        directory=str(command.directory),
        planned=len(faults),
        outcomes=injection.outcomes,
        exit_code=injection.exit_code,
        finished=True,
        steps=injection.follower.step,
        executed=injection.follower.step + injection.follower.lost,
        seconds=time.monotonic() - begun,
        weights_sha256=end.get("weights_sha256"),
        reference_sha256=summary.get("weights_sha256"),
        left=[path.name for path in unfinished(command.directory)],
    )


def disturb(directory: Path, plan: Plan, rules: Rules) -> Report:
    """Inject faults, such as SIGKILL to a rank, into a running training run of another process, and report the outcome.

    The function watches the run's directory and its processes on this machine. Blocks until the last fault is over or
    the run has ended. A run that a fault has ended is not resumed, and no weights are compared.

    Args:
        directory: directory of the run, on this machine.
        plan: function that chooses the faults; called once as ``plan(processes, None)`` with the number of the run's
            processes (its number of steps is unknown), and returns ``Fault``s in increasing order of steps.
        rules: options of injecting the faults, such as the bytes that a full disk leaves free.

    Returns:
        A ``Report``: ``outcomes``, with a ``FaultOutcome`` for each fault that was injected; and of the run so far
        ``exit_code`` (None while it goes on), ``steps``, ``executed`` (steps, repeated ones included) and ``seconds``.
        ``report.problems()`` is empty if the run went on, or ended, as tutti promises for these faults.

    Raises:
        UsageError: no process of a run in ``directory`` was found; or a fault is for the run's launcher, which is not
            known, or would fill more bytes than ``rules`` permit. Errors that ``plan`` raises are passed on.
        DiskError: the disk cannot be filled.
    """
    begun = time.monotonic()
    run = Running(directory)
    if not run.devices:
        raise UsageError("no process of this run was found", where=str(directory), remedy="name a run that is running")
    faults = plan(run.devices, None)
    injection = FaultInjection(run, rules)
    injection.inject(faults)
    return Report(
        directory=str(directory),
        planned=len(faults),
        outcomes=injection.outcomes,
        exit_code=injection.exit_code,
        finished=False,
        steps=injection.follower.step,
        executed=injection.follower.step + injection.follower.lost,
        seconds=time.monotonic() - begun,
    )


def uninterrupted(command: Command, output: IO[str]) -> Path:
    """Run a training command without faults in a new directory, to get the weights that a run with faults must reach.

    The directory is ``RUN-reference``, beside the command's run directory ``RUN``. Blocks until the run has ended.

    Args:
        command: the ``tutti train`` command line to repeat.
        output: file for the run's standard output and standard error.

    Returns:
        The new run directory, which ``survive`` takes as ``known``.

    Raises:
        UsageError: the directory exists already.
        TuttiError: the run ends with an exit code other than 0.
    """
    directory = command.directory.with_name(f"{command.directory.name}-reference")
    if directory.exists():
        remedy = f"compare with it by --reference {directory}, or remove it"
        raise UsageError(f"{directory} exists already", remedy=remedy)
    reference(command, directory, output)
    return directory


def _finished(directory: Path) -> dict[str, Any]:
    """Return the summary of a finished run. Raises UsageError if the run is not finished."""
    summary = read_summary(directory)
    if summary.get("exit_code") != 0 or "weights_sha256" not in summary:
        raise UsageError("the reference is not a finished run", where=str(directory), remedy="give a run directory")
    return summary
