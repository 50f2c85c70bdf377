"""Options of ``tutti landscape``. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tutti.config.bounds import check_above_zero, check_least
from tutti.errors import UsageError, did_you_mean

PARTS = ("curvature", "sharpness", "line", "plane")
LANDSCAPE_FILE = "landscape.json"


@dataclass(frozen=True, kw_only=True)
class LandscapeOptions:
    """Options of a measurement of the loss landscape, which is the loss around a checkpoint in parameter space.

    Attributes:
        checkpoint: directory of the checkpoint around which the loss is measured.
        to: directory of a second run's checkpoint, for losses on the line between both; None for no such line.
        ema: take the averaged weights of the checkpoints instead of the trained ones.
        parts: parts to measure: some of ``curvature`` (Hessian eigenvalues, trace and spectral density), ``sharpness``,
            ``line`` and ``plane`` (losses along one and two random directions).
        samples: number of samples that are drawn from each data set; None for all.
        block: samples of a forward and backward pass.
        statistics: batch norm's statistics: of the checkpoint (``running``) or of each block of samples (``batch``).
        eigenvalues: number of the largest Hessian eigenvalues to compute.
        tolerance: relative accuracy of the eigenvalues.
        probes: number of random vectors for the spectral density and the trace.
        lanczos: Lanczos steps of each of these vectors.
        epsilon: half width of the box of ε-sharpness.
        rho: radius of SAM's sharpness.
        points: number of points of a line.
        grid: number of points of a side of the plane.
        reach: distance from the checkpoint to the ends of line and plane, in units of a filter-normalised direction.
        seed: seed of samples, directions and probes.

    Raises:
        UsageError: a part is unknown, or a number is below its least value: 3 for ``points`` and ``grid``, 2 for
            ``lanczos``, 1 for all other counts; the rest must be above 0.
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
        check_least({"--samples": self.samples, "--micro-batch": self.block})
        check_least({"--eigenvalues": self.eigenvalues, "--probes": self.probes})
        check_least({"--lanczos": self.lanczos}, least=2)
        check_least({"--points": self.points, "--grid": self.grid}, least=3)
        check_above_zero(
            {"--tolerance": self.tolerance, "--epsilon": self.epsilon, "--rho": self.rho, "--reach": self.reach}
        )
