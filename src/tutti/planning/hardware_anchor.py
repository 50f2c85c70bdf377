"""Predict a chip's rate from the utilisation that published jobs reached on it, never from its data sheet alone.

A job's utilisation is its hardware FLOP/s over the chip's dense peak. `published_hardware.json` ships one row a
chip, precision and published set, with its source. A prediction takes the median of the rows of that chip; a chip
without a row is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources

import numpy as np

_PEAKS = {
    "V100": {"16": 125.0, "32": 15.7},
    "V100 PCIE": {"16": 112.0, "32": 14.0},
    "P100": {"16": 21.2, "32": 10.6},
    "P100 PCIE": {"16": 18.7, "32": 9.3},
    "T4": {"16": 65.0, "32": 8.1},
    "A100": {"16": 312.0, "tf32": 156.0, "32": 19.5},
    "A100 PCIE": {"16": 312.0, "tf32": 156.0, "32": 19.5},
    "H100": {"16": 989.0, "tf32": 495.0, "8": 1979.0, "32": 67.0},
    "H100 PCIE": {"16": 756.0, "tf32": 378.0, "8": 1513.0, "32": 51.0},
    "H100 NVL": {"16": 835.0, "tf32": 418.0, "8": 1671.0, "32": 60.0},
}
"""Dense TFLOP/s by chip and class of precision, from the makers' data sheets: the unit of utilisation, never a
prediction. A name without a form is of the socketed chip; cards have less power, so that they are chips of their own
even where the peak is the same."""

_LINKS = {
    "P100": (6e10, 6.25e9),
    "V100": (1.3e11, 6.25e9),
    "T4": (1e10, 1.5e9),
    "A100": (2.3e11, 2.5e10),
    "H100": (3.6e11, 5e10),
    "P100 PCIE": (1e10, 6.25e9),
    "V100 PCIE": (1e10, 6.25e9),
    "A100 PCIE": (2e10, 2.5e10),
    "H100 PCIE": (4e10, 5e10),
    "H100 NVL": (4e10, 5e10),
}
"""Bytes/s of a collective within a node, and of a device's share of the node's network, by chip: those of the makers'
own servers (NVLink of each generation at four fifths of its one-way rate; one adapter of 50, 200 or 400 Gbit/s a
device; for the T4 PCIe 3 and a cloud server's 50 Gbit/s; for cards PCIe of their generation, without bridges), where a
table does not state a network."""
_HALF_RATE_WIDTH = 400.0
_LINKS_ELSEWHERE = (5e10, 6.25e9)


_RATE = re.compile(
    r"(?:(\d+)\s*[x×*]\s*)?(?:[a-z]+\s*)??([\d.]+)\s*([MGT])(?:i)?(b|B)(?:it|yte)?s?\s*(?:/\s*s|ps)", re.ASCII
)
_OF_A_DEVICE = re.compile(r"(?:per|/|a|each)\s*(?:gpu|device|accelerator|chip)|rail", re.IGNORECASE)
_SCALES = {"M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class HardwareAnchor:
    """Utilisation that the training jobs of one published source reached on one chip in one class of precision.

    Predictions of the speed of other jobs on the chip start from such anchors.

    Attributes:
        chip: the chip's name without maker and memory, such as ``A100``; a card's with its form (``chip_of``).
        memory_gb: memory of the chip in GB, 0 where the source does not say.
        precision: class of precision as ``precision_class`` names it: ``8``, ``16``, ``tf32`` or ``32``.
        utilisation: median over the jobs of hardware FLOP/s over the chip's dense peak.
        spread: standard deviation of the utilisation's natural logarithm over the jobs; 0 for a single job.
        rows: number of jobs, which are rows of the source.
        set_name: name of the source's set of measurements.
        source: where the measurements were published; may be empty.
        width: median of the models' hidden size; 0 where the source does not say.
    """

    chip: str
    memory_gb: int
    precision: str
    utilisation: float
    spread: float
    rows: int
    set_name: str
    source: str
    width: float = 0.0


def chip_of(hardware: str) -> tuple[str, int]:
    """Parse a hardware name as people write it into the chip's name and its memory in GB.

    Returns:
        The chip with its form, such as ``A100`` or ``A100 PCIE``, empty where it is none of V100, P100, T4, A100 and
        H100, or where several are named; and its memory in GB, 0 where not stated or where the chip is unknown.

    >>> chip_of("NVIDIA A100-SXM4-80GB (400W)"), chip_of("8x Tesla V100 32 GB"), chip_of("TPU")
    (('A100', 80), ('V100', 32), ('', 0))
    >>> chip_of("NVIDIA H100-PCIe-80GB"), chip_of("4 x V100 and 4 x P100")
    (('H100 PCIE', 80), ('', 0))
    """
    plain = hardware.upper()
    named = [each for each in _PEAKS if " " not in each and re.search(rf"(?<![A-Z0-9]){each}(?![0-9])", plain)]
    chip = named[0] if len(named) == 1 else ""
    form = re.search(r"PCI-?E|NVL(?!INK)", plain)
    chip = next((each for each in _PEAKS if form and each == f"{chip} {form[0].replace('-', '')}"), chip)
    memory = re.search(r"(\d+)\s*-?\s*GI?B", plain)
    return chip, int(memory[1]) if memory and chip else 0


def precision_class(precision: str) -> str:
    """Return the width class of a precision's name: ``8``, ``16`` (mixed and half precision), ``tf32`` or ``32``.

    A name without a sign of another class, also an empty one, counts as 32 bits.

    >>> [precision_class(name) for name in ("amp_bf16", "amp_fp8 FP8", "tf32", "fp16", "", "float32")]
    ['16', '8', 'tf32', '16', '32', '32']
    """
    plain = precision.lower()
    if "fp8" in plain or "float8" in plain:
        return "8"
    if "tf32" in plain:
        return "tf32"
    return "16" if re.search(r"16|amp|half|mixed", plain) else "32"


def peak_flops(hardware: str, precision: str) -> float:
    """Return the data sheet's dense peak of a chip in FLOP/s; NaN where the chip or its precision is not known.

    Args:
        hardware: name of the hardware as people write it, such as ``NVIDIA A100-SXM4-80GB``.
        precision: name of the precision, such as ``bf16``, ``amp_fp16`` or ``tf32``.
    """
    return _PEAKS.get(chip_of(hardware)[0], {}).get(precision_class(precision), math.nan) * 1e12


@lru_cache(maxsize=64)
def usual_links(hardware: str) -> tuple[float, float]:
    """Return the usual link bandwidths of a chip within a node and between nodes.

    Args:
        hardware: name of the hardware as people write it; for an unknown chip the result is a guess at a middling
            server.

    Returns:
        A pair of numbers: bytes a second of one device within its node, then bytes a second of one device between
        nodes.

    >>> usual_links("A100-SXM4-80GB"), usual_links("abacus")
    ((230000000000.0, 25000000000.0), (50000000000.0, 6250000000.0))
    """
    return _LINKS.get(chip_of(hardware)[0], _LINKS_ELSEWHERE)


def stated_wire(interconnect: str, hardware: str, per_node: float) -> float:
    """Return the bytes a second of a device between nodes that a description of a cluster's network states.

    A rate is that of a node, which its devices share, unless the text says that it is of a device (``per GPU``), gives
    a number of adapters (``8 x 200 Gb/s``), or the rate is the adapter's that each device of such a server usually has.

    Args:
        interconnect: text such as ``1600Gb/s RoCE per node``; may be empty.
        hardware: name of the chip, whose usual link is returned where the text states no rate.
        per_node: devices of a node.

    >>> [stated_wire(text, "H100", 8) for text in ("3200Gb/s", "8x400Gb/s", "NDR 400 Gbps")]
    [50000000000.0, 50000000000.0, 50000000000.0]
    >>> stated_wire("25Gb/s RoCE per server", "P100", 4), stated_wire("100 GB/s per GPU", "A100", 8)
    (781250000.0, 100000000000.0)
    """
    usual = usual_links(hardware)[1]
    found = _RATE.search(interconnect)
    if found is None:
        return usual
    adapters, number, scale, unit = found.groups()
    rate = float(number) * _SCALES[scale] / (8 if unit == "b" else 1)
    if _OF_A_DEVICE.search(interconnect):
        return rate * int(adapters or 1)
    if adapters is None and math.isclose(rate, usual) and not re.search(r"node|server|host|total", interconnect, re.I):
        return rate
    return rate * int(adapters or 1) / per_node


@cache
def shipped_anchors() -> tuple[HardwareAnchor, ...]:
    """Read the package's table of the utilisation (hardware FLOP/s over dense peak) of published jobs; cached.

    Returns:
        One ``HardwareAnchor`` for each chip, memory, precision and published source: ``chip``, ``memory_gb``,
        ``precision``, median ``utilisation`` of the jobs, ``spread`` (standard deviation of its logarithm), ``rows``
        (number of jobs), ``set_name`` and ``source`` (where published).
    """
    text = (resources.files("tutti.planning") / "published_hardware.json").read_text(encoding="utf-8")
    return tuple(HardwareAnchor(**row) for row in json.loads(text)["anchors"])


def _narrowness(published: float, width: float) -> float:
    """Return the rate of a transformer of some width over that of a published one; 1 where a width is not known."""
    known = published > 0 and width > 0
    return (1 + _HALF_RATE_WIDTH / published) / (1 + _HALF_RATE_WIDTH / width) if known else 1.0


ONE_SOURCE = 0.25
"""Standard deviation between the rates of sources, of their logarithm, where one source alone is known: a guess."""


def matching_anchors(
    hardware: str, precision: str, anchors: Sequence[HardwareAnchor], without: str = ""
) -> list[HardwareAnchor]:
    """Return the utilisations that published training jobs reached on a chip in a class of precision.

    A utilisation (``HardwareAnchor``) is the hardware FLOP/s over the chip's dense peak.

    Args:
        hardware: name of the hardware as people write it, such as ``A100-80GB``.
        precision: name of the precision, such as ``bf16``.
        anchors: utilisations, one for each chip, memory, precision and published source.
        without: name of a source whose utilisations must not be used; empty to use all.

    Returns:
        Elements of ``anchors`` with this chip and class of precision (8, 16, tf32 or 32 bits), in their order. If
        ``hardware`` states the memory and some of these elements have the same memory, only they are returned. Empty
        for an unknown chip.
    """
    chip, memory = chip_of(hardware)
    kind = precision_class(precision)
    same = [e for e in anchors if chip and (e.chip, e.precision) == (chip, kind) and e.set_name != without]
    return [each for each in same if memory and each.memory_gb == memory] or same


def anchored_rate(
    hardware: str, precision: str, anchors: Sequence[HardwareAnchor], without: str, width: float = 0.0
) -> tuple[float, float, str]:
    """Estimate the hardware FLOP/s that training reaches on a chip, from published training jobs on it.

    The estimate is the chip's dense peak times the median utilisation over the ``anchors`` of this chip and class of
    precision; if some of these anchors have the same memory as ``hardware``, over them alone. A narrow transformer is
    slower: a token costs h² FLOP in matrix products at hidden size h, and h FLOP in elementwise operators, which wait
    for memory. Its rate is that of a wide one divided by 1 + 400/h. The number 400, a guess, is the width at which both
    take the same time. Each utilisation is converted in this way from the width of its published models to ``width``.

    Args:
        hardware: name of the hardware as people write it, such as ``A100-80GB``.
        precision: name of the precision, such as ``bf16``.
        anchors: utilisations, one for each chip, memory, precision and published source.
        without: name of a source (`HardwareAnchor.set_name`) whose anchors must not be used, such as that of the job to
            predict; empty to use all.
        width: hidden size h of the model to predict; 0 if unknown, which stands for that of the published models.

    Returns:
        FLOP/s of one device, the standard deviation of its natural logarithm, and an empty text; where no anchor
        matches NaN, NaN and the reason in words.
    """
    peak = peak_flops(hardware, precision)
    near = matching_anchors(hardware, precision, anchors, without)
    if math.isnan(peak) or not near:
        said = f"{hardware or 'hardware that is not stated'} in {precision or 'unstated precision'}"
        return math.nan, math.nan, f"no published row{' of another set' * bool(without)} on {said}"
    logs = np.log([each.utilisation * _narrowness(each.width, width) for each in near])
    between = float(logs.std()) if len(near) > 1 else ONE_SOURCE
    within = float(np.median([each.spread for each in near]))
    return peak * float(np.exp(np.median(logs))), float(np.hypot(between, within)), ""
