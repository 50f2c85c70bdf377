"""Load a ladder: a series of training runs (rungs) that differ from one another in one option each. No torch.

A ladder is a TOML file. ``[base]`` holds options of ``tutti train`` for every rung; each ``[[rung]]`` has a ``name``,
the rung it comes ``from`` (default: the one before), the ``cause`` it isolates, and the options it changes. Numbers may
be written as ``"{workers}"``, ``"{batch_size}"``, ``"{worker_batch}"`` (a logical worker's share of a batch) or
``"{epochs}"``.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError, did_you_mean

_SHIPPED = Path(__file__).with_name("ladders")
_OWN = ("name", "from", "cause")
_HINTS = typing.get_type_hints(TrainConfig)


@dataclass(frozen=True)
class Rung:
    """One training configuration of a comparison, which is run with several seeds.

    Attributes:
        name: name in the table.
        parent: name of the rung whose configuration this one changes; None for the first.
        cause: common name of the changed options, in words, as the cause of a change of accuracy.
        changes: the options that differ from the parent's, by name; of the first rung those that it states itself.
        config: the whole configuration.
    """

    name: str
    parent: str | None
    cause: str
    changes: Mapping[str, Any]
    config: TrainConfig


@dataclass(frozen=True)
class Ladder:
    """A series of training configurations (rungs) to compare; the first is the baseline that the rest should reach.

    Attributes:
        name: name of the ladder.
        summary: purpose of the ladder, in a sentence.
        naive: name of the rung that loses accuracy against the first; the other rungs explain its loss.
        rungs: all rungs, in order.
    """

    name: str
    summary: str
    naive: str
    rungs: tuple[Rung, ...]

    def rung(self, name: str) -> Rung:
        """Return the training configuration (rung) of the ladder that is called ``name``.

        A ladder is a series of training configurations to compare.

        Args:
            name: name of the rung.

        Returns:
            The rung with its ``name``, the name of the rung that it changes (``parent``), the changed options
            (``changes``), their common name as a cause (``cause``), and the whole configuration (``config``).

        Raises:
            StopIteration: no rung has this name.
        """
        return next(rung for rung in self.rungs if rung.name == name)


def shipped() -> list[str]:
    """Return the names of the ladders (series of training configurations to compare) that come with tutti, sorted.

    A name, such as ``corrected``, is a value of ``tutti compare --ladder``.
    """
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def load_ladder(text: str, variables: Mapping[str, int | float], options: Mapping[str, Any]) -> Ladder:
    """Load a ladder, a series of training configurations (rungs), by name if it comes with tutti, else by path.

    Args:
        text: name of a shipped ladder, or path of a TOML file.
        variables: numbers ``workers`` (of logical workers), ``batch_size`` (global, in samples) and ``epochs``, all
            three needed, which replace the placeholders ``{workers}``, ``{batch_size}`` and ``{epochs}`` in the file; a
            fourth placeholder, ``{worker_batch}``, is computed as batch size ÷ workers.
        options: fields of ``TrainConfig`` for all rungs. They take precedence over the file's ``[base]``, but not over
            the options that a rung states.

    Returns:
        The ladder: ``name``, ``summary``, ``naive`` (name of the rung that loses accuracy against the first) and
        ``rungs``, each with its full configuration.

    Raises:
        UsageError: there is no such ladder, the file cannot be read or is not TOML, a key or placeholder is unknown,
            there are fewer than two rungs, ``naive`` names no rung, or a rung has no unique name, changes nothing,
            names as its origin (``from``) a rung that does not precede it, or has options that ``TrainConfig`` refuses.
    """
    path = _SHIPPED / f"{text}.toml" if text in shipped() else Path(text)
    if not path.is_file():
        raise UsageError(f"there is no ladder '{text}'", remedy=f"{did_you_mean(text, shipped())}, or a TOML file")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError("cannot read the ladder", where=str(path), why=str(error)) from error
    unknown = table.keys() - {"name", "summary", "naive", "base", "rung"}
    if unknown or not isinstance(table.get("rung"), list) or not table["rung"]:
        raise UsageError(
            f"unknown key '{min(unknown)}'" if unknown else "a ladder without rungs",
            where=str(path),
            remedy="a ladder has name, summary, naive, [base] and [[rung]] tables",
        )
    values = {**variables, "worker_batch": max(1, int(variables["batch_size"]) // int(variables["workers"]))}
    base = {**_options(table.get("base", {}), values, f"{path}, [base]"), **options}
    rungs = _rungs(table["rung"], base, values, str(path))
    if len(rungs) < 2:
        raise UsageError("a ladder of one rung compares nothing", where=str(path), remedy="add a [[rung]]")
    naive = table.get("naive", rungs[min(1, len(rungs) - 1)].name)
    names = [rung.name for rung in rungs]
    if naive not in names:
        raise UsageError(
            f"naive is '{naive}', which is not a rung", where=str(path), remedy=did_you_mean(str(naive), names)
        )
    return Ladder(table.get("name", path.stem), table.get("summary", ""), naive, rungs)


def _rungs(rows: list[Any], base: Mapping[str, Any], values: Mapping[str, Any], where: str) -> tuple[Rung, ...]:
    rungs: dict[str, Rung] = {}
    for number, row in enumerate(rows, 1):
        name = row.get("name") if isinstance(row, dict) else None
        if not isinstance(name, str) or name in rungs:
            raise UsageError("a rung needs a name of its own", where=f"{where}, rung {number}")
        place = f"{where}, rung '{name}'"
        parent = row.get("from", next(reversed(rungs), None))
        if parent is not None and parent not in rungs:
            raise UsageError(
                f"it comes from '{parent}', which is not an earlier rung",
                where=place,
                remedy=did_you_mean(str(parent), rungs) if rungs else "leave from out in the first rung",
            )
        before = dataclasses.asdict(rungs[parent].config) if parent else {}
        given = _options({key: value for key, value in row.items() if key not in _OWN}, values, place)
        config = TrainConfig(**({**before, **given} if parent else {**base, **given}))
        changes = {key: value for key, value in given.items() if not parent or before[key] != value}
        if parent and not changes:
            raise UsageError(f"it is the same run as '{parent}'", where=place, remedy="change one thing")
        rungs[name] = Rung(name, parent, str(row.get("cause", name)), changes, config)
    return tuple(rungs.values())


def _options(table: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return fields of TrainConfig with placeholders filled in. Raises UsageError for an unknown option."""
    found = {}
    for written, value in table.items():
        key = written.replace("-", "_")
        if key not in _HINTS:
            raise UsageError(f"unknown option '{written}'", where=where, remedy=did_you_mean(key, _HINTS))
        found[key] = _fill(value, values, f"{where}, {written}")
    return found


def _fill(value: Any, values: Mapping[str, Any], where: str) -> Any:
    if not isinstance(value, str) or "{" not in value:
        return value
    if value[1:-1] in values and (value[0], value[-1]) == ("{", "}"):
        return values[value[1:-1]]
    try:
        return value.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise UsageError(
            f"cannot fill in '{value}'", where=where, remedy=f"placeholders: {', '.join(values)}"
        ) from error
