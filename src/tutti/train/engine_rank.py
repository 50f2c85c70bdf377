"""One rank of ``tutti train --on …``: ``python -m tutti.train.engine_rank RUN``, on any node. Loads torch late."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from tutti import process_context
from tutti.config.settings import resolve_config
from tutti.config.variables import check_variables
from tutti.config.verbosity import configure_logging
from tutti.errors import TuttiError
from tutti.launcher import failure, heartbeat, stdin_control, watchdog
from tutti.launcher.encoding import replace_unencodable
from tutti.launcher.script_rank import show_crashes
from tutti.train.rank_entry import run_rank

CONFIGURATION = "engine.toml"
"""File in the run's folder of logs with the configuration, from the command to its ranks."""


def engine_rank(directory: Path) -> int:
    """Train as one rank of a job that an engine such as Slurm or Ray has started.

    Rank, world size and address come from environment variables. No exception is raised: a failure, other than a stop
    on request, is recorded in the folder ``logs`` of the run directory and printed on stderr.

    Args:
        directory: the run directory, on a disk that all nodes share; the configuration is in ``logs/engine.toml``
            there.

    Returns:
        The exit code for this process: 0 after success, otherwise that of the exception.
    """
    replace_unencodable(sys.stdout, sys.stderr)
    show_crashes()
    logs, rank = directory / "logs", 0
    try:
        stdin_control.control_by_stdin(os.environ)
        check_variables(os.environ)
        configure_logging(os.environ)
        identity = process_context.read_identity(os.environ)
        rank = identity.rank
        task, config = resolve_config({"devices": str(identity.size)}, (logs / CONFIGURATION,), None)
        heartbeat.process.report_to(logs)
        watchdog.start_watchdog(rank, config.limits)
        return run_rank(task, config, directory if rank == 0 else None)
    except BaseException as error:
        code = failure.failure_exit_code(error)
        if code not in failure.QUIET:
            failure.record_failure([logs], rank, error)
            foreseen = isinstance(error, (TuttiError, KeyboardInterrupt, SystemExit))
            print(f"tutti: {error}" if foreseen else traceback.format_exc(), file=sys.stderr, flush=True)
        return code


def exit_as_rank() -> None:
    """Run this process as a rank that an engine such as Slurm or Ray has started; the run directory is ``sys.argv[1]``.

    Trains by ``engine_rank``. Returns if the exit code is 0. Otherwise the process is ended at once by ``os._exit``
    with the exit code, because an orderly exit after a failure may wait for ranks that are gone.
    """
    code = engine_rank(Path(sys.argv[1]))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code:
        os._exit(code)


if __name__ == "__main__":
    exit_as_rank()
