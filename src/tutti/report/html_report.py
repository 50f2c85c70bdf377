"""Render a report as one HTML file: style, script and charts are in it, and it asks no network for anything."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from tutti.distribution import VERSION, pip_install
from tutti.errors import DiskError, UsageError
from tutti.report.landscape_section import landscape_section
from tutti.report.noise_section import noise_section, target_law_section
from tutti.report.plan_section import plan_section, read_plan
from tutti.report.report_charts import PARTS, SERIES
from tutti.report.report_sections import compose_report
from tutti.report.run_record import printable, read_run
from tutti.report.target_law import TargetLaw, plan_law

PACKAGES = ("jinja2", "matplotlib")
TEMPLATE = "report.html.j2"
WORTH_A_REPORT = 20.0
"""Seconds from which on a run writes its report. To load two packages and to draw takes more than a second."""

_BEGINNING = "<!doctype html>"


def write_report(paths: Sequence[Path], plan: Path | None, out: Path | None, law: TargetLaw | None = None) -> Path:
    """Write one self-contained HTML file that reports on training runs, and return the path of the file.

    Style, scripts and charts are in the file; it loads nothing from a network. Needs jinja2 and matplotlib.

    Args:
        paths: run directories of ``tutti train``, each once.
        plan: plan to show beside the runs: TOML of ``tutti plan --out``, or JSON in a file that ends in ``.json``, such
            as of ``tutti simulate``; None for none.
        out: file to write, replaced if it is an HTML page; None for ``report.html`` in the directory of a single run,
            in the working directory for several.
        law: law of samples to a target that is drawn, such as of a recipe; None for that of ``plan``, if it states one.

    Returns:
        Path of the file that was written.

    Raises:
        UsageError: jinja2 or matplotlib is missing, a path is no run, ``plan`` is no plan, no path or a path twice
            is given, or ``out`` exists and is no HTML page.
        DiskError: the file cannot be written.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"a report needs the package {package}", remedy=f"run {pip_install('report')}")
    if not paths:
        raise UsageError("no run is given", remedy="write tutti report runs/NAME")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("a run is given twice", remedy="give each run directory once")
    runs = [read_run(path) for path in paths]
    planned = None if plan is None else read_plan(plan)
    section = None if planned is None else plan_section(planned, runs)
    if law is None and planned is not None:
        law = plan_law(planned.facts, planned.name)
    target = out or (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))
    _check(target)
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tutti.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    content = compose_report(runs, section, noise_section(runs), target_law_section(runs, law), landscape_section(runs))
    page = environment.get_template(TEMPLATE).render(
        report=content, version=VERSION, parts=PARTS, series=SERIES, several=len(runs) > 1
    )
    _write(target, page)
    return target


def report_at_the_end(run: Path, seconds: float) -> str | None:
    """Write a finished run's ``report.html`` into its directory, if matplotlib and jinja2 are installed.

    Raises no error. A run of less than 20 seconds gets no report: loading the two packages and drawing would be a
    noticeable part of its time.

    Args:
        run: the run directory.
        seconds: duration of the run.

    Returns:
        A sentence with the reason why the report could not be written; None if it was written, or the run gets none.
    """
    if seconds < WORTH_A_REPORT or not all(map(importlib.util.find_spec, PACKAGES)):
        return None
    try:
        write_report([run], None, None)
    except Exception as error:
        # The run has succeeded, and its exit code must say so whatever its files hold.
        return f"the report of the run was not written: {error}"
    return None


def _check(target: Path) -> None:
    """Raise UsageError if the file to write is a directory, or there is one that is no page."""
    where = printable(target)
    if target.is_dir():
        raise UsageError("--out is a directory", where=where, remedy="name a file, such as report.html")
    with contextlib.suppress(OSError):
        with target.open("rb") as file:
            beginning = file.read(len(_BEGINNING))
        if beginning and beginning.lower() != _BEGINNING.encode():
            raise UsageError("--out exists and is no HTML page", where=where, remedy="choose another name")


def _write(target: Path, page: str) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DiskError("cannot write the report", where=printable(target), why=error.strerror) from error
