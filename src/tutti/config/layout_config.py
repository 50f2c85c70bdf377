"""Options of the model layouts. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tutti.config.spec import StrategyOptions
from tutti.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class WholeConfig(StrategyOptions):
    """A device holds a whole replica; there are no options."""


@dataclass(frozen=True, kw_only=True)
class LayersConfig(StrategyOptions):
    """Partition a replica into stages, one a device; the devices compute in turn.

    Attributes:
        stages: devices a replica; default: all devices of the run.
        cuts: ``name+name``: the first module of each stage after the first; default: an even partition.
    """

    stages: int | None = None
    cuts: tuple[str, ...] = ()
    schedule: ClassVar[str] = "one_by_one"
    chunks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_stages(self.stages)

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Return the number of pipeline stages as asked for; None for all devices."""
        return {"stages": self.stages}

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if ``cuts`` does not make as many stages as the device mesh has."""
        if shape["stage"] > 1:
            check_cuts(self.cuts, shape["stage"])


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(StrategyOptions):
    """Partition a replica into pipeline stages, through which micro-batches pass one after the other.

    Attributes:
        stages: devices a replica; default: all devices of the run.
        schedule: pipeline schedule: the order of forwards and backwards on each device.
        micro_batches: number of micro-batches of a logical worker's share of a full batch; default: from --micro-batch.
        virtual: virtual stages a device, for ``interleaved`` only; default: 2.
        cuts: ``name+name``: the first module of each stage after the first; default: an even partition.
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

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Return the number of pipeline stages as asked for; None for all devices."""
        return {"stages": self.stages}

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if ``cuts`` does not fit the number of stages, or zero bubble meets ``--compile``."""
        if self.schedule == "zero_bubble" and compiled:
            raise UsageError(
                "schedule=zero_bubble cannot be combined with --compile",
                why="a compiled backward cannot be split into input backward and weight backward",
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
    """Split each layer of a replica over devices that compute it together (tensor parallelism).

    Attributes:
        tensor: devices a replica; default: all devices of the run.
        least: a layer whose output must be gathered, which saves memory and not time, is split only if it has at least
            this many parameters.
        whole: name patterns of modules that are not split, submodules included, such as ``whole=embed+head*``.
        sequence: sequence parallelism: norms, dropout and residual sums between split layers are split by position.
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

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Return the number of tensor ranks as asked for; None for all devices."""
        return {"tensor": self.tensor}

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if ``sequence`` meets ``--compile``."""
        if self.sequence and compiled:
            raise UsageError(
                "sequence=true cannot be combined with --compile",
                why="a compiled module would get only a share of the positions",
                remedy="leave out one of the two",
            )


@dataclass(frozen=True, kw_only=True)
class HybridConfig(TensorConfig, PipelineConfig):
    """Partition a replica into stages as ``pipeline`` does, and split each stage's layers as ``tensor`` does.

    Attributes:
        replicas: copies of the model; default: follows from the number of devices and the other two.
        stages: pipeline stages of a replica.
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

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Return the numbers of replicas, pipeline stages and tensor ranks as asked for."""
        return {"replicas": self.replicas, "stages": self.stages, "tensor": self.tensor}

    def capabilities(self) -> dict[str, Any]:
        """Allow custom training loops where the model has a single stage."""
        return {"custom_loop": self.stages == 1}

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError as ``TensorConfig`` and ``PipelineConfig`` do."""
        TensorConfig.check(self, shape, accelerated, compiled)
        PipelineConfig.check(self, shape, accelerated, compiled)


def check_cuts(cuts: Sequence[str], stages: int) -> None:
    """Raise UsageError if ``cuts`` is given and does not make ``stages`` stages."""
    if cuts and len(cuts) != stages - 1:
        named = "+".join(cuts)
        raise UsageError(f"cuts={named} makes {len(cuts) + 1} stages, not {stages}", remedy=f"name {stages - 1}")


def _check_stages(stages: int | None) -> None:
    if stages is not None and stages < 1:
        raise ValueError(f"stages is {stages}, must be at least 1")
