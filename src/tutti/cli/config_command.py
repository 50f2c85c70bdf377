"""``tutti config show``: every option of a run with its value, and where the value comes from. Loads no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from tutti.cli.help_pages import OneScreen
from tutti.cli.train_command import resolved, resumed_config
from tutti.config.origins import field_origins
from tutti.config.settings import flag_table, read_file
from tutti.config.train_config import TrainConfig
from tutti.errors import ExitCode
from tutti.launcher.encoding import json_text

Typed = flag_table(variables=None)
Variables = flag_table()

USAGE = "Usage: tutti config show [TASK] [OPTIONS OF tutti train]"
SUMMARY = (
    "Show every option with its value, and where that comes from.\n\n"
    "Example: tutti config show digits --config mine.toml --batch-size 128 --origin\n\n"
    "It takes the options of tutti train (tutti train --help-all)."
)


def config_verb() -> App:
    """Build the ``cyclopts`` application of ``tutti config``, whose only action is ``show``."""
    app = App(name="config", help=SUMMARY, usage=USAGE, help_formatter=OneScreen(), help_format="plaintext")
    app.command(show, help=SUMMARY, usage=USAGE)
    return app


def show(
    task: Annotated[str | None, Parameter(show=False)] = None,
    /,
    *,
    flags: Annotated[Typed, Parameter(name="*", show=False, show_env_var=False)] = {},  # type: ignore[valid-type]  # noqa: B006
    config: Annotated[tuple[Path, ...], Parameter(negative="", show_default=False)] = (),
    changes: Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)] = (),
    origin: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Show every option with its value, and where that comes from.

    Parameters
    ----------
    config:
        TOML file of options; may be repeated, the later wins
    changes:
        one key of an option, optimizer.lr=0.1; also written --optimizer.lr 0.1
    origin:
        where each value comes from: a flag, a variable, FILE:LINE, or default
    as_json:
        print one JSON object of all options with value and origin

    Returns
    -------
    int
        Exit code. 0: the options are printed. An unknown option or value raises UsageError, or CycloptsError for a
        ``TUTTI_*`` variable, which ``tutti`` turns into exit code 2.

    Notes
    -----
    ``task`` is the name of a task of ``tutti train``; None for the task that a file names; without that, the options
    are shown for no task in particular. ``flags`` holds options of ``tutti train`` by field of ``TrainConfig``, as
    given by flags or ``TUTTI_*`` variables.
    """
    given: dict[str, Any] = dict(flags)
    variables = variable_fields()
    files = (*resumed_config({**variables, **given}, task), *config)
    # A configuration without a task is complete otherwise: the name stands for any.
    named = task or next((name for file in reversed(files) if (name := _task_of(file))), None)
    _, chosen = resolved(named or "any", {**variables, **given}, files, changes)
    _check_options(chosen)
    rows = field_origins(chosen, given, variables, files, changes)
    if as_json:
        table: dict[str, Any] = {row.name: {"value": row.value, "origin": row.origin} for row in rows}
        print(json_text({"task": named, **table}, sys.stdout))
        return ExitCode.DONE
    shown = [(row.name, _text(row.value), row.origin if origin else "") for row in rows]
    wide, wider = (max(len(row[place]) for row in shown) for place in (0, 1))
    for name, value, where in shown:
        print(f"{name:<{wide}}  {value:<{wider}}  {where}".rstrip())
    return ExitCode.DONE


def _check_options(config: TrainConfig) -> None:
    """Parse every ``name:key=value`` of the configuration. Raises UsageError for an unknown name or option."""
    for option in (
        "strategy_choice",
        "optimizer_choice",
        "lr_schedule",
        "lr_rule",
        "batch_norm_options",
        "compile_choice",
    ):
        getattr(config, option)
    for option in ("checkpointing", "loss_scale_options", "noise"):
        getattr(config, option)


def variable_fields() -> dict[str, Any]:
    """Return the options of ``tutti train`` that ``TUTTI_*`` variables in ``os.environ`` give.

    Returns:
        Field of ``TrainConfig`` → value, converted from the variable's text to the type of the field, as texts of flags
        are. Options without a variable are missing.

    Raises:
        CycloptsError: the text of a variable is no value of its field's type.
    """
    app = App(name="variables", version="")

    @app.default
    def collect(*, flags: Annotated[Variables, Parameter(name="*")] = {}) -> None:  # type: ignore[valid-type]  # noqa: B006
        """Take the variables."""

    _, bound, _ = app.parse_args([], print_error=False, exit_on_error=False)
    return dict(bound.arguments.get("flags", {}))


def _task_of(file: Path) -> str | None:
    return read_file(file).get("task")


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
