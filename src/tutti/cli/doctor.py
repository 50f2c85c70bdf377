"""``tutti doctor``: what this machine has, whether collectives work here, and what to do about what is wrong."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from tutti.cli import probe
from tutti.errors import UsageError
from tutti.measure import cgroup, limits, machine, software
from tutti.measure.finding import Check, Finding, Mark, checked, conclude
from tutti.world import identity

WIDTH = 100
_NAME_WIDTH = 21
_COLOURS: dict[Mark, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False) -> int:
    """Check this machine: what it has, whether collectives work, what to do about problems.

    Example: tutti doctor

    Takes about ten seconds. Exit code 0: no problem; 5: a collective fails; others as in tutti train.

    Parameters
    ----------
    as_json:
        print one JSON object; keys end with their unit
    """
    findings = []
    printed: set[str] = set()
    for finding in examine():
        findings.append(finding)
        if not as_json:
            show(finding, printed)
    code = conclude(findings)
    problems = sum(finding.mark == "problem" for finding in findings)
    if as_json:
        print(json.dumps(report(findings), indent=2, ensure_ascii=False))
    else:
        print(f"{problems or 'no'} problem{'' if problems == 1 else 's'} found")
    return code


def examine() -> Iterator[Finding]:
    """All findings, each as soon as it is known."""
    allowed = cgroup.read()
    checks: list[tuple[str, Check]] = [
        ("versions", software.software),
        ("extras", software.extras),
        ("system", machine.system),
        ("cores", partial(machine.cores, allowed)),
        ("memory", partial(machine.memory, allowed)),
        ("threads", partial(machine.threads, os.environ)),
        ("shared_memory", limits.shared_memory),
        ("open_files", limits.open_files),
        ("processes", partial(limits.processes, allowed)),
        ("network", partial(limits.network, os.environ)),
        ("launcher", launcher),
        ("directory", limits.directory),
        ("memory_bandwidth", machine.bandwidth),
        ("start_2", partial(probe.collectives, 2)),
        ("start_4", partial(probe.collectives, 4)),
    ]
    for name, check in checks:
        yield from checked(name, check)


def launcher() -> Iterator[Finding]:
    """Which launcher's variables are in the environment."""
    try:
        found = identity.read(os.environ)
    except UsageError as error:
        remedy = "Start with tutti run, torchrun, srun or mpirun, or unset the variables."
        yield Finding("launcher", "problem", str(error), {"source": None}, remedy)
        return
    values = {"source": found.source, "rank": found.rank, "size_processes": found.size}
    text = "none: tutti starts its own workers"
    if found.source != "single":
        text = f"{found.source}: this is rank {found.rank} of {found.size}"
    yield Finding("launcher", "ok", text, values)


def report(findings: list[Finding]) -> dict[str, Any]:
    """The whole report for programs: one entry a check."""
    entries = {
        finding.name: {"mark": finding.mark, "text": finding.text, "remedy": finding.remedy or None, **finding.values}
        for finding in findings
    }
    problems = sum(finding.mark == "problem" for finding in findings)
    return {"exit_code": int(conclude(findings)), "problems_count": problems, "checks": entries}


def lines(finding: Finding, printed: set[str]) -> list[str]:
    """A finding in at most four lines of 100 columns; a remedy that was ``printed`` before is not repeated."""
    indent = " " * 9
    head = f"{finding.mark:<9}{finding.name.replace('_', ' '):<{_NAME_WIDTH}}"
    text = " ".join(finding.text.split())
    found = textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), max_lines=2, placeholder=" …"
    )
    if finding.remedy and finding.remedy not in printed:
        printed.add(finding.remedy)
        found += textwrap.wrap(f"→ {finding.remedy}", WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")
    return found


def show(finding: Finding, printed: set[str]) -> None:
    """Print a finding now; its mark, which is a word, has a colour too where that is a terminal."""
    first, *rest = lines(finding, printed)
    if not sys.stdout.isatty():
        print("\n".join([first, *rest]), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    mark = Text(first[: len(finding.mark)], style=_COLOURS[finding.mark])
    Console().print(Text.assemble(mark, "\n".join([first[len(finding.mark) :], *rest])), soft_wrap=True)
