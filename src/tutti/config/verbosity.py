"""Verbosity of commands on standard error: ``-q``, ``-v`` and ``-vv`` set the level of logger ``tutti``. No torch."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping

from tutti.errors import UsageError

VERBOSITY = "TUTTI_VERBOSITY"
"""Variable that passes the choice of ``-q``, ``-v`` or ``-vv`` from a command to its ranks, on any node."""

_LEVELS = {"quiet": logging.ERROR, "verbose": logging.INFO, "debug": logging.DEBUG}
_COUNTED = {1: "verbose", 2: "debug"}
_WORD = re.compile(r"-(v+|q)|--(verbose|quiet)")

EPILOGUE = "Every command: -v tells what tutti decides and why, -vv all details; -q only errors and the result."
"""Last lines of every help page."""


def take_verbosity(words: list[str], environ: MutableMapping[str, str]) -> list[str]:
    """Take ``-v``, ``-vv``, ``-q``, ``--verbose`` and ``--quiet`` out of a command line, and set ``TUTTI_VERBOSITY``.

    Args:
        words: the command line without ``tutti``; words after ``--`` stay.
        environ: the environment, changed in place: the variable becomes ``quiet`` (``-q``), ``verbose`` (``-v``) or
            ``debug`` (``-vv``); without these flags the variable stays.

    Returns:
        The words left over.

    Raises:
        UsageError: ``-v`` and ``-q`` are combined.

    >>> environ = {}
    >>> take_verbosity(["train", "digits", "-v", "-v", "--", "-q"], environ), environ
    (['train', 'digits', '--', '-q'], {'TUTTI_VERBOSITY': 'debug'})
    """
    end = words.index("--") if "--" in words else len(words)
    found = [match for word in words[:end] if (match := _WORD.fullmatch(word))]
    more = sum(len(match[1]) if match[1] else 1 for match in found if match[0] not in ("-q", "--quiet"))
    quiet = any(match[0] in ("-q", "--quiet") for match in found)
    if quiet and more:
        raise UsageError("-q and -v contradict each other", remedy="leave out one of the two")
    if found:
        environ[VERBOSITY] = "quiet" if quiet else _COUNTED.get(more, "debug")
    return [word for word in words[:end] if not _WORD.fullmatch(word)] + words[end:]


def is_quiet(environ: Mapping[str, str]) -> bool:
    """Return whether ``-q`` was given, so that only errors and the result are shown.

    Args:
        environ: environment variables; True if ``TUTTI_VERBOSITY`` is ``quiet``.
    """
    return environ.get(VERBOSITY) == "quiet"


class StandardErrorHandler(logging.Handler):
    """Logging handler that writes to ``sys.stderr``: all records of rank 0, and warnings and errors of all ranks.

    With ``-vv`` every rank writes all records. The stream is looked up for each record. If the root logger has
    handlers, as after a script's ``logging.basicConfig``, these get the records, and this handler writes nothing. An
    error in writing, such as a closed pipe, is ignored.

    Args:
        environ: the environment, whose ``RANK`` is this process's rank, if it is a rank.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._environ = environ
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record to standard error: warnings and errors on every rank, lower levels on rank 0 alone.

        If ``TUTTI_VERBOSITY`` is ``debug`` (``-vv``), all ranks write records of all levels. Nothing is written if the
        root logger has handlers, which get the record already.
        """
        everywhere = record.levelno >= logging.WARNING or self._environ.get(VERBOSITY) == "debug"
        if logging.getLogger().handlers or not (everywhere or self._environ.get("RANK", "0") == "0"):
            return
        # A closed pipe or a lost terminal ends the output, not the run.
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


def configure_logging(environ: Mapping[str, str]) -> None:
    """Set the level of the logger ``tutti`` by ``TUTTI_VERBOSITY``, and let it write to standard error.

    Levels are ERROR for ``quiet``, INFO for ``verbose`` and DEBUG for ``debug``. Without the variable nothing changes.
    The root logger is not touched, and a second call adds no second handler.

    Args:
        environ: the environment, such as ``os.environ``, checked by ``check_variables``.
    """
    level = _LEVELS.get(environ.get(VERBOSITY, ""))
    if level is None:
        return
    logger = logging.getLogger("tutti")
    logger.setLevel(level)
    if not any(isinstance(handler, StandardErrorHandler) for handler in logger.handlers):
        logger.addHandler(StandardErrorHandler(environ))
