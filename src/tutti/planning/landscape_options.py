"""What ``tutti landscape`` measures. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tutti.errors import UsageError, did_you_mean

PARTS = ("curvature", "sharpness", "line", "plane")
LANDSCAPE_FILE = "landscape.json"


@dataclass(frozen=True, kw_only=True)
class LandscapeOptions:
    """Options of a landscape.

    Attributes:
        checkpoint: directory of the checkpoint in the middle.
        to: directory of a second run's checkpoint, for the line between both; None for none.
        ema: take the averages of the weights.
        parts: some of ``PARTS``.
        samples: samples that are drawn from each set; None for all.
        block: samples of a forward and backward pass.
        statistics: batch norm's statistics: of the checkpoint (``running``) or of each block (``batch``).
        eigenvalues: largest eigenvalues to compute.
        tolerance: their relative accuracy.
        probes: random vectors of density and trace.
        lanczos: Lanczos steps of each.
        epsilon: half width of ε-sharpness's box.
        rho: radius of SAM's sharpness.
        points: points of a line.
        grid: points of a side of the plane.
        reach: distance from the middle to the ends of line and plane, in lengths of the filters.
        seed: of samples, directions and probes.
    """

    checkpoint: Path
    to: Path | None = None
    ema: bool = False
    parts: Sequence[str] = PARTS
    samples: int | None = 1024
    block: int = 128
    statistics: Literal["running", "batch"] = "running"
    eigenvalues: int = 5
    tolerance: float = 1e-3
    probes: int = 6
    lanczos: int = 24
    epsilon: float = 1e-3
    rho: float = 0.05
    points: int = 31
    grid: int = 15
    reach: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise UsageError(f"there is no part '{part}' of a landscape", remedy=did_you_mean(part, PARTS))
        least = {"samples": 1, "block": 1, "eigenvalues": 1, "probes": 1, "lanczos": 2, "points": 3, "grid": 3}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                flag = {"block": "micro-batch"}.get(name, name)
                raise UsageError(f"--{flag} is {value}", remedy=f"give a whole number of at least {bound}")
        for name in ("tolerance", "epsilon", "rho", "reach"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(f"--{name} is {getattr(self, name):g}", remedy="give a number above 0")
