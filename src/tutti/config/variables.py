"""Check every environment variable that begins with ``TUTTI_`` against a table of names and values. No torch.

Each option of ``tutti train`` is a variable, too: ``TUTTI_`` and the field of ``TrainConfig`` in capitals.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError

PREFIX = "TUTTI_"


@dataclass(frozen=True)
class PermittedValues:
    """The permitted values of an environment variable of tutti: a description in words and a check.

    Attributes:
        words: description of the values, for error messages.
        valid: returns whether a text is a permitted value.
    """

    words: str
    valid: Callable[[str], bool]


def _is(kind: Callable[[str], float]) -> Callable[[str], bool]:
    def valid(text: str) -> bool:
        try:
            return math.isfinite(kind(text))
        except ValueError:
            return False

    return valid


def _or_none(values: PermittedValues) -> PermittedValues:
    return PermittedValues(f"{values.words}, or none", lambda text: text.lower() == "none" or values.valid(text))


def choice(*names: str) -> PermittedValues:
    """Return a ``PermittedValues`` for an environment variable of which the value must be one of ``names``.

    Its ``words`` describe the permitted values for a UsageError, as text ``name or name``; its function ``valid`` takes
    a text and returns whether the text is one of them.
    """
    return PermittedValues(" or ".join(names), lambda text: text in names)


# The truth values that the command line accepts.
_TRUTHS = frozenset(("0", "1", "f", "t", "false", "true", "n", "y", "no", "yes"))
_OF_TYPE: Mapping[Any, PermittedValues] = {
    int: PermittedValues("a whole number", _is(int)),
    float: PermittedValues("a number", _is(float)),
    bool: PermittedValues("true or false", lambda text: text.lower() in _TRUTHS),
    str: PermittedValues("text", lambda text: True),
}
NUMBER, TEXT = _OF_TYPE[float], _OF_TYPE[str]
SWITCH = choice("on", "1", "off", "0")


def values_of_type(hint: Any) -> PermittedValues:
    """Return the permitted values of the environment variable of an option, from the option's type.

    Args:
        hint: type of a field of ``TrainConfig``: bool, int, float, str, a Literal of texts, or one of these and None.

    Returns:
        A ``PermittedValues``: ``words``, a description for error messages such as ``a whole number``, and ``valid``, a
        function that takes the text of a variable and returns whether the option permits the text.
    """
    if get_origin(hint) is Literal:
        return choice(*get_args(hint))
    members = get_args(hint) or (hint,)
    found = next(_OF_TYPE[member] for member in members if member is not NoneType)
    return found if NoneType not in members or found is TEXT else _or_none(found)


OPTIONS: Mapping[str, PermittedValues] = {
    name: values_of_type(hint) for name, hint in get_type_hints(TrainConfig).items()
}
"""Fields of ``TrainConfig``, the options of ``tutti train``."""

MACHINE: Mapping[str, PermittedValues] = {
    "CACHE": TEXT,  # folder of decoded data
    "DIAGNOSTICS": SWITCH,  # checks for classic mistakes, which also call the loss function
    "KERNELS": SWITCH,  # compiled loops
    "LOG_RANKS": choice("all"),  # ranks whose output is shown
    "PROCESS_SETUP": SWITCH,  # allocator, excepthook, watchdog, interface: docs/environment.md
    "VERBOSITY": choice("quiet", "verbose", "debug"),  # what -q, -v and -vv set, for ranks too
}
"""Variables that users set for a machine, for every run on it."""

INTERNAL: Mapping[str, PermittedValues] = {
    "LAUNCHED": NUMBER,  # from the command to its ranks: Unix time at which it was started
    "STORE": TEXT,  # from the launcher to its ranks: file of their rendezvous store
    "TETHER": choice("stdin", "stdin-kill"),  # from a remote launcher: stdin ends and signals the process
    "TEST_DATA": TEXT,  # to the tests alone: folder of published data sets
}
"""Variables that tutti sets for the processes that it starts."""

KNOWN: Mapping[str, PermittedValues] = {
    f"{PREFIX}{name.upper()}": values for table in (OPTIONS, MACHINE, INTERNAL) for name, values in table.items()
}
"""Every variable by its full name."""

SETTINGS = frozenset(f"{PREFIX}{name.upper()}" for name in OPTIONS)
"""The variables that are options of ``tutti train``."""


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise UsageError if a ``TUTTI_*`` variable is unknown, naming the nearest, or has a value that is not permitted.

    Args:
        environ: the environment, such as ``os.environ``. Variables without the prefix are not checked, nor are the
            variables that Kubernetes sets for a service named ``tutti-…``.

    >>> check_variables({"TUTTI_BATHSIZE": "3"})
    Traceback (most recent call last):
    tutti.errors.UsageError: there is no variable TUTTI_BATHSIZE. Did you mean TUTTI_BATCH_SIZE? Unset it otherwise.
    """
    services = tuple(name.removesuffix("SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST"))
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        # Kubernetes sets variables with such names for every service of a namespace, for a service tutti-… too.
        if name.startswith(tuple(f"{service}{part}" for service in services for part in ("SERVICE_", "PORT"))):
            continue
        if name not in KNOWN:
            raise UsageError(f"there is no variable {name}", remedy=_nearest(name))
        if not KNOWN[name].valid(environ[name]):
            raise UsageError(f"{name} is '{environ[name]}'", remedy=f"give {KNOWN[name].words}, or unset it")


def is_off(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether the environment switches off the feature of the variable ``TUTTI_{name}``; on if unset.

    The values ``0`` and ``off`` switch it off; any other leaves it on.

    Args:
        name: name of the variable without its prefix.
        environ: the environment, such as ``os.environ``.

    >>> is_off("KERNELS", {"TUTTI_KERNELS": "off"}), is_off("KERNELS", {})
    (True, False)
    """
    return environ.get(PREFIX + name) in ("0", "off")


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment without the variables that stand for options of ``tutti train``.

    Used to start a run whose configuration is complete in a file, so that no ``TUTTI_*`` variable changes an option.

    Args:
        environ: environment variables, such as ``os.environ``; not changed.
    """
    return {name: value for name, value in environ.items() if name not in SETTINGS}


def _nearest(name: str) -> str:
    """Return the remedy for an unknown variable. The common prefix is not compared: every name would be near."""
    known = {other.removeprefix(PREFIX): other for other in KNOWN if other.removeprefix(PREFIX) not in INTERNAL}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {known[near[0]]}? Unset it otherwise"
    others = ", ".join(f"{PREFIX}{other}" for other in MACHINE)
    return f"unset it; variables are {PREFIX} with an option of tutti train in capitals ({PREFIX}BATCH_SIZE), {others}"
