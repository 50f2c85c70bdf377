"""Change one option of a specification: ``--optimizer.lr 0.1`` sets ``lr`` in ``adam:lr=0.001,beta1=0.9``. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tutti.config.spec import read_options
from tutti.errors import UsageError, did_you_mean

NAMED = (
    *("model", "batch_norm", "strategy", "optimizer", "schedule", "lr_scale", "loss_scale", "gradient_noise"),
    *("activation_checkpointing", "on"),
)
"""Fields of ``TrainConfig`` of the form ``name:key=value,…``."""

BARE = ("batch_growth", "init_map")
"""Fields of ``TrainConfig`` of the form ``key=value,…``."""

FORM = "--FIELD.OPTION VALUE, such as --optimizer.lr 0.1"

_DOTTED = re.compile(r"--(\w[\w-]*)\.(\w[\w.-]*)(?:=(.*))?", re.DOTALL)
# The name of a class of another package has a colon of its own.
_PARTS = re.compile(r"([^:]*(?::[^:=,]+(?=:|$))?)(?::(.*))?", re.DOTALL)


def dotted_words(words: Sequence[str]) -> list[str]:
    """Rewrite ``--FIELD.OPTION VALUE`` in a command line to ``--set FIELD.OPTION=VALUE``, and return all words.

    Words after ``--`` stay as they are.

    Args:
        words: the command line, without the name of the program.

    Raises:
        UsageError: the option ``--FIELD`` takes no ``key=value`` (naming the nearest option that does), or a value is
            missing.

    >>> dotted_words(["train", "digits", "--optimizer.lr", "0.1", "--schedule.warmup=2ep"])
    ['train', 'digits', '--set', 'optimizer.lr=0.1', '--set', 'schedule.warmup=2ep']
    """
    end = list(words).index("--") if "--" in words else len(words)
    found: list[str] = []
    given = iter(words[:end])
    for word in given:
        match = _DOTTED.fullmatch(word)
        if match is None:
            found.append(word)
            continue
        field, option = _field(match[1], word), match[2]
        value = match[3] if match[3] is not None else next(given, None)
        if value is None:
            raise UsageError(f"{word} needs a value", remedy=f"write {FORM}")
        found += ["--set", f"{field}.{option}={value}"]
    return [*found, *words[end:]]


def _field(name: str, where: str) -> str:
    field = name.replace("-", "_")
    if field not in (*NAMED, *BARE):
        raise UsageError(f"'{name}' has no options", where=where, remedy=did_you_mean(field, (*NAMED, *BARE)))
    return field


def changed_fields(values: Mapping[str, Any], changes: Sequence[str]) -> dict[str, str]:
    """Apply ``--set FIELD.OPTION=VALUE`` to options of the form ``name:key=value,…``, and return the new texts.

    Whether ``name`` has such a key is not checked here.

    Args:
        values: values of the options of ``tutti train`` before the changes, by field of ``TrainConfig``.
        changes: texts ``field.option=value``; of two for the same key the last counts.

    Returns:
        New text of each changed option, by field of ``TrainConfig``.

    Raises:
        UsageError: a text is malformed or its value has a comma, the field takes no ``key=value``, or the field's text
            is malformed, None or ``none``.

    >>> changed_fields({"optimizer": "adam:lr=0.001,beta1=0.8"}, ["optimizer.lr=0.1", "optimizer.eps=1e-6"])
    {'optimizer': 'adam:lr=0.1,beta1=0.8,eps=1e-6'}
    """
    found: dict[str, str] = {}
    for change in changes:
        place, equals, value = change.partition("=")
        name, dot, option = place.partition(".")
        if not (equals and dot and option and value.strip()):
            raise UsageError(f"cannot read '{change}'", where="--set", remedy=f"write {FORM}")
        field = _field(name, "--set")
        text = found.get(field, values.get(field))
        if text in (None, "none"):
            flag = f"--{field.replace('_', '-')}"
            raise UsageError(f"{flag}.{option} changes an option of {flag}, which is not given", remedy=f"give {flag}")
        found[field] = _with_option(str(text), field, option.replace("-", "_"), value.strip())
    return found


def _with_option(text: str, field: str, option: str, value: str) -> str:
    if "," in value:
        raise UsageError(f"'{value}' has a comma", where=f"{field}.{option}", remedy="give one option at a time")
    match = None if field in BARE else _PARTS.fullmatch(text)
    head, rest = ("", text) if match is None else (match[1], match[2] or "")
    options = {**read_options(rest, f"--{field.replace('_', '-')}", "name:key=value"), option: value}
    written = ",".join(f"{key}={each}" for key, each in options.items())
    return f"{head}:{written}" if head else written
