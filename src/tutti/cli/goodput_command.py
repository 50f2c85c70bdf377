"""``tutti goodput``: print the productive share of a run's time, and its lost time by cause. Loads no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tutti.cli.console_tables import print_table
from tutti.errors import ExitCode, counted
from tutti.launcher.encoding import json_text
from tutti.metrics.goodput import run_goodput


def goodput(
    run: Annotated[Path, Parameter(show=False)],
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Say which share of a run's time was training.

    Example: tutti goodput runs/digits-20261123-101500

    RUN is a run directory; the run may be under way.

    Parameters
    ----------
    as_json:
        print JSON instead of a table

    Returns
    -------
    int
        Exit code. 0: the table or JSON is printed. A path that is no run raises UsageError, which ``tutti``
        turns into exit code 2.

    Notes
    -----
    Goodput is the share (0 to 1) of the time from the run's command to its end, or to its last record, that was spent
    on steps whose work was kept. The rest is divided by cause: start, waits for data, evaluation, saving checkpoints,
    steps repeated after a failure, stops, restarts, skipped steps, and slow steps.
    """
    found = run_goodput(run)
    if as_json:
        print(json_text(found.as_json(), sys.stdout))
        return ExitCode.DONE
    starts = f", {found.attempts} starts" * (found.attempts > 1)
    spent = f"{found.productive:,.1f} s of {found.elapsed:,.1f} s"
    print(f"goodput {found.fraction:.1%}: {spent}, {counted(found.steps, 'step')}{starts}")
    rows = sorted(found.lost.items(), key=lambda item: -item[1])
    shares = [(cause, f"{seconds:,.2f}", f"{seconds / max(found.elapsed, 1e-9):.1%}") for cause, seconds in rows]
    print_table(("lost to", "s", "share"), shares)
    for note in found.notes:
        print(note)
    return ExitCode.DONE
