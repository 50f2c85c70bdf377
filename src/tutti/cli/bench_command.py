"""``tutti bench``: measure what this machine can do, and write machine.json."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tutti import process_context
from tutti.cli.console_tables import print_table
from tutti.cli.output_checks import check_writable
from tutti.cli.workload_command import quantity
from tutti.device import check_device, usable_cores
from tutti.errors import ExitCode, UsageError, counted, did_you_mean
from tutti.launcher.encoding import json_text
from tutti.workload.bench import PARTS, bench_machine
from tutti.workload.bench_scaling import refuse_own_flags, scaling_rows
from tutti.workload.machine_figure import write_machine_figure
from tutti.workload.machine_file import machine_json, write_machine

if TYPE_CHECKING:
    from tutti.launcher.context import World
    from tutti.workload.bench_timing import Findings
    from tutti.workload.machine_file import Figure, Machine


def bench(
    *parts: Annotated[str, Parameter(show=False)],
    output: Annotated[Path, Parameter(name=("--out", "-o", "--output"))] = Path("machine.json"),
    svg: Annotated[Path | None, Parameter(show_default=False)] = None,
    ranks: Annotated[str | None, Parameter(show_default=False)] = None,
    device: str = "auto",
    disk: Annotated[Path, Parameter(show_default=False)] = Path("."),
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Measure this machine: devices, links, disks, optimizers.

    Example: tutti bench device links -o machine.json
    Example: tutti bench scaling digits --ranks 1,2 -- --batch-size 512

    Takes one or several parts: device, links, collectives, data, disk,
    optimizer, strategies; all of them without. The last part may be scaling
    TASK, the samples a second of a task on 1, 2 and more devices, with flags
    of tutti train after --. All parts take some minutes; each measurement is
    shown on standard error. Nothing else should run meanwhile.

    Parameters
    ----------
    output:
        the file to write
    svg:
        draw all curves into this file
    ranks:
        ranks of links, collectives and scaling, such as 2,4 [2 and the cores]
    device:
        auto, cpu or an accelerator such as cuda
    disk:
        folder on the disk to measure; default: this one
    as_json:
        print the content of machine.json

    Returns
    -------
    int
        Exit code. 0: the measurements are printed, and written to ``output``. A wrong part or option, or a start by
        another launcher such as torchrun, raises UsageError, which ``tutti`` turns into exit code 2; a rank or run
        that fails raises a TuttiError with its exit code, a file that cannot be written DiskError (8).
    """
    process_context.check_own_processes("tutti bench", os.environ)
    words, scaling = _cut(parts)
    for part in words:
        if part not in PARTS:
            raise UsageError(f"there is no part '{part}' to measure", remedy=did_you_mean(part, (*PARTS, "scaling")))
    check_device(device)
    chosen = [part for part in PARTS if part in words or not parts]
    counts = _ranks(ranks, 1 if scaling else 2)
    if not disk.is_dir():
        raise UsageError("there is no such folder", where=f"--disk {disk}", remedy="give a folder that exists")
    check_writable(output, "the machine file")
    check_writable(svg, "the figure")
    several = [count for count in counts if count > 1]
    found = bench_machine(chosen, several, device, disk, _strategies, scaling, counts if ranks else [1, *counts])
    write_machine(found, output)
    if svg is not None:
        write_machine_figure(found, svg)
    if as_json:
        print(json_text(machine_json(found), sys.stdout))
    else:
        show_machine(found)
        print(f"written to {output}")
    return ExitCode.DONE


def _strategies(world: World, found: Findings) -> None:
    """Measure the Python work of the strategies in a launched rank; the command itself imports no training code."""
    from tutti.planning.bench_strategies import bench_strategies

    bench_strategies(world, found)


def _cut(parts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the parts before ``scaling``, and the task with its flags behind ``scaling``."""
    if "scaling" not in parts:
        return list(parts), []
    place = parts.index("scaling")
    if place + 1 == len(parts):
        raise UsageError("there is no task to measure the scaling of", remedy="name one: tutti bench scaling digits")
    refuse_own_flags(parts[place + 2 :])
    return list(parts[:place]), list(parts[place + 1 :])


def _ranks(text: str | None, least: int) -> list[int]:
    if text is None:
        return sorted({2, max(2, usable_cores())})
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < least:
        raise UsageError(f"--ranks is '{text}'", remedy=f"give numbers of at least {least}, such as 2,4")
    return found


def show_machine(found: Machine) -> None:
    """Print what ``tutti bench`` has measured as tables: cost curves, throughputs of tasks, and other single numbers.

    A curve's row has the rate of large calls, the time of an empty call, the size at which half the rate is reached,
    the largest relative error of the fitted line, and the number of measurements. A number's row has median,
    interquartile range in per cent of it, number of measurements, and basis: where the number comes from, such as
    ``measured``. A task's row has the samples a second on a number of devices, and the share of linear scaling from the
    fewest devices.

    Args:
        found: the measured machine.
    """
    print(
        f"{found.device['name']} · {counted(found.host['cores'], 'core')} · {found.measured} · {found.seconds:.0f} s\n"
    )
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
    for task, measured in scaling_rows(found.figures).items():
        rows = [
            [
                str(count),
                _measure(one.value, one.unit),
                _spread(one),
                _measure(one.value / count, one.unit),
                f"{efficiency:.0%}",
            ]
            for count, one, efficiency in measured
        ]
        print_table([f"devices, {task}", "throughput", "spread", "a device", "of linear"], rows)
        print()
    rows = [
        [name, _measure(one.value, one.unit), _spread(one), str(one.n), one.basis]
        for name, one in found.figures.items()
        if not name.startswith("scaling/")
    ]
    if rows:
        print_table(["figure", "median", "spread", "n", "basis"], rows)


def _spread(one: Figure) -> str:
    """Return a figure's interquartile range in per cent of the figure."""
    return "" if one.spread is None else f"{one.spread / one.value:.1%}" if one.value else "0"


def _measure(value: float, unit: str) -> str:
    """Return a number with its unit, with a prefix of thousands where it is large."""
    text = quantity(value)
    return f"{text}{unit}" if text[-1].isalpha() else f"{text} {unit}"
