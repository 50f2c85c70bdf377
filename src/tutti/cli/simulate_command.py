"""``tutti simulate``: predict the step of a task on a machine, from its trace and the machine's constants."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tutti.cli.console_tables import print_table
from tutti.cli.output_checks import check_writable
from tutti.cli.workload_command import quantity
from tutti.comm.collective_schedules import LinkCost
from tutti.config.bounds import check_least
from tutti.config.optimizer_config import check_optimizer
from tutti.config.settings import OptionalWholeNumber, WholeNumber
from tutti.errors import DiskError, ExitCode, UsageError, counted
from tutti.host_memory import format_bytes
from tutti.launcher.encoding import json_text, strict_json
from tutti.planning.planned_run import PlannedRun
from tutti.planning.task_or_script import SCRIPT_TRACED, TaskOrScript

if TYPE_CHECKING:
    from tutti.planning.step_costs import StepCosts
    from tutti.planning.step_prediction import StepPrediction
    from tutti.planning.step_program import StepTimes


_BITS = ("bit/s", "b/s", "bps")
_DEFAULTS: Mapping[str, Any] = {
    "strategy": "mirrored",
    "batch_size": 64,
    "optimizer": "adam:lr=0.001",
    "precision": "fp32",
    "activation_checkpointing": "none",
}
"""Options that neither the command line nor a script states."""
_LINK_UNITS: Mapping[str, Mapping[str, float]] = {
    "alpha": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "beta": {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
    | {f"{scale}{bit}": size / 8 for scale, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)) for bit in _BITS},
}
_ABOVE_ONE = (
    "efficiency above 100 %: the single device takes the micro-batches of all devices in turn; where devices are CPUs, "
    "it has the threads of all, from which small operators gain less than from several processes"
)
"""Note beside a prediction whose efficiency is above 1."""


def simulate_step(
    task: Annotated[str, Parameter(show=False)],
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    machine: str,
    strategy: Annotated[str | None, Parameter(show_default=False)] = None,
    devices: WholeNumber = 1,
    sweep: Annotated[str | None, Parameter(show_default=False)] = None,
    batch_size: Annotated[OptionalWholeNumber, Parameter(show_default=False)] = None,
    device_batch: Annotated[OptionalWholeNumber, Parameter(show_default=False)] = None,
    micro_batch: Annotated[OptionalWholeNumber, Parameter(show_default=False)] = None,
    workers: Annotated[OptionalWholeNumber, Parameter(show_default=False)] = None,
    devices_per_node: Annotated[OptionalWholeNumber, Parameter(show_default=False)] = None,
    network: Annotated[str | None, Parameter(show_default=False)] = None,
    optimizer: Annotated[str | None, Parameter(show_default=False)] = None,
    precision: Annotated[Literal["fp32", "bf16", "fp16", "fp64"] | None, Parameter(show_default=False)] = None,
    activation_checkpointing: Annotated[str | None, Parameter(show_default=False)] = None,
    slow: Annotated[str | None, Parameter(show_default=False)] = None,
    data: Annotated[str | None, Parameter(show_default=False)] = None,
    model: Annotated[str | None, Parameter(show_default=False)] = None,
    augment: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    svg: Annotated[Path | None, Parameter(show_default=False)] = None,
    timeline: Annotated[Path | None, Parameter(show_default=False)] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Predict the seconds of a step on devices that are not here.

    Example: tutti simulate text --machine a100x8 --precision bf16 --devices 64

    TASK is a task of tutti train, or a script that calls tutti.prepare, which
    runs up to its first loss; its own arguments follow --.

    Parameters
    ----------
    machine:
        machine.json of tutti bench, or a chip and devices a node: a100x8
    strategy:
        any strategy of tutti train, with options; default: the script's, or mirrored
    devices:
        devices of the run
    sweep:
        devices=8..1024: predict for each doubling
    batch_size:
        samples of a global batch; default: the script's, or 64
    device_batch:
        samples a device, in place of the global batch
    micro_batch:
        most samples in one forward pass
    workers:
        logical workers; default: data ranks
    devices_per_node:
        default: as measured together, or as the machine's name says
    network:
        link of a node, all its adapters together: alpha=5us,beta=400Gbit/s (plain
        numbers are seconds and bytes a second); or machine.json whose links and
        collectives were measured with one rank a node
    optimizer:
        as in tutti train; default: the script's, or adam:lr=0.001
    precision:
        as in tutti train; default: the script's, or fp32
    activation_checkpointing:
        as in tutti train
    slow:
        delay ranks or workers: rank=1,factor=3 or worker=1+2,ms=20
    data:
        folder, file or hub name that the task reads
    model:
        model of the task, name:key=value; default: the first
    augment:
        as in tutti train
    svg:
        draw the sweep into this file
    timeline:
        draw one step's timeline: FILE.svg, or FILE.json for Perfetto
    as_json:
        print JSON

    Returns
    -------
    int
        Exit code. 0: the prediction is printed. A wrong option, or a strategy that cannot be simulated, raises
        UsageError, which ``tutti`` turns into exit code 2; missing data raise DataError (3), a file that cannot be
        written DiskError (8).

    Notes
    -----
    ``task`` is a task of ``tutti train`` or the path of a script, ``arguments`` are the script's. ``optimizer`` is text
    such as ``adam:lr=0.001``, ``activation_checkpointing`` is ``none``, ``blocks`` or ``selective``, ``augment``
    whether training samples are changed at random. Printed for each number of devices: seconds of a step with quantiles
    and a 90 % band, samples a second, shares of computing, communication and idling, and memory of a device.
    """
    named = TaskOrScript.of(task, arguments)
    named.check_options(data=data, model=model, augment=augment)
    if optimizer is not None:
        check_optimizer(optimizer)
    counts = _counts(sweep, devices)
    _check_figures(svg, timeline, sweep)
    if batch_size is not None and device_batch is not None:
        raise UsageError("--batch-size and --device-batch both say how large a batch is", remedy="leave out one")
    check_least(
        {
            "--devices": devices,
            "--batch-size": batch_size,
            "--device-batch": device_batch,
            "--micro-batch": micro_batch,
            "--workers": workers,
            "--devices-per-node": devices_per_node,
        }
    )
    given: dict[str, Any] = {
        "strategy": strategy,
        "micro_batch": micro_batch,
        "workers": workers,
        "optimizer": optimizer,
        "precision": precision,
        "activation_checkpointing": activation_checkpointing,
        "slow": slow,
    }
    loaded = named.load_script()
    subject = task if loaded is None else loaded.task
    chosen = {
        **_DEFAULTS,
        **({} if loaded is None else loaded.options),
        **{name: value for name, value in given.items() if value is not None},
    }
    whole = chosen.pop("batch_size")
    runs = (
        PlannedRun(
            devices=str(count),
            batch_size=batch_size or (device_batch or 0) * count or whole,
            data=data,
            model=model,
            augment=augment,
            **chosen,
        )
        for count in counts
    )

    from tutti.planning.machine_choice import open_machine
    from tutti.planning.step_prediction import prediction_json

    costs = open_machine(machine, chosen["precision"], devices_per_node, parse_link(network))
    if loaded is not None:
        costs.rests.append(SCRIPT_TRACED)
    found: list[StepPrediction] = []
    for count, (config, prediction, times) in zip(counts, _predicted(subject, runs, costs), strict=True):
        found.append(prediction)
        if timeline is not None:
            _draw(times, f"predicted: {task}, {config.strategy}, {counted(count, 'device')} of {costs.name}", timeline)
    if svg is not None:
        from tutti.planning.sweep_figure import write_sweep_figure

        write_sweep_figure(found, f"{task}, {found[0].strategy}, {costs.name}", svg)
    if as_json:
        print(json_text(prediction_json(found, costs, task), sys.stdout))
    else:
        _show(found, costs)
        for path in (svg, timeline):
            if path is not None:
                print(f"drawn into {path}")
    return ExitCode.DONE


def _predicted(
    subject: Any, runs: Iterable[PlannedRun], costs: StepCosts
) -> Iterator[tuple[PlannedRun, StepPrediction, StepTimes]]:
    """Predict a step of each run; a replica is traced anew where it has other parts than in the run before.

    Args:
        subject: name of the task, or the script's task.
        runs: the runs, which differ in the number of devices.
        costs: costs of the machine.

    Yields:
        Each run with its prediction and the times of one step.
    """
    from tutti.planning.conformal_band import shipped_residuals
    from tutti.planning.step_prediction import gather_sizes, predict_step

    residuals, sizes, cut = shipped_residuals(), None, None
    for config in runs:
        parts = _parts(config)
        if sizes is None or parts != cut:
            sizes, cut = gather_sizes(subject, config), parts
        yield config, *predict_step(subject, sizes, config, costs, residuals)


def _check_figures(svg: Path | None, timeline: Path | None, sweep: str | None) -> None:
    """Raise an error if a figure does not go with one number of devices or a sweep, or its file cannot be written."""
    if svg is not None and sweep is None:
        raise UsageError("--svg draws a sweep", remedy="add --sweep devices=1..64, or take --timeline FILE.svg")
    if timeline is not None and sweep is not None:
        raise UsageError("--timeline draws one number of devices", remedy="leave out --sweep, or take --svg")
    check_writable(svg, "the figure")
    check_writable(timeline, "the timeline")


def _parts(config: PlannedRun) -> tuple[int, int]:
    """Return pipeline stages and tensor ranks of a replica, on which its trace depends."""
    return config.shape["stage"], config.shape["tensor"]


def _counts(sweep: str | None, devices: int) -> list[int]:
    """Return the numbers of devices: one, or each doubling of a sweep.

    >>> _counts("devices=8..40", 1), _counts(None, 4)
    ([8, 16, 32, 40], [4])
    """
    if sweep is None:
        return [devices]
    key, _, text = sweep.partition("=")
    first, _, last = text.partition("..")
    if key != "devices" or not (first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise UsageError(f"cannot read the sweep '{sweep}'", where="--sweep", remedy="write devices=8..1024")
    found = [int(first)]
    while 2 * found[-1] <= int(last):
        found.append(2 * found[-1])
    return found if found[-1] == int(last) else [*found, int(last)]


def parse_link(text: str | None) -> LinkCost | Path | None:
    """Parse the value of ``--network``, the cost of a link between nodes.

    Args:
        text: ``alpha=SECONDS,beta=BYTES``, latency in seconds of a message and bytes a second, each a number or with a
            unit (``5us``, ``400Gbit/s``); or a path that ends with ``.json``, a ``machine.json`` that was measured with
            one rank a node; None where the option is not given.

    Returns:
        For ``alpha=…,beta=…`` both numbers (``LinkCost``: n bytes take alpha + n / beta seconds). For a path the path,
        which is not read. None for None.

    Raises:
        UsageError: the text is malformed, a unit is unknown, or a number is not positive (``alpha`` may be 0) or not
            finite.

    >>> parse_link("alpha=3e-5,beta=1.25e9"), parse_link("alpha=10ms,beta=400Gbit/s")
    (LinkCost(alpha=3e-05, beta=1250000000.0), LinkCost(alpha=0.01, beta=50000000000.0))
    """
    if text is None:
        return None
    if text.endswith(".json"):
        return Path(text)
    try:
        parts = [part.strip().partition("=") for part in text.split(",")]
        given = {key: _quantity(value, _LINK_UNITS.get(key, {})) for key, _, value in parts}
        if given.keys() != {"alpha", "beta"} or not (0 <= given["alpha"] < math.inf and 0 < given["beta"] < math.inf):
            raise ValueError
    except (KeyError, ValueError) as error:
        remedy = (
            "write alpha=30e-6,beta=1.25e9 (seconds a message, and bytes a second of a node), or with units"
            " alpha=30us,beta=10Gbit/s; or give machine.json"
        )
        raise UsageError(f"cannot read the link '{text}'", where="--network", remedy=remedy) from error
    return LinkCost(given["alpha"], given["beta"])


def _quantity(text: str, units: Mapping[str, float]) -> float:
    """Return a number with or without a unit in the SI unit; raise ValueError for an unknown unit."""
    match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([a-zµ]*(?:/s)?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    return float(match[1]) * {"": 1.0, **units}[match[2]]


def _draw(times: StepTimes, title: str, path: Path) -> None:
    from tutti.metrics.timeline import chrome, timeline_svg

    rows = times.rows()
    text = strict_json(chrome(rows)) if path.suffix == ".json" else timeline_svg(rows, title)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the timeline", where=str(path), why=error.strerror) from error


def _show(found: Sequence[StepPrediction], costs: StepCosts) -> None:
    """Print the table, and what it rests on."""
    names = [name for name in ("compute", "communication", "bubble", "idling") if any(name in f.shares for f in found)]
    slowed = f", slowed: {'; '.join(found[0].delays)}" if found[0].delays else ""
    print(f"{found[0].strategy} on {costs.name}{slowed}\n")
    heads = ["devices", "batch", "step", "draws 5–95 %", "band 90 %", "samples/s", "efficiency", *names, "memory"]
    rows = [
        [
            str(each.devices),
            str(each.batch),
            _time(each.seconds),
            "–".join(map(_time, each.draws)),
            "no band" if each.band is None else "–".join(map(_time, each.band)),
            quantity(each.samples_per_second),
            f"{each.efficiency:.0%}",
            *(f"{each.shares.get(name, 0):.0%}" for name in names),
            format_bytes(each.memory["total"]),
        ]
        for each in found
    ]
    print_table(heads, rows)
    print()
    for text in dict.fromkeys(each.band_text for each in found):
        print(f"band      {text}")
    for text in costs.rests:
        print(f"rests on  {text}")
    for text in costs.guesses:
        print(f"GUESSED   {text}")
    if any(round(each.efficiency, 2) > 1 for each in found):
        print(f"note      {_ABOVE_ONE}")


def _time(seconds: float) -> str:
    """Format seconds with three digits.

    >>> _time(0.0123), _time(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
