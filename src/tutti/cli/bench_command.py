"""``tutti bench``: measure what this machine can do, and write machine.json."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tutti.cli.console_tables import print_table
from tutti.cli.workload_command import quantity
from tutti.device import check_device, usable_cores
from tutti.errors import ExitCode, UsageError, did_you_mean
from tutti.launcher.encoding import json_text
from tutti.workload.bench import PARTS, bench_machine
from tutti.workload.machine_figure import write_machine_figure
from tutti.workload.machine_file import machine_json, write_machine

if TYPE_CHECKING:
    from tutti.workload.machine_file import Machine


def bench(
    *parts: Annotated[str, Parameter(show=False)],
    output: Annotated[Path, Parameter(name=("-o", "--output"))] = Path("machine.json"),
    svg: Annotated[Path | None, Parameter(show_default=False)] = None,
    ranks: Annotated[str | None, Parameter(show_default=False)] = None,
    device: str = "auto",
    disk: Annotated[Path, Parameter(show_default=False)] = Path("."),
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Measure devices, links, collectives, data, disk and optimizers here.

    Example: tutti bench device links -o machine.json

    Takes one or several parts: device, links, collectives, data, disk,
    optimizer; all of them without. Nothing else should run meanwhile.

    Parameters
    ----------
    output:
        the file to write
    svg:
        draw all curves into this file
    ranks:
        ranks of links and collectives, such as 2,4; default: 2 and the cores
    device:
        auto, cpu or an accelerator such as cuda
    disk:
        folder on the disk to measure; default: this one
    as_json:
        print the content of machine.json

    Returns
    -------
    int
        Exit code. 0: the measurements are printed, and written to ``output``. A wrong part or option raises
        UsageError, which ``tutti`` turns into exit code 2.
    """
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"there is no part '{part}' to measure", remedy=did_you_mean(part, PARTS))
    check_device(device)
    chosen = [part for part in PARTS if part in parts or not parts]
    if not disk.is_dir():
        raise UsageError("there is no such folder", where=f"--disk {disk}", remedy="give a folder that exists")
    for flag, path in (("--output", output), ("--svg", svg)):
        # Before minutes of measurement, and not after.
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise UsageError("the result cannot be written", where=f"{flag} {path}", why=why, remedy="give a file")
    found = bench_machine(chosen, _ranks(ranks), device, disk)
    write_machine(found, output)
    if svg is not None:
        write_machine_figure(found, svg)
    if as_json:
        print(json_text(machine_json(found), sys.stdout))
    else:
        show_machine(found)
        print(f"written to {output}")
    return ExitCode.DONE


def _ranks(text: str | None) -> list[int]:
    if text is None:
        return sorted({2, max(2, usable_cores())})
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 2:
        raise UsageError(f"--ranks is '{text}'", remedy="give numbers of at least 2, such as 2,4")
    return found


def show_machine(found: Machine) -> None:
    """Print what ``tutti bench`` has measured as two tables: cost curves, and single numbers such as rates.

    A curve's row has the rate of large calls, the time of an empty call, the size at which half the rate is reached,
    the largest relative error of the fitted line, and the number of measurements. A number's row has median,
    interquartile range in per cent of it, number of measurements, and basis, such as ``measured``.

    Args:
        found: the measured machine.
    """
    print(f"{found.device['name']} · {found.host['cores']} cores · {found.measured} · {found.seconds:.0f} s\n")
    if found.curves:
        rows = [
            [
                name,
                _measure(curve.rate, f"{curve.unit}/s"),
                f"{curve.fixed * 1e6:.3g} µs",
                _measure(curve.fixed * curve.rate, curve.unit),
                f"{curve.error:.0%}",
                str(sum(point.n for point in curve.points)),
            ]
            for name, curve in found.curves.items()
        ]
        print_table(["curve", "rate of large calls", "an empty call", "half of it at", "largest error", "n"], rows)
        print()
    if found.figures:
        rows = [
            [
                name,
                _measure(one.value, one.unit),
                "" if one.spread is None else f"{one.spread / one.value:.1%}" if one.value else "0",
                str(one.n),
                one.basis,
            ]
            for name, one in found.figures.items()
        ]
        print_table(["figure", "median", "spread", "n", "basis"], rows)


def _measure(value: float, unit: str) -> str:
    """Return a number with its unit, with a prefix of thousands where it is large."""
    text = quantity(value)
    return f"{text}{unit}" if text[-1].isalpha() else f"{text} {unit}"
