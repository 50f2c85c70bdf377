"""Predict a chip's rate from the utilisation that published jobs reached on it, never from its data sheet alone.

A job's utilisation is its hardware FLOP/s over the chip's dense peak. `published_hardware.json` ships one row a
chip, precision and published set, with its source. A prediction takes the median of the rows of that chip; for a chip
without a row that of all other chips, which is known less well, and a chip without a data sheet here is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources

import numpy as np


@dataclass(frozen=True)
class ChipSheet:
    """Numbers of an accelerator's data sheet, and the links of its maker's own systems.

    Attributes:
        peaks: dense TFLOP/s of matrix products by class of precision, as ``precision_class`` names it.
        memory: TB/s of the device's memory.
        links: GB/s of a device in a collective over the fast links, and of its share of the network.
        source: publication of the numbers.
        family: name of the architecture; its chips reach similar fractions of their peaks.
        fabric: devices that the fast links join across servers; 0 where they end with the server.
        pattern: regular expression of the name in capitals; empty: the name as a word of its own.
    """

    peaks: Mapping[str, float]
    memory: float
    links: tuple[float, float]
    source: str
    family: str
    fabric: int = 0
    pattern: str = ""


_HOPPER = {"16": 989.0, "tf32": 495.0, "8": 1979.0, "32": 67.0}
_HOPPER_CARD = {"16": 835.0, "tf32": 418.0, "8": 1671.0, "32": 60.0}
_CDNA3 = {"16": 1307.4, "tf32": 653.7, "8": 2614.9, "32": 163.4}
_GRACE_BLACKWELL = {"16": 2500.0, "tf32": 1250.0, "8": 5000.0, "32": 80.0}

_SHEETS = {
    "P100": ChipSheet({"16": 21.2, "32": 10.6}, 0.732, (60.0, 6.25), "NVIDIA Tesla P100 data sheet, 2016", "Pascal"),
    "P100 PCIE": ChipSheet(
        {"16": 18.7, "32": 9.3}, 0.732, (10.0, 6.25), "NVIDIA Tesla P100 data sheet, 2016", "Pascal"
    ),
    "V100": ChipSheet({"16": 125.0, "32": 15.7}, 0.9, (130.0, 6.25), "NVIDIA V100 data sheet, 2020", "Volta"),
    "V100 PCIE": ChipSheet({"16": 112.0, "32": 14.0}, 0.9, (10.0, 6.25), "NVIDIA V100 data sheet, 2020", "Volta"),
    "T4": ChipSheet({"16": 65.0, "32": 8.1}, 0.32, (10.0, 1.5), "NVIDIA T4 data sheet, 2019", "Turing"),
    "L4": ChipSheet(
        {"16": 121.0, "tf32": 60.0, "8": 242.0, "32": 30.3}, 0.3, (20.0, 6.25), "NVIDIA L4 data sheet, 2023", "Ada"
    ),
    "L40S": ChipSheet(
        {"16": 362.0, "tf32": 183.0, "8": 733.0, "32": 91.6}, 0.864, (20.0, 25.0), "NVIDIA L40S data sheet, 2023", "Ada"
    ),
    "A100": ChipSheet(
        {"16": 312.0, "tf32": 156.0, "32": 19.5}, 2.0, (230.0, 25.0), "NVIDIA A100 data sheet, 2021", "Ampere"
    ),
    "A100 PCIE": ChipSheet(
        {"16": 312.0, "tf32": 156.0, "32": 19.5}, 1.9, (20.0, 25.0), "NVIDIA A100 data sheet, 2021", "Ampere"
    ),
    "H100": ChipSheet(_HOPPER, 3.35, (360.0, 50.0), "NVIDIA H100 data sheet, 2023", "Hopper"),
    "H100 PCIE": ChipSheet(
        {"16": 756.0, "tf32": 378.0, "8": 1513.0, "32": 51.0},
        2.0,
        (40.0, 50.0),
        "NVIDIA H100 data sheet, 2023",
        "Hopper",
    ),
    "H100 NVL": ChipSheet(_HOPPER_CARD, 3.9, (40.0, 50.0), "NVIDIA H100 data sheet, 2023", "Hopper"),
    "H200": ChipSheet(_HOPPER, 4.8, (360.0, 50.0), "NVIDIA H200 data sheet, 2024", "Hopper"),
    "H200 NVL": ChipSheet(_HOPPER_CARD, 4.8, (360.0, 50.0), "NVIDIA H200 data sheet, 2024", "Hopper"),
    "GH200": ChipSheet(_HOPPER, 4.0, (360.0, 50.0), "NVIDIA GH200 data sheet, 2023", "Hopper"),
    "B200": ChipSheet(
        {"16": 2250.0, "tf32": 1125.0, "8": 4500.0, "32": 75.0},
        8.0,
        (720.0, 50.0),
        "NVIDIA HGX B200 data sheet, 2024",
        "Blackwell",
    ),
    "GB200": ChipSheet(
        _GRACE_BLACKWELL, 8.0, (720.0, 50.0), "NVIDIA GB200 NVL72 data sheet, 2024", "Blackwell", fabric=72
    ),
    "MI300X": ChipSheet(_CDNA3, 5.3, (358.0, 50.0), "AMD Instinct MI300X data sheet, 2023", "CDNA 3"),
    "MI325X": ChipSheet(_CDNA3, 6.0, (358.0, 50.0), "AMD Instinct MI325X data sheet, 2024", "CDNA 3"),
    "TPU v3": ChipSheet(
        {"16": 123.0}, 0.9, (224.0, 6.25), "Google Cloud TPU v3 documentation", "TPU", 1024, r"TPU[ _-]?V3"
    ),
    "TPU v4": ChipSheet(
        {"16": 275.0}, 1.2, (240.0, 6.25), "Google Cloud TPU v4 documentation", "TPU", 4096, r"TPU[ _-]?V4(?!I)"
    ),
    "TPU v5e": ChipSheet(
        *({"16": 197.0}, 0.819, (160.0, 3.1), "Google Cloud TPU v5e documentation", "TPU", 256),
        r"(?<![A-Z0-9])(TPU[ _-]?)?V5(E|[ _-]?LITE)",
    ),
    "TPU v5p": ChipSheet(
        *({"16": 459.0}, 2.765, (480.0, 6.25), "Google Cloud TPU v5p documentation", "TPU", 8960),
        r"(?<![A-Z0-9])(TPU[ _-]?)?V5P",
    ),
    "TPU v6e": ChipSheet(
        *({"16": 918.0}, 1.638, (320.0, 6.25), "Google Cloud TPU v6e documentation", "TPU", 256),
        r"(?<![A-Z0-9])(TPU[ _-]?)?V6E|TRILLIUM",
    ),
}
"""Data sheets by chip. A peak is the unit of utilisation, never a prediction. A name without a form is of the socketed
chip; cards have less power, so that they are chips of their own even where the peak is the same. Links of servers:
NVLink of each generation at four fifths of its one-way rate, one adapter of 50, 200 or 400 Gbit/s a device, for the T4
PCIe 3 and a cloud server's 50 Gbit/s, for cards PCIe of their generation, without bridges. Links of a TPU: four fifths
of half the rate of both directions that its documentation states, for v3 and v4 of the sum of their links (Jouppi et
al. 2023, arXiv 2304.01433); its share of the network between slices is a guess."""
_HALF_RATE_WIDTH = 400.0
_HALF_RATE_BALANCE = 312.0 / 2.0
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
        source: publication of the measurements; may be empty.
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
        The chip with its form, such as ``A100`` or ``A100 PCIE``, empty where its data sheet is not known here, or
        where several are named; and its memory in GB, 0 where not stated or where the chip is unknown.

    >>> chip_of("NVIDIA A100-SXM4-80GB (400W)"), chip_of("8x Tesla V100 32 GB"), chip_of("TPU")
    (('A100', 80), ('V100', 32), ('', 0))
    >>> chip_of("TPUv4"), chip_of("v5litepod-256"), chip_of("DGX B200"), chip_of("GB200 NVL72")
    (('TPU v4', 0), ('TPU v5e', 0), ('B200', 0), ('GB200', 0))
    >>> chip_of("NVIDIA H100-PCIe-80GB"), chip_of("4 x V100 and 4 x P100")
    (('H100 PCIE', 80), ('', 0))
    """
    plain = hardware.upper()
    named = [each for each, sheet in _SHEETS.items() if re.search(sheet.pattern or _named_alone(each), plain)]
    chip = named[0] if len(named) == 1 else ""
    form = re.search(r"PCI-?E|NVL(?!INK)", plain)
    chip = next((each for each in _SHEETS if form and each == f"{chip} {form[0].replace('-', '')}"), chip)
    memory = re.search(r"(\d+)\s*-?\s*GI?B", plain)
    return chip, int(memory[1]) if memory and chip else 0


def _named_alone(chip: str) -> str:
    """Return the pattern of a chip's name; a name with a form such as ``PCIE`` has one that matches nothing."""
    return r"(?!)" if " " in chip else rf"(?<![A-Z0-9]){chip}(?![0-9])"


def precision_class(precision: str) -> str:
    """Return the width class of a precision's name: ``8``, ``16`` (mixed and half precision), ``tf32``, ``32``, ``64``.

    A name without a sign of another class, also an empty one, counts as 32 bits.

    >>> [precision_class(name) for name in ("amp_bf16", "amp_fp8 FP8", "tf32", "fp16", "", "float32", "fp64")]
    ['16', '8', 'tf32', '16', '32', '32', '64']
    """
    plain = precision.lower()
    if "fp8" in plain or "float8" in plain:
        return "8"
    if "tf32" in plain:
        return "tf32"
    if "64" in plain or "double" in plain:
        return "64"
    return "16" if re.search(r"16|amp|half|mixed", plain) else "32"


def peak_flops(hardware: str, precision: str) -> float:
    """Return the data sheet's dense peak of a chip in FLOP/s; NaN where the chip or its precision is not known.

    Args:
        hardware: name of the hardware as people write it, such as ``NVIDIA A100-SXM4-80GB``.
        precision: name of the precision, such as ``bf16``, ``amp_fp16`` or ``tf32``.
    """
    sheet = _SHEETS.get(chip_of(hardware)[0])
    return math.nan if sheet is None else sheet.peaks.get(precision_class(precision), math.nan) * 1e12


def data_sheet(hardware: str) -> str:
    """Return the title and year of a chip's data sheet, as a source to cite; an empty text for an unknown chip.

    >>> data_sheet("NVIDIA H200"), data_sheet("abacus")
    ('NVIDIA H200 data sheet, 2024', '')
    """
    sheet = _SHEETS.get(chip_of(hardware)[0])
    return "" if sheet is None else sheet.source


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
    sheet = _SHEETS.get(chip_of(hardware)[0])
    return _LINKS_ELSEWHERE if sheet is None else (1e9 * sheet.links[0], 1e9 * sheet.links[1])


def joined_devices(hardware: str, per_node: float) -> float:
    """Return the number of devices that a chip's fast links join: a server's, or a pod's if the links join servers.

    Args:
        hardware: name of the hardware as people write it.
        per_node: devices of a server.

    >>> joined_devices("TPU v5e", 4), joined_devices("GB200", 4), joined_devices("H100", 8)
    (256, 72, 8)
    """
    sheet = _SHEETS.get(chip_of(hardware)[0])
    return per_node if sheet is None else max(per_node, sheet.fabric)


def stated_wire(interconnect: str, hardware: str, per_node: float) -> float:
    """Parse the description of a cluster's network into the bytes a second of one device between nodes.

    A stated rate belongs to a device if the text says so (``per GPU``), or if it equals the chip's usual link
    (``usual_links``) and the text has no word such as ``node`` or ``total``. Otherwise it belongs to a node, whose
    devices share it; a number of adapters (``8 x 200 Gb/s``) multiplies it.

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


def _half_width(chip: str, precision: str) -> float:
    """Return the hidden size at which matrix products and elementwise operators of a transformer take the same time.

    A token costs h² FLOP in matrix products and h words of memory in elementwise operators: the size is in proportion
    to the chip's FLOP/s over its bytes/s. For an A100 in 16 bits it is 400, a guess.
    """
    sheet = _SHEETS[chip]
    return _HALF_RATE_WIDTH * sheet.peaks[precision] / sheet.memory / _HALF_RATE_BALANCE


def _reached(each: HardwareAnchor, chip: str, precision: str, width: float) -> float:
    """Return a published utilisation as that of a chip at some width; as published where a width is not known."""
    if not (each.width > 0 and width > 0):
        return each.utilisation
    there = 1 + _half_width(each.chip, each.precision) / each.width
    return each.utilisation * there / (1 + _half_width(chip, precision) / width)


OTHER_CHIP = 0.35
"""Least standard deviation of the logarithm of a rate that is known from other chips alone: a guess."""
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
    slower: a token costs h² FLOP in matrix products at hidden size h, and h words in elementwise operators, which wait
    for memory. Its rate is the rate of a wide one divided by 1 + w/h. The width w at which both take the same time is
    400 for an A100 in 16 bits, a guess, and in proportion to FLOP/s over bytes/s for other chips and precisions. Each
    utilisation is converted in this way from the width of its published models to ``width``.

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
    near = matching_anchors(hardware, precision, anchors, without)
    if math.isnan(peak_flops(hardware, precision)) or not near:
        said = f"{hardware or 'hardware that is not stated'} in {precision or 'unstated precision'}"
        return math.nan, math.nan, f"no published row{' of another set' * bool(without)} on {said}"
    return *_median_rate(hardware, precision, near, width, ONE_SOURCE), ""


def kindred_rate(
    hardware: str, precision: str, anchors: Sequence[HardwareAnchor], without: str, width: float = 0.0
) -> tuple[float, float, str]:
    """Estimate the hardware FLOP/s that training reaches on a chip, from published jobs on other chips.

    The estimate is the chip's dense peak times the median utilisation of other chips in this class of precision: of the
    chips of the same architecture, or of all chips if the architecture has no others. Each utilisation is converted to
    the chip's ratio of FLOP/s to bytes/s and to ``width`` as ``anchored_rate`` does.

    Args:
        hardware: name of the hardware as people write it, such as ``H200``.
        precision: name of the precision, such as ``bf16``.
        anchors: utilisations, one for each chip, memory, precision and published source.
        without: name of a source whose anchors must not be used; empty to use all.
        width: hidden size of the model to predict; 0 if unknown.

    Returns:
        FLOP/s of one device, the standard deviation of its natural logarithm, and an empty text; NaN, NaN and the
        reason in words where the chip's data sheet is not known, or no other chip has jobs in this precision.
    """
    chip, kind = chip_of(hardware)[0], precision_class(precision)
    if math.isnan(peak_flops(hardware, precision)):
        return (
            math.nan,
            math.nan,
            f"no data sheet of {hardware or 'hardware that is not stated'} in {precision} is known",
        )
    other = [each for each in anchors if each.chip != chip and each.precision == kind and each.set_name != without]
    if not other:
        return math.nan, math.nan, f"no published row of another chip in {precision}"
    alike = [each for each in other if _SHEETS[each.chip].family == _SHEETS[chip].family]
    rate, sigma = _median_rate(hardware, precision, alike or other, width, OTHER_CHIP)
    return rate, max(sigma, OTHER_CHIP), ""


def _median_rate(
    hardware: str, precision: str, near: Sequence[HardwareAnchor], width: float, least: float
) -> tuple[float, float]:
    """Return the FLOP/s of a chip at the median of some utilisations, and the standard deviation of its logarithm."""
    chip, kind = chip_of(hardware)[0], precision_class(precision)
    logs = np.log([_reached(each, chip, kind, width) for each in near])
    between = float(logs.std()) if len(near) > 1 else least
    within = float(np.median([each.spread for each in near]))
    return peak_flops(hardware, precision) * float(np.exp(np.median(logs))), float(np.hypot(between, within))
