"""One rank of a user's script, in a process that an engine or another launcher has started. No torch."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tutti.errors import ExitCode, TuttiError
from tutti.launcher import failure

# Source files of tutti and Python whose outermost frames are omitted from a user's traceback.
_HIDDEN = frozenset({__file__, str(Path(__file__).with_name("launch.py")), "<frozen runpy>"})


def show_crashes() -> None:
    """Make ``faulthandler`` write the Python stack to this process's standard error when native code crashes.

    Does nothing where ``sys.stderr`` has no file descriptor.
    """
    with suppress(OSError, ValueError):
        faulthandler.enable()


def run_as_rank(work: Callable[[], None], rank: int, logs: Path) -> int:
    """Run the script of one rank in this process, and return the exit code of the process.

    An exception of the script is recorded for the launcher, ``failure-rankN.json`` in ``logs``, if the folder exists on
    this node, and its traceback is printed from the script's first frame on. Errors of tutti, ``SystemExit`` and
    ``BrokenPipeError`` are recorded and raised again, without a print. An orderly end, such as ``KeyboardInterrupt`` or
    ``sys.exit(0)``, is raised again without a record.

    Args:
        work: runs the script; called once, without arguments.
        rank: this process's rank.
        logs: the launcher's folder for the output of the ranks.

    Returns:
        0 if ``work`` returns; for an exception that is not raised again its exit code, a member of
        ``tutti.errors.ExitCode``: ``PEER`` for a lost peer, ``DISK`` for a full disk, else ``UNEXPECTED``.
    """
    show_crashes()
    try:
        work()
    except BaseException as error:
        code = failure.failure_exit_code(error)
        if code in failure.QUIET:
            raise
        found = failure.record_failure([logs], rank, error, _HIDDEN)
        if isinstance(error, (TuttiError, SystemExit, BrokenPipeError)):
            raise
        print(found.traceback, end="", file=sys.stderr, flush=True)
        return code
    return int(ExitCode.DONE)
