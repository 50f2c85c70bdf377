"""Options of how a replica is laid out over devices: whole, in pipeline stages, in tensor slices, or both. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from tutti.config.spec import StrategyOptions
from tutti.errors import UsageError, counted, did_you_mean


@dataclass(frozen=True, kw_only=True)
class WholeConfig(StrategyOptions):
    """Options of strategies in which each device holds a whole replica of the model; there are none."""


StageModules: TypeAlias = tuple[tuple[str, ...], ...]
"""Names of the modules of each stage."""


@dataclass(frozen=True, kw_only=True)
class StagesConfig(StrategyOptions):
    """Options of strategies that partition a replica of the model into stages of consecutive modules.

    The partition is even, or given by the first modules of the stages, or by the modules of each stage.

    Attributes:
        stages: number of devices of a replica; default: all devices of the run. Or the modules of each stage, in the
            order in which the forward calls them: ``embed+block1/block2+head``.
        cuts: names of the first module of each stage after the first, as in ``name+name``; default: an even partition,
            by measured seconds of the modules or by their numbers of parameters.

    Raises:
        ValueError: ``stages`` is below 1; or it lists modules, and ``cuts`` is given too, there is only one stage, a
            stage has no module, an empty name or one name twice, or the stages cannot be divided over several devices.
    """

    stages: int | StageModules | None = None
    cuts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stages, tuple):
            self._check_modules(self.stages)
        elif self.stages is not None and self.stages < 1:
            raise ValueError(f"stages is {self.stages}, must be at least 1")

    def _check_modules(self, stages: StageModules) -> None:
        """Raise ValueError if lists of modules by stage contradict themselves or other options."""
        if len(stages) < 2:
            raise ValueError(f"stages names the modules of {len(stages)} stage, must be at least 2")
        if self.cuts:
            raise ValueError("stages names modules, and cuts does too: leave out one of the two")
        for number, names in enumerate(stages):
            if not names or "" in names:
                raise ValueError(f"stage {number} of stages has an empty name, or no module")
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"stage {number} of stages names {name} twice")
        if len(stages) % self.chunks or len(stages) == self.chunks:
            raise ValueError(f"{len(stages)} stages cannot be {self.chunks} virtual stages on each of several devices")

    @property
    def chunks(self) -> int:
        """Number of virtual pipeline stages on each device; 1 in this class.

        ``PipelineConfig`` overrides it: with the interleaved schedule a device has several parts of the model, which
        are not consecutive.
        """
        return 1

    @property
    def modules(self) -> StageModules:
        """Names of the modules of each virtual pipeline stage, if the option ``stages`` lists them; else empty.

        A tuple with a tuple of names for each stage; stages, and the names in each, stand in the order in which the
        forward calls the modules. A device has one virtual stage, and several with the interleaved schedule.
        """
        return self.stages if isinstance(self.stages, tuple) else ()

    @property
    def begins(self) -> tuple[str, ...]:
        """Name of the first module of each virtual pipeline stage but the first.

        Taken from the option ``stages``, if that lists modules, else from ``cuts``. Empty if neither names any module:
        the model is then partitioned into stages that are even in time or in their number of parameters. A device has
        one virtual stage, and several with the interleaved schedule.
        """
        return tuple(names[0] for names in self.modules[1:]) or self.cuts

    @property
    def stage_ranks(self) -> int | None:
        """Number of devices that the pipeline stages of one replica take; None stands for all devices of the run."""
        return len(self.stages) // self.chunks if isinstance(self.stages, tuple) else self.stages

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Size of the device mesh's stage dimension, by the option that sets it: ``{"stages": devices of a replica}``.

        A mapping with the single key ``stages``. The value is the number of devices over which the pipeline stages of
        one replica of the model lie; None stands for all devices of the run.
        """
        return {"stages": self.stage_ranks}

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if the option ``cuts`` does not name one module for each virtual stage but the first.

        ``cuts`` names the first module of a stage. There are ``shape["stage"]`` times ``chunks`` virtual stages. The
        check passes without ``cuts``, and on a device mesh with a single stage. Called before any rank starts.

        Args:
            shape: size of each dimension of the device mesh, by name: ``replica``, ``shard``, ``stage`` and ``tensor``.
            accelerated: whether the devices are accelerators; not used here.
            compiled: whether the run uses ``--compile``; not used here.
        """
        if shape["stage"] > 1:
            check_cuts(self.cuts, shape["stage"] * self.chunks)


@dataclass(frozen=True, kw_only=True)
class LayersConfig(StagesConfig):
    """Options of a strategy that partitions a replica into stages, one on each device; the devices compute in turn."""

    schedule: ClassVar[str] = "one_by_one"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(StagesConfig):
    """Options of a pipeline: a replica is partitioned into stages, through which micro-batches pass in turn.

    Attributes:
        schedule: pipeline schedule: the order of forwards and backwards on each device.
        micro_batches: number of micro-batches into which a full share of a logical worker (a fixed share of the global
            batch) is divided; default: from ``--micro-batch``.
        virtual: number of virtual stages on each device, for ``interleaved`` only; default: 2.

    Raises:
        ValueError: ``micro_batches`` is below 1, ``virtual`` is below 2 or given for another schedule, or ``stages`` or
            ``cuts`` are refused as in ``StagesConfig``.
    """

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    micro_batches: int | None = None
    virtual: int | None = None

    def __post_init__(self) -> None:
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}, must be at least 1")
        if self.virtual is not None and self.schedule != "interleaved":
            raise ValueError(f"virtual stages are for schedule=interleaved, not {self.schedule}")
        if self.virtual is not None and self.virtual < 2:
            raise ValueError(f"virtual is {self.virtual}, must be at least 2")
        StagesConfig.__post_init__(self)

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if the options of a pipeline conflict with the number of stages or with ``--compile``.

        Called before any rank starts. ``cuts``, if given, must name the first module of each virtual stage but the
        first, and ``schedule=zero_bubble``, which splits each backward in two, cannot be compiled.

        Args:
            shape: size of each dimension of the device mesh, by name: ``replica``, ``shard``, ``stage`` and ``tensor``.
            accelerated: whether the devices are accelerators; not used here.
            compiled: whether the run uses ``--compile``.
        """
        if self.schedule == "zero_bubble" and compiled:
            raise UsageError(
                "schedule=zero_bubble cannot be combined with --compile",
                why="a compiled backward cannot be split into input backward and weight backward",
                remedy="take schedule=1f1b, or leave out --compile",
            )
        StagesConfig.check(self, shape, accelerated, compiled)

    @property
    def chunks(self) -> int:
        """Number of virtual pipeline stages on each device.

        It is the option ``virtual`` (default 2) for the schedule ``interleaved``, and 1 for other schedules.
        """
        return (self.virtual or 2) if self.schedule == "interleaved" else 1


TP_STYLES: Mapping[str, str] = {
    "colwise": "column",
    "rowwise": "row",
    "heads": "heads",
    "gathered": "gathered",
    "vocabulary": "vocabulary",
    "whole": "whole",
}
"""Styles of a TP plan by hand, and the roles of modules in the plan that they ask for."""


@dataclass(frozen=True, kw_only=True)
class TensorConfig(StrategyOptions):
    """Options of tensor parallelism: each layer of a replica is split over devices that compute the layer together.

    Attributes:
        tensor: number of devices of a replica; default: all devices of the run.
        least: a layer whose output must be gathered, which saves memory and not time, is split only if it has at least
            this many parameters.
        whole: name patterns of modules that are not split, submodules included, such as ``whole=embed+head*``.
        plan: ``pattern:style+pattern:style``: the modules that are split, and how (``TP_STYLES``); all others stay
            whole. Default: found automatically.
        sequence: sequence parallelism: norms, dropout and residual sums between split layers are split by position.

    Raises:
        ValueError: ``tensor`` is below 1 or ``least`` below 0, ``sequence`` is given with ``tensor=1``, ``plan`` with
            ``whole``, or ``plan`` has an item that is not ``pattern:style`` with a known style, or one pattern twice.
    """

    tensor: int | None = None
    least: int = 16384
    whole: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    sequence: bool = False

    def __post_init__(self) -> None:
        if self.tensor is not None and self.tensor < 1:
            raise ValueError(f"tensor is {self.tensor}, must be at least 1")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence does nothing with tensor=1, where no layer is split")
        if self.least < 0:
            raise ValueError(f"least is {self.least}, must be at least 0")
        if self.plan and self.whole:
            raise ValueError("modules that plan does not name stay whole anyway: leave out whole")
        if len(self.styles) < len(self.plan):
            raise ValueError("plan names a pattern twice")

    @property
    def styles(self) -> Mapping[str, str]:
        """The tensor-parallel plan: name pattern of modules → how to split them; empty if tutti finds the plan itself.

        Values are ``colwise`` and ``rowwise`` (a linear layer by outputs or by inputs), ``heads`` (attention by heads),
        ``vocabulary`` (an embedding by rows of its table), ``gathered`` (a layer by outputs, which are all-gathered)
        and ``whole`` (not split). Raises ValueError for an item of ``plan`` that is not ``pattern:style``, or has
        another style.
        """
        found = {}
        for item in self.plan:
            pattern, colon, style = item.rpartition(":")
            if not (colon and pattern):
                raise ValueError(f"plan has '{item}', must be pattern:style")
            if style not in TP_STYLES:
                raise ValueError(f"plan has '{item}', whose style is unknown; {did_you_mean(style, TP_STYLES)}")
            found[pattern] = style
        return found

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Size of the device mesh's tensor dimension, by the option that sets it: ``{"tensor": devices of a replica}``.

        A mapping with the single key ``tensor``. The value is the number of devices that split the layers of one
        replica of the model; None stands for all devices of the run.
        """
        return {"tensor": self.tensor}

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if sequence parallelism (the option ``sequence``) is combined with ``--compile``.

        Called before any rank starts.

        Args:
            shape: size of each dimension of the device mesh, by name: ``replica``, ``shard``, ``stage`` and ``tensor``;
                not used here.
            accelerated: whether the devices are accelerators; not used here.
            compiled: whether the run uses ``--compile``.
        """
        if self.sequence and compiled:
            raise UsageError(
                "sequence=true cannot be combined with --compile",
                why="a compiled module would get only a share of the positions",
                remedy="leave out one of the two",
            )


@dataclass(frozen=True, kw_only=True)
class HybridConfig(TensorConfig, PipelineConfig):
    """Options of pipeline and tensor parallelism together: a replica has stages, whose layers are split over devices.

    Attributes:
        replicas: size of the mesh dimension ``replica``; default: the number of devices, divided by all other
            dimensions.
        stages: number of devices that the pipeline stages of a replica take, or the modules of each stage.
        tensor: number of devices that compute each layer of a stage together.

    Raises:
        ValueError: ``replicas`` is below 1, or as ``TensorConfig`` and ``PipelineConfig`` raise it.
    """

    replicas: int | None = None
    stages: int | StageModules = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        TensorConfig.__post_init__(self)
        PipelineConfig.__post_init__(self)
        if self.replicas is not None and self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}, must be at least 1")

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Sizes of a device mesh with pipeline and tensor parallelism: ``{"replicas": …, "stages": …, "tensor": …}``.

        A mapping of these three keys to numbers. ``replicas`` is the size of the dimension ``replica``; None where the
        options do not state the size, which then is the number of devices of the run divided by all other dimensions of
        the mesh. ``stages`` is the number of devices in a pipeline, not of virtual stages; ``tensor`` the number of
        devices that split each layer.
        """
        return {"replicas": self.replicas, "stages": self.stage_ranks, "tensor": self.tensor}

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if options of pipeline or tensor parallelism conflict with the run.

        That is, if sequence parallelism (``sequence``) or ``schedule=zero_bubble``, which splits each backward in two,
        is combined with ``--compile``, or ``cuts`` is given and does not name one module for each virtual stage but the
        first. Called before any rank starts.

        Args:
            shape: size of each dimension of the device mesh, by name: ``replica``, ``shard``, ``stage`` and ``tensor``.
            accelerated: whether the devices are accelerators; not used here.
            compiled: whether the run uses ``--compile``.
        """
        TensorConfig.check(self, shape, accelerated, compiled)
        PipelineConfig.check(self, shape, accelerated, compiled)


def check_cuts(cuts: Sequence[str], stages: int) -> None:
    """Raise UsageError if ``cuts`` names modules, but not ``stages - 1`` of them, as ``stages`` stages need.

    Args:
        cuts: name of the first module of each stage but the first; empty for an even partition, which always passes.
        stages: number of virtual stages over all devices of a replica.
    """
    if cuts and len(cuts) != stages - 1:
        named = "+".join(cuts)
        raise UsageError(
            f"cuts={named} makes {len(cuts) + 1} stages, not {stages}",
            remedy=f"name {counted(stages - 1, 'module')}, the first of each stage but the first",
        )
