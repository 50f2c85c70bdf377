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
    """Utilisation that one published set reached on one chip.

    Attributes:
        chip: the chip's name without maker, memory and form.
        memory_gb: memory in GB, 0 where the source does not say.
        precision: class of precision: 8, 16, tf32, 32.
        utilisation: median hardware FLOP/s over the dense peak.
        spread: standard deviation of its logarithm over rows.
        rows: rows of the source.
        set_name: the set.
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
    """Parse a hardware name as people write it into chip and memory.

    Returns:
        The chip, such as ``A100``, empty where it is not in the table of peaks; and its memory in GB, 0 where not
        stated.

    >>> chip_of("NVIDIA A100-SXM4-80GB (400W)"), chip_of("8x Tesla V100 32 GB"), chip_of("TPU")
    (('A100', 80), ('V100', 32), ('', 0))
    """
    plain = hardware.upper()
    chip = next((each for each in _PEAKS if re.search(rf"(?<![A-Z0-9]){each}(?![0-9])", plain)), "")
    memory = re.search(r"(\d+)\s*-?\s*GI?B", plain)
    return chip, int(memory[1]) if memory and chip else 0


def precision_class(precision: str) -> str:
    """Return the class of a precision's name: ``8``, ``16`` (mixed and half precision), ``tf32`` or ``32`` bits.

    An empty name counts as 32 bits.

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
        hardware: name of the hardware as people write it (``chip_of``).
        precision: name of the precision (``precision_class``).
    """
    return _PEAKS.get(chip_of(hardware)[0], {}).get(precision_class(precision), math.nan) * 1e12


@cache
def shipped_anchors() -> tuple[HardwareAnchor, ...]:
    """Return the table of utilisations that published jobs reached, as it ships with the package; cached."""
    text = (resources.files("tutti.planning") / "published_hardware.json").read_text(encoding="utf-8")
    return tuple(HardwareAnchor(**row) for row in json.loads(text)["anchors"])


def write_anchors(anchors: Sequence[HardwareAnchor]) -> str:
    """Return utilisations of published jobs as JSON text, in the form of the package's ``published_hardware.json``."""
    return json.dumps({"version": 1, "anchors": [asdict(each) for each in anchors]}, indent=1) + "\n"


def anchored_rate(
    hardware: str, precision: str, anchors: Sequence[HardwareAnchor], without: str
) -> tuple[float, float, str]:
    """Return the hardware FLOP/s that published jobs reach on a chip.

    It is the peak times the median utilisation of the rows of ``anchors`` with this chip and class of precision;
    rows with the same memory are preferred.

    Args:
        hardware: the name as it is written.
        precision: the precision as it is written.
        anchors: rows to rest on.
        without: the published set whose own rows must not be used; empty to use all.

    Returns:
        The rate, the standard deviation of its logarithm, and an empty text; without a row NaN, NaN and the reason.
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
