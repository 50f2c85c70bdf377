"""Origin of the value of every field of a configuration: a flag, a variable, a line of a file. No torch."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.config.dotted import changed_fields
from tutti.config.settings import read_file
from tutti.config.train_config import TrainConfig


@dataclasses.dataclass(frozen=True)
class OriginOfField:
    """One option of a run's resolved configuration, with the place where its value was set.

    Attributes:
        name: name of the option, as in TOML.
        value: value of the option.
        origin: ``default``, a flag such as ``--seed``, a variable such as ``TUTTI_SEED``, or ``FILE:LINE``. A change of
            a single key (``--set``) adds ``and --optimizer.lr``. The text begins with ``follows from`` for a value that
            the configuration has derived.
    """

    name: str
    value: Any
    origin: str


def field_origins(
    config: TrainConfig,
    flags: Mapping[str, Any],
    variables: Mapping[str, Any],
    files: Sequence[Path],
    changes: Sequence[str],
) -> list[OriginOfField]:
    """Return name, value and origin of every option of a run, in the order of the fields of ``TrainConfig``.

    An origin is a text: ``default``, a flag, a ``TUTTI_*`` variable or ``FILE:LINE``; then ``and --FIELD.OPTION`` for
    each change of one key. It begins with ``follows from`` where ``config`` has another value than the sources give,
    because the configuration has adapted the option. Flags take precedence over variables, and those over files.

    Args:
        config: the resolved configuration.
        flags: values given by flags, by field of ``TrainConfig``.
        variables: values given by ``TUTTI_*`` variables, by field of ``TrainConfig``.
        files: the TOML files; a later one takes precedence.
        changes: the texts of ``--set``, ``field.option=value``, which change one key of a ``name:key=value,…``.

    Returns:
        One entry for each option, at its default or not: ``name``, ``value`` in ``config``, and ``origin``.

    Raises:
        UsageError: a file cannot be read, or a change is malformed.
    """
    places: dict[str, str] = {}
    values: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for file in files:
        found = read_file(file)
        values |= found
        places |= {name: f"{file}:{line_of(file, name)}" for name in found}
    places |= {name: f"TUTTI_{name.upper()}" for name in variables}
    places |= {name: f"--{name.replace('_', '-')}" for name in flags}
    values |= {**variables, **flags}
    changed = changed_fields(values, changes)
    rows = []
    for name in values:
        if name == "task":
            continue
        origin = places.get(name, "default")
        options = [each.partition("=")[0] for each in changes if each.partition(".")[0].replace("-", "_") == name]
        if name in changed:
            origin += "".join(f" and --{option.replace('_', '-')}" for option in dict.fromkeys(options))
        value = getattr(config, name)
        if value != changed.get(name, values[name]):
            origin = f"follows from {origin}"
        rows.append(OriginOfField(name, value, origin))
    return rows


def line_of(file: Path, name: str) -> int:
    """Return the number of the line, from 1, on which a TOML file sets a top-level key.

    Dashes and underscores in keys are equivalent. For a value over several lines, the first line is returned.

    Args:
        file: the file, which is TOML.
        name: the key, with underscores; the file must set it.
    """
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    last = 0
    for count in range(len(lines) + 1):
        try:
            table = tomllib.loads("".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        if name in {key.replace("-", "_") for key in table}:
            break
        last = count
    return last + 1
