"""Options of the exchanges. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig:
    """Every device holds the whole state; gradients are summed over all.

    Attributes:
        algorithm: ``native`` is the collective library's own, overlapped with backward; ``shared_memory`` sums in
            memory that the processes of one host share; ``auto`` takes that where it can be had.
        wire: number format in which gradients travel.
        bucket_mb: megabytes of gradients a message (25), of ``native`` alone; the first is smaller, to leave early.
    """

    algorithm: Literal["auto", "native", "shared_memory"] = "auto"
    wire: Literal["fp32", "bf16", "fp16"] = "fp32"
    bucket_mb: float | None = None

    def __post_init__(self) -> None:
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb is {self.bucket_mb}, must be above 0")
        if self.algorithm == "shared_memory" and self.wire != "fp32":
            raise ValueError(f"shared_memory has no wire, so wire={self.wire} does nothing")
        if self.algorithm == "shared_memory" and self.bucket_mb is not None:
            raise ValueError("shared_memory sends no messages, so bucket_mb does nothing")


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig:
    """Every worker trains by itself; parameters are averaged now and then.

    Attributes:
        period: steps between averages (H).
    """

    period: int = 8

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period is {self.period}, must be at least 1")
