"""Options of the layouts. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WholeConfig:
    """A replica lives whole on one device; nothing to choose."""


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """A replica is cut between layers; its devices work in turn.

    Attributes:
        stages: devices a replica; default: all devices of the run.
    """

    stages: int | None = None

    def __post_init__(self) -> None:
        if self.stages is not None and self.stages < 1:
            raise ValueError(f"stages is {self.stages}, must be at least 1")
