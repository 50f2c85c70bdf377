"""Options of the layouts. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tutti.errors import UsageError
from tutti.spec import StrategyOptions


@dataclass(frozen=True, kw_only=True)
class WholeConfig(StrategyOptions):
    """A replica lives whole on one device; nothing to choose."""


@dataclass(frozen=True, kw_only=True)
class LayersConfig(StrategyOptions):
    """A replica is cut between layers; its devices work in turn.

    Attributes:
        stages: devices a replica; default: all devices of the run.
        cuts: ``name+name``: the modules that later stages begin with; default: evenly.
    """

    stages: int | None = None
    cuts: tuple[str, ...] = ()
    schedule: ClassVar[str] = "one_by_one"
    chunks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_stages(self.stages)

    def check(self, shape: Mapping[str, int], cuda: bool, compiled: bool) -> None:
        """Raise UsageError where the options do not go with the grid."""
        if shape["stage"] > 1:
            check_cuts(self.cuts, shape["stage"])


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(StrategyOptions):
    """A replica is cut between layers, and micro-batches go through its devices one after the other.

    Attributes:
        stages: devices a replica; default: all devices of the run.
        schedule: in which order devices compute.
        micro_batches: into how many a worker's share of a full batch is cut; default: as --micro-batch says.
        virtual: stages a device, of ``interleaved`` alone (2).
        cuts: ``name+name``: the modules that later stages begin with; default: evenly.
    """

    stages: int | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    micro_batches: int | None = None
    virtual: int | None = None
    cuts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_stages(self.stages)
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}, must be at least 1")
        if self.virtual is not None and self.schedule != "interleaved":
            raise ValueError(f"virtual stages are for schedule=interleaved, not {self.schedule}")
        if self.virtual is not None and self.virtual < 2:
            raise ValueError(f"virtual is {self.virtual}, must be at least 2")

    def check(self, shape: Mapping[str, int], cuda: bool, compiled: bool) -> None:
        """Raise UsageError where the options do not go with the grid, or with ``--compile``."""
        if self.schedule == "zero_bubble" and compiled:
            raise UsageError(
                "schedule=zero_bubble does not go with --compile",
                why="a compiled backward cannot be split in that of the input and that of the weights",
                remedy="take schedule=1f1b, or leave out --compile",
            )
        if shape["stage"] > 1:
            check_cuts(self.cuts, shape["stage"] * self.chunks)

    @property
    def chunks(self) -> int:
        """Virtual stages a device."""
        return (self.virtual or 2) if self.schedule == "interleaved" else 1


@dataclass(frozen=True, kw_only=True)
class TensorConfig(StrategyOptions):
    """A replica's layers are split over devices that compute each layer together.

    Attributes:
        tensor: devices a replica; default: all devices of the run.
        least: parameters of the smallest layer that is split where its output must be gathered, which saves memory and
            not time; smaller ones stay whole.
        whole: patterns of names of modules that stay whole with all that is in them, such as ``whole=embed+head*``.
        sequence: what is between split layers (norms, dropout, residual sums) is split too, by positions.
    """

    tensor: int | None = None
    least: int = 16384
    whole: tuple[str, ...] = ()
    sequence: bool = False

    def __post_init__(self) -> None:
        if self.tensor is not None and self.tensor < 1:
            raise ValueError(f"tensor is {self.tensor}, must be at least 1")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence does nothing with tensor=1, where no layer is split")
        if self.least < 0:
            raise ValueError(f"least is {self.least}, must be at least 0")

    def check(self, shape: Mapping[str, int], cuda: bool, compiled: bool) -> None:
        """Raise UsageError where the options do not go with ``--compile``."""
        if self.sequence and compiled:
            raise UsageError(
                "sequence=true does not go with --compile",
                why="what is compiled would be given a share of the positions",
                remedy="leave out one of the two",
            )


@dataclass(frozen=True, kw_only=True)
class HybridConfig(TensorConfig, PipelineConfig):
    """A replica is cut into stages as for ``pipeline``, and the layers of each stage are split as for ``tensor``.

    Attributes:
        replicas: copies of the model; default: what the other two leave.
        stages: parts that a replica is cut into.
        tensor: devices that compute each layer of a stage together.
    """

    replicas: int | None = None
    stages: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        TensorConfig.__post_init__(self)
        PipelineConfig.__post_init__(self)
        if self.replicas is not None and self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}, must be at least 1")

    def promises(self) -> dict[str, Any]:
        return {"own_loop": self.stages == 1}

    def check(self, shape: Mapping[str, int], cuda: bool, compiled: bool) -> None:
        """As of ``TensorConfig`` and ``PipelineConfig``."""
        TensorConfig.check(self, shape, cuda, compiled)
        PipelineConfig.check(self, shape, cuda, compiled)


def check_cuts(cuts: Sequence[str], stages: int) -> None:
    """Raise UsageError where ``cuts`` makes another number of stages."""
    if cuts and len(cuts) != stages - 1:
        named = "+".join(cuts)
        raise UsageError(f"cuts={named} makes {len(cuts) + 1} stages, not {stages}", remedy=f"name {stages - 1}")


def _check_stages(stages: int | None) -> None:
    if stages is not None and stages < 1:
        raise ValueError(f"stages is {stages}, must be at least 1")
