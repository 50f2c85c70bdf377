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
from tutti.report.plan_section import plan_section
from tutti.report.report_charts import PARTS, SERIES
from tutti.report.report_sections import compose_report
from tutti.report.run_record import printable, read_run

TEMPLATE = "report.html.j2"
_BEGINNING = "<!doctype html>"


def write_report(paths: Sequence[Path], plan: Path | None, out: Path | None) -> Path:
    """Write the report of run directories and return its path.

    Args:
        paths: run directories, each once.
        plan: file of a plan, or None.
        out: file to write; None for ``report.html`` in the directory of a single run, or here for several.

    Raises:
        UsageError: a package is missing, a path is no run or no plan, or ``out`` is another file than a report.
        DiskError: the file cannot be written.
    """
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"a report needs the package {package}", remedy=f"run {pip_install('report')}")
    if not paths:
        raise UsageError("no run is given", remedy="write tutti report runs/NAME")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("a run is given twice", remedy="give each run directory once")
    runs = [read_run(path) for path in paths]
    section = plan_section(plan, runs) if plan is not None else None
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
    content = compose_report(runs, section, landscape_section(runs))
    page = environment.get_template(TEMPLATE).render(
        report=content, version=VERSION, parts=PARTS, series=SERIES, several=len(runs) > 1
    )
    _write(target, page)
    return target


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
