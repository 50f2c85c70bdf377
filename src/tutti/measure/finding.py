"""What a check of the machine found: one line, its numbers, and what to do where something is wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tutti.errors import ExitCode, TuttiError

Mark = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: snake case, unique in a report.
        mark: ``note`` is worth knowing and may cost speed; ``problem`` keeps something from working.
        text: what was found, for people.
        values: the same for programs; keys end with their unit.
        remedy: one sentence on what to do; every problem has one.
        code: exit code of a report whose worst problem this is.
    """

    name: str
    mark: Mark
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    code: ExitCode = ExitCode.USAGE


Check = Callable[[], Iterable[Finding]]


def checked(name: str, check: Check) -> list[Finding]:
    """What ``check`` found; where it fails or takes too long, a problem that names it."""
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
    """0 without a problem, 5 where a collective failed, otherwise the code of the first problem.

    >>> full = Finding("directory", "problem", "cannot be written", remedy="Change it.", code=ExitCode.DISK)
    >>> conclude([full]), conclude([full, Finding("sum", "problem", "wrong", remedy="No.", code=ExitCode.PEER)])
    (<ExitCode.DISK: 8>, <ExitCode.PEER: 5>)
    """
    codes = [finding.code for finding in findings if finding.mark == "problem"]
    return ExitCode.PEER if ExitCode.PEER in codes else next(iter(codes), ExitCode.DONE)


def size(count: float) -> str:
    """Bytes in binary units.

    >>> size(64 << 20), size(1536), size(0)
    ('64 MiB', '1.5 KiB', '0 B')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{round(count, 1 if count < 100 else 0):g} {units[0]}"
