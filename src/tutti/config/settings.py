"""Resolve one configuration from flags, ``TUTTI_*``, files and defaults, in that precedence. No torch."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, get_args, get_origin

from cyclopts import Group, Parameter, Token

from tutti.config.dotted import changed_fields
from tutti.config.train_config import TrainConfig
from tutti.device import check_device
from tutti.errors import UsageError, did_you_mean

HINTS = typing.get_type_hints(TrainConfig)

FILES = "Configuration and output"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "What is trained": ("data", "model", "augment", "batch_norm", "data_workers"),
    "On what": (
        *("strategy", "workers", "devices", "on", "wait", "device", "threads", "timeout", "reproducible", "slow"),
    ),
    "How": (
        *("optimizer", "schedule", "lr_scale", "batch_size", "batch_growth", "micro_batch", "precision", "loss_scale"),
        *("clip", "ema", "gradient_noise", "identical_batches", "channels_last", "compile", "activation_checkpointing"),
        *("noise_every", "seed", "max_nonfinite"),
    ),
    "How long": ("epochs", "steps", "samples", "duration", "until", "patience", "regime_batch", "eval_every"),
    "Saving and resuming": (
        *("checkpoint_every", "keep", "keep_best", "init_from", "init_map", "resume", "change", "max_restarts"),
        *("start_timeout", "step_timeout", "save_timeout"),
    ),
    FILES: ("runs", "out", "overwrite", "log_every", "tensorboard", "logger", "profile", "trace", "machine"),
}
"""Groups of the help page; every field of TrainConfig belongs to one."""

USUAL = frozenset(
    {"data", "model", "strategy", "workers", "devices", "on", "reproducible"}
    | {"optimizer", "schedule", "batch_size", "precision", "compile", "seed"}
    | {"epochs", "steps", "samples", "until", "eval_every", "checkpoint_every", "keep_best", "resume"}
    | {"out", "tensorboard", "config", "print_config", "dry_run"}
)
"""Options of ``tutti train --help``, one screen; ``--help-all`` has all."""

HEADINGS = {title: Group(title, sort_key=place) for place, title in enumerate(GROUPS)}


def resolve_config(
    flags: Mapping[str, Any], files: Sequence[Path], task: str | None, changes: Sequence[str] = ()
) -> tuple[str, TrainConfig]:
    """Merge flags, ``TUTTI_*`` variables, TOML files and defaults into the task's name and the run's configuration.

    Args:
        flags: values given by flags or ``TUTTI_*`` variables, by field of ``TrainConfig``; these take precedence over
            files.
        files: TOML files; a later one takes precedence over an earlier one.
        task: task on the command line; takes precedence over ``task`` in a file; None: from a file.
        changes: the texts of ``--set``, ``field.option=value``, which change one key of a ``name:key=value,…`` that the
            other sources have set, or that is its default.

    Returns:
        The task's name, and the checked configuration.

    Raises:
        UsageError: a file is missing or not TOML, a key is unknown, a value has the wrong type, no task is given, or
            TrainConfig refuses the values.
    """
    values: dict[str, Any] = {}
    for file in files:
        values |= read_file(file)
    from_file = values.pop("task", None)
    name = task or from_file
    if not name:
        raise UsageError("no task is given", remedy="write tutti train TASK, such as tutti train digits")
    values |= flags
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    return name, TrainConfig(**{**values, **changed_fields({**defaults, **values}, changes)})


def read_file(file: Path) -> dict[str, Any]:
    """Return the values that a TOML file sets, by field of ``TrainConfig``, and its ``task``, if it has one.

    Dashes and underscores in keys are equivalent.

    Args:
        file: the TOML file.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has an unknown or repeated key or a value of a wrong type.
    """
    try:
        with file.open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise UsageError("cannot read the configuration", where=str(file), why=error.strerror) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError("the configuration is not TOML", where=str(file), why=str(error)) from error
    values = {}
    for written, value in table.items():
        key = written.replace("-", "_")
        if key != "task" and key not in HINTS:
            raise UsageError(f"unknown key '{written}'", where=str(file), remedy=did_you_mean(key, [*HINTS, "task"]))
        if key in values:
            raise UsageError(f"'{key}' is given twice", where=str(file), remedy="write it with dashes or underscores")
        values[key] = typed(value, HINTS.get(key, str), f"{file}, {written}")
        if key == "device":
            check_device(values[key], f"{file}, {written}")
    return values


def typed(value: Any, hint: Any, where: str) -> Any:
    """Check that a TOML value has the type of its option, and return it in this type.

    A whole number may stand for a float or a text, to which it is converted.

    Args:
        value: the value, as the TOML parser has returned it.
        hint: type of a field of ``TrainConfig``: bool, int, float, str, a Literal, or one of these and None.
        where: file and key, which a UsageError states.

    Raises:
        UsageError: the value has another type.

    >>> typed(3, float, "clip"), typed(2, str, "devices")
    (3.0, '2')
    """
    if get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    whole = isinstance(value, int) and not isinstance(value, bool)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UsageError(f"'{value}' is not possible", where=where, remedy=did_you_mean(str(value), get_args(hint)))
        return value
    if whole and hint in (float, str):
        return hint(value)
    if isinstance(value, hint) and (whole or hint is not int):
        return value
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise UsageError(f"{value!r} is not {kinds[hint]}", where=where)


def descriptions() -> dict[str, str]:
    """Return the help text of each option of ``tutti train``, by field of ``TrainConfig``, from that class's docstring.

    Fields that are described together, such as ``epochs, steps, samples``, have the same text.
    """
    text = inspect.cleandoc(TrainConfig.__doc__ or "").partition("Attributes:\n")[2]
    found = {}
    for names, words in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE):
        for name in names.split(", "):
            found[name] = re.sub(r"\*(\w+)\*", r"\1", " ".join(words.split())).replace("`", "").rstrip(".")
    return found


def _whole_number(optional: bool) -> Callable[[Any, Sequence[Token]], int | None]:
    """Return a converter that refuses fractions: cyclopts itself rounds ``--steps 1.5`` to 2."""

    def convert(hint: Any, tokens: Sequence[Token]) -> int | None:
        text = tokens[0].value
        if optional and text.lower() == "none":
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"'{text}' is not a whole number") from None

    return convert


WholeNumber: TypeAlias = Annotated[int, Parameter(converter=_whole_number(optional=False))]
"""Type of a command's option that takes a whole number and refuses fractions."""
OptionalWholeNumber: TypeAlias = Annotated[int | None, Parameter(converter=_whole_number(optional=True))]
"""The same, or None."""


def _parameter(field: dataclasses.Field[Any], group: Group, text: str, variables: str | None) -> Any:
    hint = HINTS[field.name]
    members = get_args(hint)
    shown = field.default is not None and field.default is not False and "default" not in text
    parameter = Parameter(
        help=text,
        group=group,
        env_var=None if variables is None else f"{variables}{field.name.upper()}",
        show_default=str(field.default).removesuffix(".0") if shown else False,
        converter=_whole_number(type(None) in members) if int in (hint, *members) else None,
    )
    return Annotated[hint, parameter]


def flag_table(without: Collection[str] = (), variables: str | None = "TUTTI_") -> Any:
    """Make a TypedDict of all options of ``tutti train``, the type of a parameter of ``cyclopts`` commands.

    It has an optional key for each field of ``TrainConfig``, annotated with the option's help text, its group in the
    help and its environment variable. At run time a key is present only if its flag or its variable is given.

    Args:
        without: fields of ``TrainConfig`` that the type leaves out.
        variables: prefix of the names of the environment variables that are read where a flag is not given; None: no
            variable is read.
    """
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    texts = descriptions()
    keys = {}
    for title, names in GROUPS.items():
        for name in [name for name in names if name not in without]:
            keys[name] = _parameter(fields[name], HEADINGS[title], texts.get(name, ""), variables)
    return TypedDict("Flags", keys, total=False)  # type: ignore[operator]
