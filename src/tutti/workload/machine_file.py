"""``machine.json``: what the devices, links, loaders and disks of a machine can do, as ``tutti bench`` measured it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tutti.errors import DiskError, UsageError
from tutti.workload.workload_file import versioned_json

FORMAT = "tutti machine"
VERSION = 1

Basis = Literal["measured", "published", "stated", "guessed"]


@dataclass(frozen=True)
class Figure:
    """One measured or stated number of a machine, such as the seconds of a minimal operation.

    Attributes:
        value: the number; a median where it was measured.
        unit: unit of the number, such as ``FLOP/s``, ``byte/s``, ``s``, ``sample/s`` or ``ratio``.
        n: number of measurements from which it was computed.
        spread: interquartile range of these measurements, in the same unit; None for a single measurement.
        basis: source of the number, such as ``measured``.
    """

    value: float
    unit: str
    n: int
    spread: float | None
    basis: Basis = "measured"


@dataclass(frozen=True)
class CurvePoint:
    """Measured seconds of a call of one size.

    Attributes:
        size: work or bytes of one call, in the curve's unit.
        seconds: median seconds of a call.
        spread: interquartile range in seconds.
        n: number of measurements.
    """

    size: float
    seconds: float
    spread: float
    n: int


@dataclass(frozen=True)
class Curve:
    """Measured seconds of an operation over its size, and the line through them: seconds = fixed + size / rate.

    The line is a saturating rate r(w) = r∞ · w / (w + w½) with r∞ = rate and w½ = fixed · rate.

    Attributes:
        unit: unit of the sizes: ``FLOP``, ``byte`` or ``parameter``.
        points: measured points, by growing size.
        rate: size a second of large calls.
        fixed: seconds of an empty call.
        error: largest relative error of the line at a point.

    >>> Curve("byte", (), 1e9, 1e-6, 0.0).seconds(1000)
    2e-06
    """

    unit: str
    points: tuple[CurvePoint, ...]
    rate: float
    fixed: float
    error: float

    def seconds(self, size: float) -> float:
        """Return the seconds of an operation's call by the line fitted to its measurements: fixed + size / rate.

        Args:
            size: work of the call in the curve's unit: FLOP, bytes or parameters.
        """
        return self.fixed + size / self.rate


@dataclass(frozen=True)
class Machine:
    """Numbers and curves that ``tutti bench`` has measured on one machine, the content of ``machine.json``.

    Attributes:
        host: name, CPU, cores, memory and versions of the host.
        device: type, name, and CPU threads of one device.
        parts: names of the parts of ``tutti bench`` that were measured, such as ``links``.
        figures: single numbers by name, such as ``device/operation/seconds``.
        curves: curves of seconds over size by name, such as ``device/matmul/fp32`` or ``collectives/all_reduce/2``.
        measured: date and time (UTC) of the measurement, in ISO format.
        seconds: time that the measurement took.
    """

    host: Mapping[str, Any]
    device: Mapping[str, Any]
    parts: tuple[str, ...]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    measured: str = ""
    seconds: float = 0.0

    def figure(self, name: str) -> Figure:
        """Return a measured number of the machine by its name, such as ``device/operation/seconds``.

        Args:
            name: name of the number, a key of ``figures``.

        Returns:
            A ``Figure``: ``value`` (the median), its ``unit``, ``n`` (number of measurements), ``spread``
            (interquartile range; None for one measurement) and ``basis`` (where the number comes from, such as
            ``measured``).

        Raises:
            UsageError: the number was not measured; the message names the command that does.
        """
        if name not in self.figures:
            raise self._missing(name)
        return self.figures[name]

    def curve(self, name: str) -> Curve:
        """Return a measured curve of the machine, seconds over size, by its name, such as ``device/copy``.

        Args:
            name: name of the curve, a key of ``curves``.

        Returns:
            A ``Curve``: ``unit`` of the sizes (such as ``byte``), measured ``points`` by growing size, and the line
            fitted to them: seconds = ``fixed`` + size / ``rate``, with its largest relative ``error``.

        Raises:
            UsageError: the curve was not measured; the message names the command that does.
        """
        if name not in self.curves:
            raise self._missing(name)
        return self.curves[name]

    def _missing(self, name: str) -> UsageError:
        return UsageError(
            f"this machine file has no {name}",
            where=str(self.host.get("name", "")),
            why=f"measured were: {', '.join(self.parts)}",
            remedy=f"measure it with tutti bench {name.partition('/')[0]}",
        )


def peak_name(precision: str, threads: int | None) -> str:
    """Return the name of the measured FLOP/s of a device's best matrix product, a key of ``Machine.figures``.

    The name is ``device/peak/PRECISION/threads=THREADS``, such as ``device/peak/fp32/threads=8``, and for an
    accelerator ``device/peak/PRECISION``.

    Args:
        precision: precision of the product, such as ``fp32``.
        threads: CPU threads of the device; None for an accelerator.
    """
    return f"device/peak/{precision}" + ("" if threads is None else f"/threads={threads}")


def machine_json(machine: Machine) -> dict[str, Any]:
    """Return the measured numbers and curves of a machine as the JSON object that ``machine.json`` holds.

    Args:
        machine: the measurements.

    Returns:
        ``format`` (``tutti machine``), ``version`` (1), ``host``, ``device``, ``parts`` (what was measured),
        ``figures`` and ``curves`` (numbers, and curves of seconds over size, by name), ``measured`` (date) and
        ``seconds`` that measuring took.
    """
    return {"format": FORMAT, "version": VERSION, **asdict(machine)}


def write_machine(machine: Machine, path: Path) -> None:
    """Write the measured numbers and curves of a machine as a JSON file, ``machine.json``.

    Args:
        machine: the measurements.
        path: the file.

    Raises:
        DiskError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(machine_json(machine), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the machine file", where=str(path), why=error.strerror) from error


def read_machine(path: Path) -> Machine:
    """Read the measured numbers and curves of a machine from the file that ``tutti bench -o FILE`` writes.

    Args:
        path: the ``machine.json``.

    Returns:
        A ``Machine``: ``figures`` (single numbers) and ``curves`` (seconds over size), by name, with ``host``,
        ``device``, ``parts`` and date of the measurement.

    Raises:
        UsageError: the file is missing or damaged, of another format or of another version.
    """
    content = versioned_json(path, FORMAT, VERSION, "tutti bench -o FILE")
    try:
        values = {name: content[name] for name in Machine.__dataclass_fields__}
        values["parts"] = tuple(values["parts"])
        values["figures"] = {name: Figure(**entry) for name, entry in values["figures"].items()}
        values["curves"] = {name: _curve(entry) for name, entry in values["curves"].items()}
        found = Machine(**values)
        wrong = next(_mistakes(found), None)
    except (KeyError, TypeError, AttributeError) as error:
        wrong = repr(error)
    if wrong is not None:
        raise UsageError(
            "this machine file is damaged", where=str(path), why=wrong, remedy="make it with tutti bench -o FILE"
        )
    return found


def _curve(entry: Mapping[str, Any]) -> Curve:
    return Curve(**{**entry, "points": tuple(CurvePoint(**point) for point in entry["points"])})


_RANKS = {
    "collectives": r"\w+/\d+",
    "links": r"\d+-\d+",
    "one_way": r"\d+-\d+",
    "jitter": r"\w+/\d+",
    "shared": r"[\w/]+/\d+",
}
_RANKS |= {"scaling": r"[\w.:-]+/[1-9]\d*"}
"""What follows the first part of a name that ends with ranks, as a regular expression."""


def _mistakes(machine: Machine) -> Iterator[str]:
    """Yield what is wrong with the facts, names and numbers of a machine, in words."""
    # Read from JSON, they may be anything.
    host: Any = machine.host
    device: Any = machine.device
    parts: Any = machine.parts
    measured: Any = machine.measured
    for name, facts in (("host", host), ("device", device)):
        if not isinstance(facts, Mapping):
            yield f"{name} is {facts!r}, no object"
    if not all(isinstance(part, str) for part in parts):
        yield f"parts are {parts!r}, no names"
    if not isinstance(measured, str):
        yield f"measured is {measured!r}, no date"
    threads = machine.device.get("threads")
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        yield f"threads of device is {threads!r}, no whole number of at least 1"
    for name in (*machine.figures, *machine.curves):
        part, _, rest = name.partition("/")
        if part in _RANKS and not re.fullmatch(_RANKS[part], rest):
            yield f"{name} names no ranks"
    for name, figure in machine.figures.items():
        yield from _wrong_numbers(name, {"value": figure.value}, least=0.0)
    for name, curve in machine.curves.items():
        yield from _wrong_numbers(name, {"rate": curve.rate}, above=0.0)
        yield from _wrong_numbers(name, {"fixed": curve.fixed}, least=0.0)
        for point in curve.points:
            yield from _wrong_numbers(name, {"size": point.size, "seconds": point.seconds}, above=0.0)
            yield from _wrong_numbers(name, {"spread": point.spread, "n": point.n}, least=0.0)


def _wrong_numbers(
    name: str, numbers: Mapping[str, float], *, least: float = -math.inf, above: float = -math.inf
) -> Iterator[str]:
    """Yield which of some numbers are none, or not finite, or too small."""
    for key, value in numbers.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < least or value <= above:
            limit = f"above {above:g}" if math.isfinite(above) else f"of at least {least:g}"
            yield f"{key} of {name} is {value!r}, no number {limit}"
