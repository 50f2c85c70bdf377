"""``tutti compare``: a ladder of runs that differ in one thing each, and the verdict. Loads no torch itself."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tutti.cli.settings import flag_table
from tutti.cli.train import refuse
from tutti.compare import figure, ladder, runs, table, verdict
from tutti.compare.live import Board
from tutti.errors import DiskError, ExitCode, UsageError

# Without what the ladder decides itself.
Flags = flag_table(without=("seed", "out", "overwrite", "resume", "steps", "samples", "duration"))


def compare(
    task: Annotated[str | None, Parameter(show=False)] = None,
    /,
    *,
    flags: Annotated[Flags, Parameter(name="*", show=False, show_env_var=False)] = {},  # type: ignore[valid-type]  # noqa: B006
    ladder_name: Annotated[str, Parameter(name="--ladder")] = "corrected",
    seeds: int = 3,
    metric: str = "accuracy",
    only: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    out: Path | None = None,
    held: Annotated[bool, Parameter(name="--require-held", negative="", show_default=False)] = False,
    dry_run: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Say why accuracy dropped: runs that differ in one thing each, over seeds.

    Example: tutti compare digits --workers 8 --batch-size 512 --epochs 12 --seeds 3

    Every option of tutti train goes to all runs. Finished runs are kept: the same command goes on where it stopped.

    Parameters
    ----------
    ladder_name:
        corrected, or your own TOML file
    seeds:
        runs of each rung, with seeds 0, 1, …
    metric:
        held-out figure that is compared; higher is better
    only:
        rungs to run; may be repeated. The table shows all that have finished
    out:
        folder for table and figure; default: RUNS/compare-TASK-LADDER
    held:
        exit with 9 unless some recipe reaches the first rung
    dry_run:
        list the runs and stop
    as_json:
        print compare.json instead of the table
    """
    if task is None:
        raise UsageError("no task is given", remedy="write tutti compare TASK, such as tutti compare digits")
    if seeds < 1:
        raise UsageError(f"--seeds is {seeds}", remedy="give at least 1")
    options: dict[str, Any] = dict(flags)
    variables = {
        "workers": options.pop("workers", None) or 8,
        "batch_size": options.pop("batch_size", None) or 512,
        "epochs": options.pop("epochs", None) or 3.0,
    }
    chosen = ladder.load(ladder_name, variables, options)
    _check(chosen, task, only)
    pool = Path(options.get("runs", "runs"))
    folder = out or pool / f"compare-{Path(task.partition(':')[0]).stem}-{chosen.name}"
    trials = runs.trials(chosen, task, seeds, pool / "ladders")
    if dry_run:
        _list(chosen, trials)
        return ExitCode.DONE
    _run(chosen, trials, task, metric, only)
    found = runs.rows(chosen, trials, metric)
    result = verdict.as_json(chosen, found, metric)
    command = _command(task, ladder_name, variables, options, seeds)
    _write(folder, chosen, found, metric, command, result)
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print(table.plain(chosen, found), "", *result["verdict"], "", folder, sep="\n")
    return ExitCode.DONE if result["held"] or not held else ExitCode.THRESHOLD


def _check(chosen: ladder.Ladder, task: str, only: tuple[str, ...]) -> None:
    """Refuse, before anything runs, whatever one of the rungs would be refused for."""
    names = [rung.name for rung in chosen.rungs]
    for name in only:
        if name not in names:
            raise UsageError(f"there is no rung '{name}'", remedy=f"choices: {', '.join(names)}")
    for rung in chosen.rungs:
        devices = "1" if rung.config.devices == "auto" else rung.config.devices
        try:
            refuse(task, dataclasses.replace(rung.config, devices=devices))
        except UsageError as error:
            raise UsageError(error.what, where=f"rung '{rung.name}'", why=error.why, remedy=error.remedy) from error


def _run(chosen: ladder.Ladder, trials: list[runs.Trial], task: str, metric: str, only: tuple[str, ...]) -> None:
    wanted = [trial for trial in trials if not only or trial.rung in only]
    board = Board(sys.stderr, chosen, metric, len(wanted))
    with board:
        for number, trial in enumerate(wanted):
            board.show(trial, number, runs.rows(chosen, trials, metric))
            if not runs.finished(trial):
                runs.run(trial, task, board.progress)


def _list(chosen: ladder.Ladder, trials: list[runs.Trial]) -> None:
    for rung in chosen.rungs:
        said = ", ".join(f"{key}={value}" for key, value in rung.changes.items())
        print(f"{rung.name}: {rung.cause}" + (f" (over '{rung.parent}')" if rung.parent else "") + f"\n    {said}")
    done = sum(runs.finished(trial) for trial in trials)
    print(f"{len(trials)} runs, {done} of them finished")


def _command(task: str, name: str, variables: Mapping[str, Any], options: Mapping[str, Any], seeds: int) -> str:
    words = ["tutti", "compare", task, "--ladder", name, "--seeds", str(seeds)]
    for key, value in {**variables, **options}.items():
        flag = f"--{key.replace('_', '-')}"
        words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _write(
    folder: Path,
    chosen: ladder.Ladder,
    found: Mapping[str, verdict.Row],
    metric: str,
    command: str,
    result: Mapping[str, Any],
) -> None:
    """``table.md``, ``runs.csv``, ``compare.json`` and, where figures can be drawn, ``curves.svg``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = table.markdown(chosen, found, list(result["verdict"]), command)
        (folder / "table.md").write_text(text, encoding="utf-8")
        (folder / "runs.csv").write_text(table.as_csv(chosen, found), encoding="utf-8")
        (folder / "compare.json").write_text(json.dumps({"command": command, **result}, indent=1) + "\n", "utf-8")
        if figure.available() and found:
            figure.draw(chosen, found, metric, command, folder / "curves.svg")
    except OSError as error:
        raise DiskError("cannot write the comparison", where=str(folder), why=error.strerror) from error
