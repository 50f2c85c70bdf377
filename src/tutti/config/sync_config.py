"""Options of gradient synchronisation. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from tutti.config.spec import Duration, StrategyOptions
from tutti.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig(StrategyOptions):
    """Options of data parallelism by all-reduced gradients; each rank holds all parameters and optimizer state.

    Attributes:
        algorithm: ``native``: the collective library's all-reduce, overlapped with backward; ``shared_memory``: sums in
            shared memory of the processes of one node; ``auto``: shared memory where all ranks compute on x86-64 CPUs
            of one node and neither ``wire`` nor ``bucket_mb`` is given, else native; ``ring``, ``tree``, ``halving``,
            ``hierarchical`` (shared memory within nodes, rings between them) and ``central``: the schedules of
            ``tutti.comm.collective_schedules``, after backward.
        wire: dtype in which gradients are communicated; ``fp32``: each gradient in its own dtype.
        bucket_mb: megabytes (2²⁰ bytes) of gradients in a bucket (default 25), not for ``shared_memory``; the first
            bucket is smaller, so that its all-reduce starts early.

    Raises:
        ValueError: ``bucket_mb`` is not above 0, or ``shared_memory`` is combined with ``bucket_mb`` or with a ``wire``
            other than ``fp32``.
    """

    algorithm: Literal["auto", "native", "shared_memory", "ring", "tree", "halving", "hierarchical", "central"] = "auto"
    wire: Literal["fp32", "bf16", "fp16"] = "fp32"
    bucket_mb: float | None = None

    def __post_init__(self) -> None:
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb is {self.bucket_mb}, must be above 0")
        if self.algorithm == "shared_memory" and self.wire != "fp32":
            raise ValueError(f"shared_memory has no wire, so wire={self.wire} does nothing")
        if self.algorithm == "shared_memory" and self.bucket_mb is not None:
            raise ValueError("shared_memory sends no messages, so bucket_mb does nothing")

    @property
    def schedule(self) -> Literal["ring", "tree", "halving", "hierarchical", "central"] | None:
        """The all-reduce algorithm that tutti itself carries out: ring, tree, halving, hierarchical or central.

        None for ``auto``, ``native`` (the backend's all-reduce) and ``shared_memory``.
        """
        if self.algorithm == "auto" or self.algorithm == "native" or self.algorithm == "shared_memory":
            return None
        return self.algorithm


@dataclass(frozen=True, kw_only=True)
class RowsConfig(StrategyOptions):
    """Options of ZeRO, which shards tensors by rows over devices (Rajbhandari et al. 2019, arXiv 1910.02054).

    Attributes:
        stage: ZeRO stage: 1 shards the optimizer state, 2 the gradients too, 3 the parameters too.
        offload: whether parameter shards and optimizer state are kept in host memory, and updated there; ``optimizer``:
            the optimizer state alone. For accelerators.
        units: FSDP wrap policy: ``auto``, or names of the modules to wrap, or of their classes, as in ``Block+head``.
        param_dtype: dtype in which parameters are gathered and used in forward and backward; default: their own.

    Raises:
        ValueError: ``stage`` is not 1, 2 or 3; or in stage 1 ``offload=true``, ``units`` or ``param_dtype`` is given.
    """

    stage: int = 1
    offload: bool | Literal["optimizer"] = False
    units: tuple[str, ...] = ("auto",)
    param_dtype: Literal["bf16", "fp16"] | None = None

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage is {self.stage}, must be 1, 2 or 3")
        if self.stage == 1:
            given = {
                "offload=true": self.offload is True,
                "units": self.units != ("auto",),
                "param_dtype": self.param_dtype,
            }
            for option in filter(given.get, given):
                other = "; offload=optimizer is for all stages" * (self.offload is True)
                raise ValueError(f"{option} is for stages 2 and 3: in stage 1 every device holds all parameters{other}")

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the strategy: 1 shards optimizer state, 2 gradients too, 3 parameters too."""
        return self.stage

    @property
    def wrap_policy(self) -> tuple[str, ...]:
        """Names of the modules, or of their classes, that FSDP2 wraps to gather a module's parameters together.

        ``("auto",)``, the default: the modules are chosen automatically. From the option ``units`` of ZeRO.
        """
        return self.units

    def shards_parameters(self, shape: Mapping[str, int]) -> bool:
        """Return whether FSDP2 shards parameters: in ZeRO stages 2 and 3, if the mesh dimension ``shard`` is above 1.

        In stage 2, too, a rank holds only its rows between steps; parameters are whole from forward to backward.

        Args:
            shape: size of each dimension of the device mesh, by name: ``replica``, ``shard``, ``stage`` and ``tensor``.
        """
        return self.stage > 1 and shape["shard"] > 1

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if the ZeRO options ``offload`` or ``param_dtype`` would have no effect.

        ``offload`` keeps training state in host memory: parameter shards and optimizer state (``true``), or the
        optimizer state alone (``optimizer``). ``param_dtype`` is the dtype in which parameters are gathered. Called
        before any rank starts.

        Args:
            shape: size of each dimension of the device mesh, by name: ``replica``, ``shard``, ``stage`` and ``tensor``.
            accelerated: whether the devices are accelerators.
            compiled: whether the run uses ``--compile``; not used here.

        Raises:
            UsageError: ``offload`` is given on CPUs; or ``offload=true`` or ``param_dtype`` is given on a mesh whose
                dimension ``shard`` is 1, where no parameters are gathered.
        """
        if self.offload and not accelerated:
            raise UsageError(
                f"offload={'true' if self.offload is True else self.offload} does nothing here",
                why="it moves state from the memory of a GPU to the host's, and this run computes on CPUs",
                remedy="leave it out",
            )
        if shape["shard"] == 1 and (self.offload is True or self.param_dtype is not None):
            raise UsageError(
                f"{'offload=true' if self.offload else 'param_dtype'} does nothing where one device has a whole copy",
                why="it applies only to parameters that are gathered from other devices",
                remedy="take more shards, or leave it out"
                + (f" and take --precision {self.param_dtype}" if self.param_dtype else ""),
            )


@dataclass(frozen=True, kw_only=True)
class SplitConfig(RowsConfig, AllReduceConfig):
    """Options of gradient synchronisation over replicas that span several devices each, in a pipeline or tensor slices.

    Gradients are all-reduced over the replicas; groups of replicas may shard one copy of the state (ZeRO).

    Attributes:
        shards: number of replicas that shard one copy of the state; divides the number of replicas.

    Raises:
        ValueError: as ``AllReduceConfig`` and ``RowsConfig`` raise it; ``shards`` is below 1; with ``shards=1`` ZeRO
            options (``stage`` above 1, ``offload``) are given, or with more shards options of the all-reduce
            (``algorithm``, ``wire``, ``bucket_mb``).
    """

    shards: int = 1

    def __post_init__(self) -> None:
        AllReduceConfig.__post_init__(self)
        RowsConfig.__post_init__(self)
        if self.shards < 1:
            raise ValueError(f"shards is {self.shards}, must be at least 1")
        if self.shards == 1 and self.stage != 1:
            raise ValueError(f"stage={self.stage} shards nothing without shards=2 or more")
        if self.shards == 1 and self.offload:
            raise ValueError("offload does nothing without shards=2 or more")
        given = {"algorithm": self.algorithm != "auto", "wire": self.wire != "fp32", "bucket_mb": self.bucket_mb}
        for option in filter(given.get, given) if self.shards > 1 else ():
            raise ValueError(f"{option} does nothing with shards={self.shards}, whose gradients are summed by rows")

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Size of the device mesh's shard dimension, by the option that sets it: ``{"shards": N}``.

        A mapping with the single key ``shards``. The integer N is the number of replicas, each on several devices, over
        which one copy of the training state is sharded (ZeRO). With 1 nothing is sharded.
        """
        return {"shards": self.shards}

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if options of ZeRO conflict with pipeline stages, or would have no effect.

        ``offload`` keeps training state in host memory: parameter shards and optimizer state (``true``), or the
        optimizer state alone (``optimizer``). ``param_dtype`` is the dtype in which parameters are gathered. Called
        before any rank starts.

        Args:
            shape: size of each dimension of the device mesh, by name: ``replica``, ``shard``, ``stage`` and ``tensor``.
            accelerated: whether the devices are accelerators.
            compiled: whether the run uses ``--compile``; not used here.

        Raises:
            UsageError: parameters are sharded (ZeRO stages 2 and 3) in pipeline stages; ``offload`` is given on CPUs;
                or ``offload=true`` or ``param_dtype`` is given on a mesh whose dimension ``shard`` is 1, where no
                parameters are gathered.
        """
        super().check(shape, accelerated, compiled)
        if self.shards_parameters(shape) and shape["stage"] > 1:
            raise UsageError(
                f"stage={self.stage} cannot be combined with stages={shape['stage']}",
                why="every micro-batch of a pipeline would gather the parameters once more",
                remedy="take stage=1, which shares out the optimizer's state of each stage of the pipeline",
            )

    def capabilities(self) -> dict[str, Any]:
        """Return the strategy's capabilities that depend on the option ``shards``, by name of the capability.

        Called when ``--strategy`` is parsed. Names are fields of ``Strategy`` in ``config/strategy_table.py``; the
        returned values replace those that the table has for the strategy.

        Returns:
            A dict by name of the capability. With ``shards`` > 1: ``worker_gradients`` False, because no rank has the
            gradient of one logical worker (a fixed share of the global batch). Otherwise an empty dict.
        """
        return {"worker_gradients": False} if self.shards > 1 else {}

    @property
    def variant(self) -> Literal["sharded"] | None:
        """Name of the gradient synchronisation: ``sharded`` (ZeRO) for ``shards`` above 1; None for an all-reduce."""
        return "sharded" if self.shards > 1 else None


@dataclass(frozen=True, kw_only=True)
class CentralConfig(StrategyOptions):
    """Options of the strategy with one copy of parameters and optimizer state on each node; there are none."""


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(StrategyOptions):
    """Options of local SGD: each logical worker updates its own parameters, which are averaged every ``period`` steps.

    A logical worker is one of N fixed shares of the global batch.

    Attributes:
        period: number of steps between two averages (H).
        post: length of the initial phase with one synchronous update in each step, as ``2ep``, ``500st`` or a number of
            steps; default: no such phase.

    Raises:
        ValueError: ``period`` is below 1.
        UsageError: ``post`` is malformed.
    """

    period: int = 8
    post: str | None = None

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period is {self.period}, must be at least 1")
        _ = self.together

    @cached_property
    def together(self) -> Duration:
        """The length of local SGD's initial phase, in which all logical workers make one update together a step.

        A logical worker is one of N fixed shares of the global batch. The length is the option ``post`` as a
        ``Duration``, with a ``value`` and a ``unit``: epochs, steps (also for a number without a unit) or samples; 0
        steps without the option. Raises UsageError if the option is malformed.
        """
        text = self.post or "0"
        return Duration.parse(text + "st" * text.isdecimal(), "post")

    def resolve_durations(self, steps: Callable[[Duration], int]) -> Self:
        """Return a copy of local SGD's options in which ``post`` is a number of steps, as text such as ``"120st"``.

        ``post`` is the length of the initial synchronous phase, as given in steps, epochs or samples. Without ``post``
        the options are returned as they are.

        Args:
            steps: maps a duration to its number of steps in this run.
        """
        return self if self.post is None else dataclasses.replace(self, post=f"{steps(self.together)}st")


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig(LocalSGDConfig):
    """Options of DiLoCo: local SGD in which an outer optimizer takes the logical workers' mean change as gradient.

    Attributes:
        period: number of steps between two outer updates (H); the paper has 500.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: momentum of the outer optimizer.
        nesterov: whether the outer momentum is Nesterov's.

    Raises:
        ValueError: ``period`` is below 1, ``outer_lr`` not above 0, or ``outer_momentum`` not at least 0 and below 1.
        UsageError: ``post`` is malformed.
    """

    period: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr is {self.outer_lr:g}, must be above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum is {self.outer_momentum:g}, must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig(StrategyOptions):
    """Options of parameter servers: processes beside the ranks that hold the parameters and the optimizer state.

    Attributes:
        mode: ``sync``: one update a step from the gradients of all logical workers (fixed shares of the global batch);
            ``async``: one update from each worker's gradient as it arrives; ``bounded``: asynchronous with bounded
            staleness.
        servers: number of servers that the parameters are sharded over.
        staleness: steps that a worker may be ahead of the slowest; must be given for ``bounded``, and for it only.
        backup: number of stragglers, the slowest logical workers, that a step does not wait for, for ``sync`` only.
        fetch, push: steps between two fetches of the parameters, and between two pushes of the gradients accumulated
            meanwhile, for ``async`` only.
        steps: steps that the run's length counts, for ``async`` only: the steps of ``each`` worker, or of ``all``
            workers together, so that a fast worker makes more steps than a slow one.
        over_staleness: whether the learning rate of each update is divided by its staleness, the number of updates
            since the worker fetched the parameters.
        snapshot: number of updates between two snapshots, from which a killed server restarts; 0 for none; default:
            100. Not for ``sync``.
        lease: seconds of silence after which a worker is no longer waited for, for ``bounded`` only; default: the run's
            timeout.
        transport: ``shared_memory`` on one node, ``tcp`` anywhere; ``auto``: shared memory if it is available.

    Raises:
        ValueError: ``servers``, ``fetch`` or ``push`` is below 1, another number below 0, or ``lease`` not above 0;
            ``bounded`` has no ``staleness``, or an option is given for a mode that does not have it.
    """

    mode: Literal["sync", "async", "bounded"] = "sync"
    servers: int = 1
    staleness: int | None = None
    backup: int = 0
    fetch: int = 1
    push: int = 1
    steps: Literal["each", "all"] = "each"
    over_staleness: bool = False
    snapshot: int | None = None
    lease: float | None = None
    transport: Literal["auto", "shared_memory", "tcp"] = "auto"

    def __post_init__(self) -> None:
        for name, least in (
            ("servers", 1),
            ("fetch", 1),
            ("push", 1),
            ("backup", 0),
            ("staleness", 0),
            ("snapshot", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, must be at least {least}")
        if self.lease is not None and not self.lease > 0:
            raise ValueError(f"lease is {self.lease}, must be above 0")
        if self.mode == "bounded" and self.staleness is None:
            raise ValueError("mode=bounded needs a bound: give staleness=2")
        for modes, given in (
            (("bounded",), {"staleness": self.staleness is not None, "lease": self.lease is not None}),
            (("sync",), {"backup": self.backup > 0}),
            (("async",), {"fetch": self.fetch > 1, "push": self.push > 1, "steps": self.steps != "each"}),
            (("async", "bounded"), {"over_staleness": self.over_staleness, "snapshot": self.snapshot is not None}),
        ):
            wrong = [name for name, there in given.items() if there]
            if wrong and self.mode not in modes:
                raise ValueError(f"{wrong[0]} does nothing with mode={self.mode}")

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities of parameter servers that depend on these options, by name of the capability.

        Called when ``--strategy`` is parsed. Names are fields of ``Strategy`` in ``config/strategy_table.py``, and the
        returned values replace the strategy's values there. ``reproducible``: same bits on any number of ranks;
        ``shared_weights``: logical workers (shares of the global batch) hold the same weights at any time;
        ``averages``: ranks see the same parameters after an update; ``single_update``: all workers make one update
        together.

        Returns:
            For ``mode=sync`` an empty dict; with backup workers, whose steps leave out stragglers, ``reproducible``,
            ``shared_weights`` and ``averages``, all False. For ``mode=async`` and ``mode=bounded`` ``reproducible``,
            ``shared_weights``, ``averages`` and ``single_update``, all False; ``fault_tolerant`` (the run goes on when
            a rank is killed) True; and ``synchronous`` (every rank makes all steps) and ``custom_loop`` (a script may
            have its own loop), both True for ``steps=each``, both False for ``steps=all``, which counts the steps of
            all workers together.
        """
        if self.mode == "sync":
            return dict.fromkeys(("reproducible", "shared_weights", "averages"), False) if self.backup else {}
        return {
            "reproducible": False,
            "single_update": False,
            "shared_weights": False,
            "averages": False,
            "fault_tolerant": True,
            **dict.fromkeys(("synchronous", "custom_loop"), self.steps == "each"),
        }

    @property
    def variant(self) -> Literal["backup", "asynchronous"] | None:
        """Name of the way in which servers update; None for one update a step from all logical workers.

        ``backup``: one update a step, without the gradients of the ``backup`` slowest workers; ``asynchronous``: one
        update for each gradient as it arrives. A worker is one of N fixed shares of the global batch.
        """
        if self.mode != "sync":
            return "asynchronous"
        return "backup" if self.backup else None


@dataclass(frozen=True, kw_only=True)
class ShardedConfig(RowsConfig):
    """Options of ZeRO over data-parallel ranks: shards optimizer state (stage 1), gradients (2), parameters too (3).

    Attributes:
        shards: number of devices that shard one copy of the state; default: all. With fewer, each group of so many
            devices holds a replica (HSDP).

    Raises:
        ValueError: as ``RowsConfig`` raises it, or ``shards`` is below 1.
    """

    stage: int = 3
    shards: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards is not None and self.shards < 1:
            raise ValueError(f"shards is {self.shards}, must be at least 1")

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Size of the device mesh's shard dimension, by the option that sets it: ``{"shards": N}``.

        A mapping with the single key ``shards``, the name of the option of ZeRO that sets the size. N is the number of
        devices over which one copy of the training state is sharded: the optimizer state, from stage 2 on the gradients
        and in stage 3 the parameters. N is None where the option is not given: then all devices of the run share one
        copy.
        """
        return {"shards": self.shards}
