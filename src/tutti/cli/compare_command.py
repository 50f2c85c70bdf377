"""``tutti compare``: train a ladder of runs that differ in one option each, and judge it. Loads no torch itself."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tutti import process_context
from tutti.cli.config_checks import refuse_trial
from tutti.cli.output_checks import make_writable
from tutti.compare import convergence_table, figure, ladder, runs, verdict
from tutti.compare.like_with_like import baselines, recipes
from tutti.compare.live import Board
from tutti.config.bounds import check_least
from tutti.config.metric_direction import Metric, higher_is_better, split_metric
from tutti.config.settings import WholeNumber, flag_table
from tutti.errors import DiskError, ExitCode, UsageError, counted
from tutti.launcher.encoding import json_text, strict_json
from tutti.tasks import user
from tutti.tasks.task_registry import judged_by

# Without the options that the ladder sets itself.
Flags = flag_table(without=("seed", "out", "overwrite", "resume", "steps", "samples", "duration"))


def compare(
    task: Annotated[str | None, Parameter(show=False)] = None,
    /,
    *more: Annotated[str, Parameter(show=False)],
    flags: Annotated[Flags, Parameter(name="*", show=False, show_env_var=False)] = {},  # type: ignore[valid-type]  # noqa: B006
    ladder_name: Annotated[str, Parameter(name="--ladder")] = "corrected",
    seeds: WholeNumber = 3,
    metric: str | None = None,
    only: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    out: Path | None = None,
    held: Annotated[bool, Parameter(name="--require-held", negative="", show_default=False)] = False,
    dry_run: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Find the one change that cost the accuracy.

    Example: tutti compare digits --workers 8 --batch-size 512 --epochs 12 --seeds 3

    Every option of tutti train applies to all runs. Finished runs are kept: the same command resumes the comparison.

    Parameters
    ----------
    ladder_name:
        corrected, or your own TOML file
    seeds:
        runs of each rung, with seeds 0, 1, …
    metric:
        held-out metric to compare: loss, accuracy, NAME:min or NAME:max; default: the task's
    only:
        rung to run; may be repeated. The table shows all finished rungs
    out:
        folder for table and figure; default: RUNS/compare-TASK-LADDER
    held:
        exit with 9 unless some recipe reaches the first rung, and its like-with-like baseline
    dry_run:
        list the runs and stop
    as_json:
        print compare.json instead of the table

    Returns
    -------
    int
        Exit code. 0: the table is printed, or with ``dry_run`` the runs are listed. 9 (``THRESHOLD``): with
        ``held``, no recipe reaches the first rung (the configuration at the start of the series) and its
        baseline. A wrong option, or a start by another launcher such as torchrun, raises UsageError, which ``tutti``
        turns into exit code 2; a run that fails raises a TuttiError with its exit code, and a signal to stop
        ``Preempted`` (75).

    Notes
    -----
    A ladder is a series of training configurations (rungs), each of which changes options of an earlier one; a recipe
    is a rung with other ``workers`` or ``batch_size`` than the first, its baseline a rung with the same options at the
    first rung's. ``task`` is the name of a task of ``tutti train``; ``more`` arguments are refused. ``flags`` holds
    options of ``tutti train`` by field of ``TrainConfig``, as given by flags or ``TUTTI_*`` variables.
    """
    if task is None:
        raise UsageError("no task is given", remedy="write tutti compare TASK, such as tutti compare digits")
    if more or Path(task).is_dir():
        runs_given = shlex.join((task, *more))
        raise UsageError(
            f"tutti compare trains one task, and not {runs_given}",
            remedy=f"write tutti report {runs_given} to compare runs, or give one task, such as tutti compare digits",
        )
    process_context.check_own_processes("tutti compare", os.environ)
    check_least({"--seeds": seeds})
    options: dict[str, Any] = dict(flags)
    variables = {
        "workers": options.pop("workers", None) or 8,
        "batch_size": options.pop("batch_size", None) or 512,
        "epochs": options.pop("epochs", None) or 3.0,
    }
    chosen = ladder.load_ladder(ladder_name, variables, options)
    _check(chosen, task, only)
    pool = Path(options.get("runs", "runs"))
    folder = out or pool / f"compare-{Path(task.partition(':')[0]).stem}-{chosen.name}"
    trials = runs.trials(chosen, task, seeds, pool / "ladders")
    asked = metric or judged_by(task)
    _measure(task, asked, trials)
    if held and not any(baselines(chosen, rung) for rung in recipes(chosen)):
        raise UsageError(
            "no rung of this ladder can be compared with another",
            where="--require-held",
            why="each differs in more than the number of workers from every rung with the first rung's workers",
            remedy="add a rung with the first rung's workers and batch_size and the other's options",
        )
    if dry_run:
        _list(chosen, trials)
        return ExitCode.DONE
    make_writable(folder, "the comparison")
    judged = _run(chosen, trials, task, asked, only)
    found = runs.rows(chosen, trials, judged.name)
    result = verdict.as_json(chosen, found, judged)
    command = _command(task, ladder_name, variables, options, seeds, metric)
    _write(folder, chosen, found, judged, command, result)
    if as_json:
        print(json_text(result, sys.stdout))
    else:
        print(convergence_table.plain_table(chosen, found, judged), "", *result["verdict"], "", folder, sep="\n")
    return ExitCode.DONE if result["held"] or not held else ExitCode.THRESHOLD


def _check(chosen: ladder.Ladder, task: str, only: tuple[str, ...]) -> None:
    """Raise UsageError before any run starts if a rung of ``only`` is unknown or a rung's options are refused."""
    names = [rung.name for rung in chosen.rungs]
    for name in only:
        if name not in names:
            raise UsageError(f"there is no rung '{name}'", remedy=f"choices: {', '.join(names)}")
    for rung in chosen.rungs:
        try:
            refuse_trial(task, rung.config)
        except UsageError as error:
            raise UsageError(error.what, where=f"rung '{rung.name}'", why=error.why, remedy=error.remedy) from error


def _measure(task: str, asked: str, trials: list[runs.Trial]) -> Metric | None:
    """Return the metric with its direction; None if a user's task may still declare the direction in its first run.

    Raises UsageError if neither name, option nor task gives the direction.
    """
    declared = runs.directions(trials)
    name, higher = split_metric(asked, "--metric")
    if declared is None and user.is_own(task) and higher is None and higher_is_better(name) is None:
        return None
    return Metric.parse(asked, "--metric", declared)


def _run(chosen: ladder.Ladder, trials: list[runs.Trial], task: str, asked: str, only: tuple[str, ...]) -> Metric:
    """Train the missing runs, and return the metric. Raises UsageError after the first if its direction is unknown."""
    wanted = [trial for trial in trials if not only or trial.rung in only]
    with Board(sys.stderr, chosen, len(wanted)) as board:
        for number, trial in enumerate(wanted):
            metric = _measure(task, asked, trials)
            board.show(trial, number, runs.rows(chosen, trials, metric.name) if metric else {}, metric)
            if not runs.finished(trial):
                runs.run_trial(trial, task, board.progress)
    return Metric.parse(asked, "--metric", runs.directions(trials))


def _list(chosen: ladder.Ladder, trials: list[runs.Trial]) -> None:
    for rung in chosen.rungs:
        changes = ", ".join(f"{key}={value}" for key, value in rung.changes.items())
        print(f"{rung.name}: {rung.cause}" + (f" (over '{rung.parent}')" if rung.parent else "") + f"\n    {changes}")
    done = sum(runs.finished(trial) for trial in trials)
    print(f"{counted(len(trials), 'run')}, {done} of them finished")


def _command(
    task: str, name: str, variables: Mapping[str, Any], options: Mapping[str, Any], seeds: int, metric: str | None
) -> str:
    words = ["tutti", "compare", task, "--ladder", name, "--seeds", str(seeds)]
    words += ["--metric", metric] if metric else []
    for key, value in {**variables, **options}.items():
        flag = f"--{key.replace('_', '-')}"
        words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _write(
    folder: Path,
    chosen: ladder.Ladder,
    found: Mapping[str, verdict.RungResult],
    metric: Metric,
    command: str,
    result: Mapping[str, Any],
) -> None:
    """Write ``table.md``, ``runs.csv``, ``compare.json`` and, with matplotlib, ``curves.svg``."""
    try:
        text = convergence_table.markdown(chosen, found, list(result["verdict"]), command, metric)
        (folder / "table.md").write_text(text, encoding="utf-8")
        (folder / "runs.csv").write_text(convergence_table.as_csv(chosen, found), encoding="utf-8")
        (folder / "compare.json").write_text(strict_json({"command": command, **result}, indent=1) + "\n", "utf-8")
        if figure.available() and found:
            figure.draw_curves(chosen, found, metric, command, folder / "curves.svg")
    except OSError as error:
        raise DiskError("cannot write the comparison", where=str(folder), why=error.strerror) from error
