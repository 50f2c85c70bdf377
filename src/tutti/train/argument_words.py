"""Options of ``tutti train`` that are arguments of ``tutti.prepare``: their words in messages, and their variables."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from tutti.config.variables import PREFIX, SETTINGS
from tutti.config.verbosity import VERBOSITY
from tutti.errors import TuttiError, UsageError, did_you_mean, own_line_of
from tutti.train.run_options import RunOptions

P = ParamSpec("P")
R = TypeVar("R")

_ARGUMENTS = frozenset(field.name for field in fields(RunOptions)) | {"optimizer"}
_OPTION = re.compile(r"--([a-z][a-z-]*)(?: (\d+\b(?![.:])|[a-z0-9]\S*?(?=[,;)]|\.?$|\. | or | and | with )))?")
"""An option; and its value, where the next word is a number or ends the clause."""


@contextmanager
def argument_words() -> Iterator[None]:
    """Return a context manager that rewords each TuttiError of its block in arguments of ``tutti.prepare``.

    The same error propagates. In its text each option of ``tutti train``, such as ``--workers 4``, is replaced by the
    argument, ``workers=4`` (``as_arguments``), because a script has no command line.
    """
    try:
        yield
    except TuttiError as error:
        error.reword(as_arguments)
        raise


def as_arguments(text: str) -> str:
    """Replace the options of ``tutti train`` in a message by arguments of ``tutti.prepare``; keep all other options.

    An error that both ``tutti train`` and ``tutti.prepare`` can raise is written with the options of the command line.

    Args:
        text: part of a message.

    >>> as_arguments("take --workers 4 or more, --strategy mirrored, or --devices 2 or fewer")
    "take workers=4 or more, strategy='mirrored', or --devices 2 or fewer"
    >>> as_arguments("--noise-every cannot be combined with --lr-scale adascale")
    "noise_every cannot be combined with lr_scale='adascale'"
    """
    return _OPTION.sub(_argument, text)


def unread_variables(given: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return a warning of ``TUTTI_*`` variables that ``tutti train`` would read and ``tutti.prepare`` does not.

    Args:
        given: arguments of ``tutti.prepare`` by name; a variable whose value the script has passed on is not named.
        environ: environment variables, such as ``os.environ``.

    Returns:
        One sentence; empty without such variables.

    >>> unread_variables({"strategy": "mirrored", "seed": 3}, {"TUTTI_STRATEGY": "sharded", "TUTTI_SEED": "3"})
    "TUTTI_STRATEGY has no effect in a script: give tutti.prepare strategy='sharded'"
    """
    values = {name.removeprefix(PREFIX).lower(): environ[name] for name in sorted(SETTINGS & environ.keys())}
    unread = {name: value for name, value in values.items() if name in _ARGUMENTS and str(given.get(name)) != value}
    if not unread:
        return ""
    variables = ", ".join(f"{PREFIX}{name.upper()}" for name in unread)
    arguments = ", ".join(_text(name, value) for name, value in unread.items())
    return f"{variables} {'has' if len(unread) == 1 else 'have'} no effect in a script: give tutti.prepare {arguments}"


def _argument(option: re.Match[str]) -> str:
    name, value = option[1].replace("-", "_"), option[2]
    if name not in _ARGUMENTS:
        return option[0]
    return name if value is None else _text(name, value)


def _text(name: str, value: str) -> str:
    return f"{name}={value}" if re.fullmatch(r"[\d.]+", value) else f"{name}='{value}'"


def refuse_unknown_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the API: a mistyped keyword argument raises UsageError, which names the nearest one.

    The traceback of a TuttiError ends at the decorated function's call, unless it leads through the script's own code,
    such as its loss function, or ``TUTTI_VERBOSITY`` is ``debug``: tutti's frames do not tell which argument is wrong.

    >>> @refuse_unknown_arguments
    ... def prepare(batch_size: int = 1) -> None: ...
    >>> prepare(batchsize=2)
    Traceback (most recent call last):
    tutti.errors.UsageError: tutti.prepare has no argument 'batchsize'. Did you mean 'batch_size'? Choices: batch_size.
    """
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = next((name for name in kwargs if name not in names), None)
        if unknown is not None:
            raise UsageError(
                f"tutti.{function.__name__} has no argument '{unknown}'", remedy=did_you_mean(unknown, names)
            )
        try:
            return function(*args, **kwargs)
        except TuttiError as error:
            if own_line_of(error) is not None or os.environ.get(VERBOSITY) == "debug":
                raise
            if error.__context__ is not None and own_line_of(error.__context__) is None:
                error.__suppress_context__ = True
            error.with_traceback(None)
            raise

    return call
