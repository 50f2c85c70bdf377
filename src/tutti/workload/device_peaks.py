"""Published peak rates of accelerators, for model FLOPs utilisation (MFU). Dense matrix products; no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_VOLTA = "NVIDIA Tesla V100 data sheet, WP-08608"
_TURING = "NVIDIA T4 data sheet, 2019"
_AMPERE = "NVIDIA A100 data sheet, 2021"
_A10 = "NVIDIA A10 data sheet, 2021; half of the rates with sparsity"
_ADA = "NVIDIA L4 and L40S data sheets, 2023; half of the rates with sparsity"
_HOPPER = "NVIDIA H100 data sheet, 2023; half of the rates with sparsity"
_HOPPER_200 = "NVIDIA H200 data sheet, 2024; half of the rates with sparsity"


@dataclass(frozen=True)
class PublishedPeak:
    """Published peak FLOP/s of dense matrix products of one accelerator.

    Attributes:
        name: regular expression that is searched for in the device name that the driver reports.
        flop: FLOP/s by precision of the products: fp32, tf32, bf16, fp16, fp64.
        source: publication of the peaks.
    """

    name: str
    flop: Mapping[str, float]
    source: str


PEAKS = (
    PublishedPeak(r"V100-SXM", {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12}, _VOLTA),
    PublishedPeak(r"V100-PCIE", {"fp16": 112e12, "fp32": 14e12, "fp64": 7e12}, _VOLTA),
    PublishedPeak(r"(Tesla|NVIDIA) T4$", {"fp16": 65e12, "fp32": 8.1e12}, _TURING),
    PublishedPeak(
        r"A100[- ]", {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12}, _AMPERE
    ),
    PublishedPeak(r"NVIDIA A10$", {"bf16": 125e12, "fp16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12}, _A10),
    PublishedPeak(r"NVIDIA L4$", {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12}, _ADA),
    PublishedPeak(r"NVIDIA L40S$", {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12}, _ADA),
    PublishedPeak(
        r"H100 PCIe", {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12, "fp64": 51e12}, _HOPPER
    ),
    PublishedPeak(
        r"H100 (SXM|80GB HBM3)", {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp64": 67e12}, _HOPPER
    ),
    PublishedPeak(
        r"NVIDIA H200$", {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp64": 67e12}, _HOPPER_200
    ),
)
"""One row an accelerator; the first row whose pattern is found in a device's name counts."""


def published_peak(device: str, precision: str) -> tuple[float, str] | None:
    """Look up a device's peak FLOP/s of dense matrix products in data sheets of its maker.

    Args:
        device: name of the device, as PyTorch reports it.
        precision: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp64``.

    Returns:
        FLOP/s and the name of the data sheet; None where the device or the precision is not in the table.

    >>> published_peak("NVIDIA A100-SXM4-80GB", "bf16")
    (312000000000000.0, 'NVIDIA A100 data sheet, 2021')
    >>> published_peak("NVIDIA GeForce 256", "fp32") is None
    True
    """
    row = next((row for row in PEAKS if re.search(row.name, device)), None)
    return None if row is None or precision not in row.flop else (row.flop[precision], row.source)
