"""Train a script that calls ``tutti.prepare`` in this process, with other options or callbacks than its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tutti.errors import TuttiError, UsageError
from tutti.planning.script_task import innermost_line, run_intercepted
from tutti.train.prepare import prepare_run
from tutti.train.run import Run
from tutti.train.run_options import RunOptions


class EnoughSteps(BaseException):
    """Raised by a callback to end a script after its last step; a script's ``except Exception`` does not catch it."""


def train_script(
    script: str,
    arguments: Sequence[str],
    change: Callable[[Any, RunOptions], tuple[Any, RunOptions]],
    command: str,
    checkpoints: bool = True,
) -> None:
    """Train a script as ``__main__`` in this process, until it ends or a callback raises ``EnoughSteps``.

    The script has a ``sys.argv`` of its own and all its effects, such as files that it writes. Its output goes to
    stderr. In a job of several ranks, each rank calls this function.

    Args:
        script: path of the script.
        arguments: its command-line arguments.
        change: function of the data set and options that the script passes to its first ``tutti.prepare``; returns the
            data set and options with which this run is prepared. Later runs of the script are prepared unchanged.
        command: the ``tutti`` command with its options, for an error that proposes to write ``--`` before the script's
            own arguments.
        checkpoints: whether ``save`` and ``restore`` of the script's runs have an effect.

    Raises:
        UsageError: the script raises, or exits with another code than 0. The message names the script's line.
        TuttiError: a run is refused, or training fails.
    """
    prepared: list[Run] = []

    def prepare(model: Any, optimizer: Any, dataset: Any, loss: Any, options: RunOptions) -> Run:
        data, chosen = (dataset, options) if prepared else change(dataset, options)
        run = prepare_run(model, optimizer, data, loss, chosen)
        if not checkpoints:
            vars(run).update(save=_not_saved, restore=_not_restored)
        prepared.append(run)
        return run

    try:
        run_intercepted(script, arguments, prepare)
    except EnoughSteps:
        return
    except TuttiError:
        raise
    except SystemExit as end:
        if end.code:
            raise UsageError(
                f"the script exits with {end.code!r}",
                where=innermost_line(script, end),
                remedy=f"give its own arguments after --, as in: {command} -- --epochs 3",
            ) from end
    except Exception as error:
        raise UsageError(
            "the script raises",
            where=innermost_line(script, error),
            why=f"{type(error).__name__}: {error}",
            remedy="make it run with python first; its own arguments follow --",
        ) from error


def _not_saved(folder: str | Path, *_: Any, **__: Any) -> Path:
    return Path(folder)


def _not_restored(*_: Any, **__: Any) -> None:
    return None
