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
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources

import numpy as np

_PEAKS = {
    "V100": {"16": 125.0, "32": 15.7},
    "P100": {"16": 21.2, "32": 10.6},
    "T4": {"16": 65.0, "32": 8.1},
    "A100": {"16": 312.0, "tf32": 156.0, "32": 19.5},
    "H100": {"16": 989.0, "tf32": 495.0, "8": 1979.0, "32": 67.0},
}
"""Dense TFLOP/s by chip and class of precision, from the makers' data sheets: the unit of utilisation, never a
prediction."""


@dataclass(frozen=True)
class HardwareAnchor:
    """Utilisation that the training jobs of one published source reached on one chip in one class of precision.

    Attributes:
        chip: the chip's name without maker, memory and form, such as ``A100``.
        memory_gb: memory in GB, 0 where the source does not say.
        precision: class of precision: 8, 16, tf32, 32.
        utilisation: median over the jobs of hardware FLOP/s over the chip's dense peak.
        spread: standard deviation of its natural logarithm over the jobs.
        rows: number of jobs, which are rows of the source.
        set_name: name of the source's set of measurements.
        source: where it was published.
    """

    chip: str
    memory_gb: int
    precision: str
    utilisation: float
    spread: float
    rows: int
    set_name: str
    source: str


def chip_of(hardware: str) -> tuple[str, int]:
    """Parse a hardware name as people write it into the chip's name and its memory in GB.

    Returns:
        The chip, such as ``A100``, empty where it is none of V100, P100, T4, A100 and H100; and its memory in GB, 0
        where not stated or where the chip is unknown.

    >>> chip_of("NVIDIA A100-SXM4-80GB (400W)"), chip_of("8x Tesla V100 32 GB"), chip_of("TPU")
    (('A100', 80), ('V100', 32), ('', 0))
    """
    plain = hardware.upper()
    chip = next((each for each in _PEAKS if re.search(rf"(?<![A-Z0-9]){each}(?![0-9])", plain)), "")
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


@cache
def shipped_anchors() -> tuple[HardwareAnchor, ...]:
    """Read the package's table of the utilisation (hardware FLOP/s over dense peak) of published jobs; cached.

    Returns:
        One entry for each chip, memory, precision and published source, with median utilisation and its spread over the
        jobs.
    """
    text = (resources.files("tutti.planning") / "published_hardware.json").read_text(encoding="utf-8")
    return tuple(HardwareAnchor(**row) for row in json.loads(text)["anchors"])


def write_anchors(anchors: Sequence[HardwareAnchor]) -> str:
    """Return utilisations of published jobs as JSON text, in the form of the package's ``published_hardware.json``.

    Args:
        anchors: one for each chip, memory, precision and published source.
    """
    return json.dumps({"version": 1, "anchors": [asdict(each) for each in anchors]}, indent=1) + "\n"


def anchored_rate(
    hardware: str, precision: str, anchors: Sequence[HardwareAnchor], without: str
) -> tuple[float, float, str]:
    """Estimate the hardware FLOP/s that training reaches on a chip, from published training jobs on it.

    It is the chip's dense peak times the median utilisation over the ``anchors`` of this chip and class of precision;
    where some of them have the same memory, over these alone.

    Args:
        hardware: name of the hardware as people write it, such as ``A100-80GB``.
        precision: name of the precision, such as ``bf16``.
        anchors: utilisations, one for each chip, memory, precision and published source.
        without: name of a source (`HardwareAnchor.set_name`) whose anchors must not be used, because it is the one to
            predict; empty to use all.

    Returns:
        FLOP/s of one device, the standard deviation of its natural logarithm, and an empty text; where no anchor
        matches NaN, NaN and the reason in words.
    """
    chip, memory = chip_of(hardware)
    kind = precision_class(precision)
    peak = peak_flops(hardware, precision)
    same = [each for each in anchors if each.chip == chip and each.precision == kind and each.set_name != without]
    if not chip or math.isnan(peak) or not same:
        said = f"{hardware or 'hardware that is not stated'} in {precision or 'unstated precision'}"
        return math.nan, math.nan, f"no published row{' of another set' * bool(without)} on {said}"
    near = [each for each in same if memory and each.memory_gb == memory] or same
    logs = np.log([each.utilisation for each in near])
    between = float(logs.std()) if len(near) > 1 else 0.25
    within = float(np.median([each.spread for each in near]))
    return peak * float(np.exp(np.median(logs))), float(np.hypot(between, within)), ""
