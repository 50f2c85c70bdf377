"""Options of the exchanges. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from tutti.errors import UsageError
from tutti.spec import Duration, StrategyOptions


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig(StrategyOptions):
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
class RowsConfig(StrategyOptions):
    """What devices share out, by rows. ZeRO: Rajbhandari et al. 2019, arXiv 1910.02054.

    Attributes:
        stage: 1: optimizer state; 2: gradients too; 3: parameters too.
        offload: keep rows and optimizer state in the host's memory, of CUDA devices.
        units: what is gathered as one: ``auto``, or names and classes of modules, ``Block+head``.
        param_dtype: number format in which parameters are gathered and computed with; default: as they are.
    """

    stage: int = 1
    offload: bool = False
    units: tuple[str, ...] = ("auto",)
    param_dtype: Literal["bf16", "fp16"] | None = None

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage is {self.stage}, must be 1, 2 or 3")
        if self.stage == 1:
            given = {"offload": self.offload, "units": self.units != ("auto",), "param_dtype": self.param_dtype}
            for option in filter(given.get, given):
                raise ValueError(f"{option} is for stages 2 and 3: in stage 1 every device holds all parameters")

    def takes_rows(self, shape: Mapping[str, int]) -> bool:
        return self.stage > 1 and shape["shard"] > 1

    def check(self, shape: Mapping[str, int], cuda: bool, compiled: bool) -> None:
        """Raise UsageError for options that would do nothing."""
        if self.offload and not cuda:
            raise UsageError(
                "offload=true does nothing here",
                why="it moves rows from the memory of a GPU to the host's, and this run computes on CPUs",
                remedy="leave it out",
            )
        if shape["shard"] == 1 and (self.offload or self.param_dtype is not None):
            raise UsageError(
                f"{'offload' if self.offload else 'param_dtype'} does nothing where one device has a whole copy",
                why="it is about parameters that are gathered from others",
                remedy="take more shards, or leave it out"
                + (f" and take --precision {self.param_dtype}" if self.param_dtype else ""),
            )


@dataclass(frozen=True, kw_only=True)
class SplitConfig(RowsConfig, AllReduceConfig):
    """Replicas that live on several devices each; some of them may share out what they all hold.

    Attributes:
        shards: replicas that share one copy; there are as many times more replicas.
    """

    shards: int = 1

    def __post_init__(self) -> None:
        AllReduceConfig.__post_init__(self)
        RowsConfig.__post_init__(self)
        if self.shards < 1:
            raise ValueError(f"shards is {self.shards}, must be at least 1")
        if self.shards == 1 and self.stage != 1:
            raise ValueError(f"stage={self.stage} shares out nothing without shards=2 or more")
        given = {"algorithm": self.algorithm != "auto", "wire": self.wire != "fp32", "bucket_mb": self.bucket_mb}
        for option in filter(given.get, given) if self.shards > 1 else ():
            raise ValueError(f"{option} does nothing with shards={self.shards}, whose gradients are summed by rows")

    def check(self, shape: Mapping[str, int], cuda: bool, compiled: bool) -> None:
        """Raise UsageError for those too, and where a model that is cut into stages would be gathered."""
        super().check(shape, cuda, compiled)
        if self.takes_rows(shape) and shape["stage"] > 1:
            raise UsageError(
                f"stage={self.stage} does not go with stages={shape['stage']}",
                why="every micro-batch of a pipeline would gather the parameters once more",
                remedy="take stage=1, which shares out the optimizer's state of each stage of the pipeline",
            )

    def promises(self) -> dict[str, Any]:
        return {"exchange": "sharded:Sharded", "worker_gradients": False} if self.shards > 1 else {}


@dataclass(frozen=True, kw_only=True)
class CentralConfig(StrategyOptions):
    """One copy of the parameters and of the optimizer's state a host; nothing to choose."""

    def check(self, shape: Mapping[str, int], cuda: bool, compiled: bool) -> None:
        """Raise UsageError where devices are GPUs."""
        if cuda:
            raise UsageError(
                "central_storage is for CPUs, and this run's devices are GPUs",
                why="the parameters that a device computes with are the ones in the host's memory",
                remedy="take --strategy mirrored, or --device cpu",
            )


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig(StrategyOptions):
    """Every worker trains by itself; parameters are averaged now and then.

    Attributes:
        period: steps between averages (H).
        post: how long all workers make one update together before, ``2ep``, ``500st`` or a number of steps.
    """

    period: int = 8
    post: str | None = None

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period is {self.period}, must be at least 1")
        self.together()

    def together(self) -> Duration:
        """How long workers train together at first. Raises UsageError where that is no length."""
        text = self.post or "0"
        return Duration.parse(text + "st" * text.isdecimal(), "post")

    def counted(self, steps: Callable[[Duration], int]) -> Self:
        """The same with ``post`` in steps."""
        return self if self.post is None else dataclasses.replace(self, post=f"{steps(self.together())}st")


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig(PeriodicConfig):
    """Every worker trains by itself; now and then an outer optimizer steps along what they have changed on average.

    Attributes:
        period: steps between outer updates (H); the paper has 500.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its momentum.
        nesterov: whether that is Nesterov's.
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
    """Parameters and optimizer live on servers, processes of their own beside the workers.

    Attributes:
        mode: ``sync`` makes one update of all workers' gradients a step; ``async`` one of each worker's, at once;
            ``bounded`` too, but no worker may be too far ahead of the slowest.
        servers: how many share the parameters out.
        staleness: steps that a worker may be ahead of the slowest, of ``bounded`` alone.
        backup: how many of the slowest workers are not waited for in a step, of ``sync`` alone.
        fetch, push: steps between two readings of the parameters, and between two pushes of the gradients added up
            meanwhile, of ``async`` alone.
        steps: which ones the run's length counts, of ``async`` alone: those that ``each`` worker makes, or those of
            ``all`` together, so that a fast worker makes more of them and a slow one fewer.
        over_staleness: divide the learning rate of each update by how many others came since its reading.
        snapshot: updates between two snapshots, from which a server that was killed goes on; 0 for none. Not of
            ``sync``.
        lease: seconds without a word after which a worker is no longer waited for, of ``bounded`` alone; default: the
            run's timeout.
        transport: ``shared_memory`` on one host, ``tcp`` anywhere; ``auto`` takes the first where it can be had.
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

    def promises(self) -> dict[str, Any]:
        if self.mode == "sync":
            return dict.fromkeys(("reproducible", "one_model", "averages"), False) if self.backup else {}
        return {
            "exchange": "server.asynchronous:Asynchronous",
            "reproducible": False,
            "workers_together": False,
            "one_model": False,
            "averages": False,
            "outlives": True,
            **dict.fromkeys(("in_step", "own_loop"), self.steps == "each"),
        }


@dataclass(frozen=True, kw_only=True)
class ShardedConfig(RowsConfig):
    """Devices share out optimizer state (stage 1), gradients too (2), and parameters too (3).

    Attributes:
        shards: devices that share one copy; default: all. Groups of them hold the same (HSDP).
    """

    stage: int = 3
    shards: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards is not None and self.shards < 1:
            raise ValueError(f"shards is {self.shards}, must be at least 1")
