"""Findings of checks of the machine: a line of text, its values, and a remedy for each problem."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tutti.errors import ExitCode, TuttiError

Mark = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report of ``tutti doctor``: the result of one check of this machine.

    Attributes:
        name: name of the check or of the thing checked, in snake case, such as ``open_files``; unique in a report.
        mark: ``ok``, ``note`` (may cost speed) or ``problem`` (keeps something from working).
        text: description, for people.
        values: the same facts by name, for programs; the names of quantities end with their unit, such as
            ``free_bytes``.
        remedy: one sentence on how to fix it; every problem has one.
        code: exit code of a report in which this problem decides (see `conclude`).
    """

    name: str
    mark: Mark
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    code: ExitCode = ExitCode.USAGE


Check = Callable[[], Iterable[Finding]]


def checked(name: str, check: Check) -> list[Finding]:
    """Run one check of ``tutti doctor``, and collect the lines of the report that it yields.

    An exception or timeout of the check does not propagate: it becomes one line, a problem with the exit code
    ``ExitCode.UNEXPECTED``, in place of all of the check's lines.

    Args:
        name: name of the line that reports an exception or timeout.
        check: function without arguments that yields the lines.

    Returns:
        The lines in order, each with name, mark (``ok``, ``note`` or ``problem``), text, measured values, and for a
        problem a remedy and an exit code.
    """
    try:
        return list(check())
    except subprocess.TimeoutExpired as error:
        text = f"did not finish within {error.timeout:g} s"
    except (TuttiError, OSError) as error:
        text = str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    remedy = "Run it again; if it stays, report this line with the whole output."
    return [Finding(name, "problem", f"could not be checked: {text}", remedy=remedy, code=ExitCode.UNEXPECTED)]


def conclude(findings: Sequence[Finding]) -> ExitCode:
    """Return the exit code of a report of ``tutti doctor``.

    If a problem has the exit code 5 (``ExitCode.PEER``), as problems of collectives and of the network interface have,
    the result is this code. Otherwise the result is the exit code of the first problem.

    Args:
        findings: lines of the report, in order; only those with the mark ``problem`` count.

    Returns:
        A member of ``tutti.errors.ExitCode``; 0 (``DONE``) without a problem.

    >>> full = Finding("directory", "problem", "cannot be written", remedy="Change it.", code=ExitCode.DISK)
    >>> conclude([full]), conclude([full, Finding("sum", "problem", "wrong", remedy="No.", code=ExitCode.PEER)])
    (<ExitCode.DISK: 8>, <ExitCode.PEER: 5>)
    """
    codes = [finding.code for finding in findings if finding.mark == "problem"]
    return ExitCode.PEER if ExitCode.PEER in codes else next(iter(codes), ExitCode.DONE)
