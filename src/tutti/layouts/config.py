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


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """A replica's layers are split over devices that compute each layer together.

    Attributes:
        tensor: devices a replica; default: all devices of the run.
        least: parameters of the smallest layer that is split where its output must be gathered, which saves memory and
            not time; smaller ones stay whole.
        whole: patterns of names of modules that stay whole with all that is in them, such as ``whole=embed+head*``.
    """

    tensor: int | None = None
    least: int = 16384
    whole: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tensor is not None and self.tensor < 1:
            raise ValueError(f"tensor is {self.tensor}, must be at least 1")
        if self.least < 0:
            raise ValueError(f"least is {self.least}, must be at least 0")


@dataclass(frozen=True, kw_only=True)
class HybridConfig(TensorConfig):
    """A replica is cut into stages, and the layers of each stage are split.

    Attributes:
        replicas: copies of the model; default: what the other two leave.
        stages: parts that a replica is cut into.
        tensor: devices that compute each layer of a stage together.
    """

    replicas: int | None = None
    stages: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, extent in (("replicas", self.replicas), ("stages", self.stages)):
            if extent is not None and extent < 1:
                raise ValueError(f"{name} is {extent}, must be at least 1")
