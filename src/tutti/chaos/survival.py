"""One run that meets faults, from its start to its end, and beside it the same run without any."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tutti.chaos.command import Command, Running, Started, reference
from tutti.chaos.faults import Fault
from tutti.chaos.following import unfinished
from tutti.chaos.outcome import Outcome, Report
from tutti.chaos.play import Play, Rules
from tutti.errors import UsageError
from tutti.training.records import read_summary

Plan = Callable[[int, int | None], Sequence[Fault]]
"""The faults of a run with so many processes, and so many steps where that is known."""


Tell = Callable[[int, Outcome], None]
"""Told of each fault that is over, with its number from 1."""


def survive(
    command: Command, plan: Plan, rules: Rules, output: IO[str], known: Path | None, tell: Tell | None = None
) -> Report:
    """Start a run, play faults on it, resume it where they end it, and compare what comes out.

    Args:
        command: the run.
        plan: its faults.
        rules: how they are played.
        output: where what the run prints goes.
        tell: told of each fault.
        known: the run directory of the same run without faults, to compare with; None: do not compare.
    """
    summary = _finished(known) if known else {}
    faults = plan(command.devices, summary.get("steps") or command.total())
    begun = time.monotonic()
    with Started(command, output) as run:
        play = Play(run, rules)
        play.play(faults, tell)
    end = read_summary(command.directory)
    return Report(
        directory=str(command.directory),
        planned=len(faults),
        outcomes=play.outcomes,
        exit_code=play.exit_code,
        finished=True,
        steps=play.follower.step,
        executed=play.follower.step + play.follower.lost,
        seconds=time.monotonic() - begun,
        weights_sha256=end.get("weights_sha256"),
        reference_sha256=summary.get("weights_sha256"),
        left=[path.name for path in unfinished(command.directory)],
    )


def disturb(directory: Path, plan: Plan, rules: Rules) -> Report:
    """Play faults on a run that goes on already, and see it go on, or end as it may.

    Raises UsageError where no process writes to ``directory``.
    """
    begun = time.monotonic()
    run = Running(directory)
    if not run.devices:
        raise UsageError("no process of this run is found", where=str(directory), remedy="name a run that goes on")
    faults = plan(run.devices, None)
    play = Play(run, rules)
    play.play(faults)
    return Report(
        directory=str(directory),
        planned=len(faults),
        outcomes=play.outcomes,
        exit_code=play.exit_code,
        finished=False,
        steps=play.follower.step,
        executed=play.follower.step + play.follower.lost,
        seconds=time.monotonic() - begun,
    )


def uninterrupted(command: Command, output: IO[str]) -> Path:
    """Make the same run without faults beside it, in ``RUN-reference``; where it is."""
    directory = command.directory.with_name(f"{command.directory.name}-reference")
    if directory.exists():
        remedy = f"compare with it by --reference {directory}, or remove it"
        raise UsageError(f"{directory} exists already", remedy=remedy)
    reference(command, directory, output)
    return directory


def _finished(directory: Path) -> dict[str, Any]:
    """The summary of a run that came to its end. Raises UsageError."""
    summary = read_summary(directory)
    if summary.get("exit_code") != 0 or "weights_sha256" not in summary:
        raise UsageError("the reference is no finished run", where=str(directory), remedy="give a run directory")
    return summary
