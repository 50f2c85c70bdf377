"""``tutti doctor``: check hardware, software and collectives of this machine, and say how to fix problems."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from tutti import cgroup, process_context
from tutti.config.variables import PREFIX, check_variables
from tutti.doctor import collective_probe, limits, machine, software
from tutti.doctor.finding import Check, Finding, Mark, checked, conclude
from tutti.errors import UsageError
from tutti.launcher.encoding import json_text

WIDTH = 100
"""Characters of a line of findings."""
_NAME_WIDTH = 21
_COLOURS: dict[Mark, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False) -> int:
    """Check this machine, and say how to repair what is wrong.

    Example: tutti doctor

    Takes about ten seconds. Exit code 0: no problem; 5: a collective fails; others as in tutti train.

    Parameters
    ----------
    as_json:
        print one JSON object; keys end with their unit

    Returns
    -------
    int
        Exit code. 0: no problem. 5 (``PEER``): ranks cannot communicate with each other. Otherwise the code of
        the first problem found: 2 wrong settings or limits, 8 a directory that cannot be written, 1 a check
        that failed itself.
    """
    findings = []
    printed: set[str] = set()
    for finding in run_checks():
        findings.append(finding)
        if not as_json:
            print_finding(finding, printed)
    code = conclude(findings)
    problems = sum(finding.mark == "problem" for finding in findings)
    if as_json:
        print(json_text(report(findings), sys.stdout))
    else:
        print(f"{problems or 'no'} problem{'' if problems == 1 else 's'} found")
    return code


def run_checks() -> Iterator[Finding]:
    """Run the checks of ``tutti doctor`` one after the other; all together take about ten seconds.

    Most checks read this process's machine, environment and packages. The last two start two and four local ranks by
    tutti's launcher, which all-reduce tensors with each other and have ended when their lines are yielded. A check that
    raises gives a line with the mark ``problem``.

    Yields:
        The lines of the report one by one, as soon as the check that gives them has ended. Each has a name, a mark
        (``ok``, ``note`` or ``problem``), a text, measured values by name, and for a problem a remedy and an exit code.
    """
    allowed = cgroup.read_limits()
    checks: list[tuple[str, Check]] = [
        ("versions", software.software),
        ("module", software.module),
        ("extras", software.extras),
        ("kernels", software.compiled_loops),
        ("system", machine.system),
        ("cores", partial(machine.cores, allowed)),
        ("memory", partial(machine.memory, allowed)),
        ("threads", partial(machine.threads, os.environ)),
        ("shared_memory", limits.shared_memory),
        ("open_files", limits.open_files),
        ("processes", partial(limits.processes, allowed)),
        ("network", partial(limits.network, os.environ)),
        ("launcher", launcher),
        ("variables", variables),
        ("directory", limits.directory),
        ("memory_bandwidth", machine.bandwidth),
        ("start_2", partial(collective_probe.collectives, 2)),
        ("start_4", partial(collective_probe.collectives, 4)),
    ]
    for name, check in checks:
        yield from checked(name, check)


def launcher() -> Iterator[Finding]:
    """Check which launcher (torchrun, srun, mpirun, …) has started this process, by its environment variables.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``launcher``. Values: ``source`` (the launcher,
        ``single`` for none), ``rank`` and ``size_processes``. A ``problem``, with ``source`` None, if the variables are
        malformed or incomplete; else ``ok``.
    """
    try:
        found = process_context.read_identity(os.environ)
    except UsageError as error:
        remedy = "Start with tutti run, torchrun, srun or mpirun, or unset the variables."
        yield Finding("launcher", "problem", str(error), {"source": None}, remedy)
        return
    values = {"source": found.source, "rank": found.rank, "size_processes": found.size}
    text = "none: tutti starts its own ranks"
    if found.source != "single":
        text = f"{found.source}: this is rank {found.rank} of {found.size}"
    yield Finding("launcher", "ok", text, values)


def variables() -> Iterator[Finding]:
    """Check that all ``TUTTI_*`` variables in the environment have known names and valid values.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``variables``: ``ok``, or a ``problem`` whose
        text describes the first unknown or invalid variable. Values: ``names``, a sorted list of all of them.
    """
    names = sorted(name for name in os.environ if name.startswith(PREFIX))
    try:
        check_variables(os.environ)
    except UsageError as error:
        yield Finding("variables", "problem", str(error), {"names": names}, "Correct the variable, or unset it.")
        return
    yield Finding("variables", "ok", ", ".join(names) or f"none that begins with {PREFIX}", {"names": names})


def report(findings: list[Finding]) -> dict[str, Any]:
    """Return the JSON object that ``tutti doctor --json`` prints.

    Args:
        findings: lines of the report of all checks, in order.

    Returns:
        ``exit_code`` (int), ``problems_count`` (int) and ``checks``: name of the line → its ``mark`` (``ok``, ``note``
        or ``problem``), ``text``, ``remedy`` (None without one) and measured values.
    """
    entries = {
        finding.name: {"mark": finding.mark, "text": finding.text, "remedy": finding.remedy or None, **finding.values}
        for finding in findings
    }
    problems = sum(finding.mark == "problem" for finding in findings)
    return {"exit_code": int(conclude(findings)), "problems_count": problems, "checks": entries}


def lines(finding: Finding, printed: set[str]) -> list[str]:
    """Format a line of the report of ``tutti doctor`` for people: mark, name and text, then the remedy.

    Args:
        finding: result of a check: mark (``ok``, ``note`` or ``problem``), name, text and remedy.
        printed: remedies printed so far, which are not repeated; the remedy of ``finding`` is added to this set.

    Returns:
        Lines of at most 100 columns: one or two with mark, name and text (cut off with ``…``), then the remedy after an
        arrow, if there is one that is not in ``printed``.
    """
    indent = " " * 9
    head = f"{finding.mark:<9}{finding.name.replace('_', ' '):<{_NAME_WIDTH}}"
    text = " ".join(finding.text.split())
    found = textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), max_lines=2, placeholder=" …"
    )
    if finding.remedy and finding.remedy not in printed:
        printed.add(finding.remedy)
        found += textwrap.wrap(
            f"→ {finding.remedy}",
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return found


def print_finding(finding: Finding, printed: set[str]) -> None:
    """Print a finding of ``tutti doctor``: mark, name and text, then the remedy; in a terminal the mark is coloured.

    Args:
        finding: result of a check: mark (``ok``, ``note`` or ``problem``), name, text and remedy.
        printed: remedies printed so far, which are not repeated; the remedy of ``finding`` is added to this set.
    """
    first, *rest = lines(finding, printed)
    if not sys.stdout.isatty():
        print("\n".join([first, *rest]), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    mark = Text(first[: len(finding.mark)], style=_COLOURS[finding.mark])
    Console().print(Text.assemble(mark, "\n".join([first[len(finding.mark) :], *rest])), soft_wrap=True)
