"""Options of ``--on``, the engine that starts a job's ranks, and of ``--devices`` with a least and a most. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tutti.config.spec import Spec
from tutti.errors import UsageError

WAIT = 60.0
"""Seconds that a job waits for another device when one is lost."""

_RANGE = re.compile(r"(\d+):(\d+)")
_LIMIT = re.compile(r"(\d+)([mhd])")
_SLURM_TIME = re.compile(r"(\d+-)?\d+:\d\d(:\d\d)?")
_MEMORY = re.compile(r"\d+[KMGT]?B?", re.IGNORECASE)
_WORD = re.compile(r"[\w.,:@&|*()\[\]+-]+")
_ENDPOINT = re.compile(r"(?:ray://)?(?:\[[^\]/]+\]|[^:/\[\]]+):(\d{1,6})(?:/.*)?")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s?")


@dataclass(frozen=True, kw_only=True)
class LocalEngineConfig:
    """Options of ``--on local``, which starts the ranks as processes of this node; there are none."""


@dataclass(frozen=True, kw_only=True)
class SshEngineConfig:
    """Options of ``--on ssh``, which starts the ranks on other nodes over SSH.

    Attributes:
        hosts: ``NAME:PROCESSES`` of each node, as in ``ssh:hosts=host0:2+host1:2``; PROCESSES is the number of ranks.
            The texts are not parsed here.

    Raises:
        UsageError: there are no hosts.
    """

    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UsageError("--on ssh names no hosts", remedy="write ssh:hosts=host0:2+host1:2")


@dataclass(frozen=True, kw_only=True)
class RayEngineConfig:
    """Options of ``--on ray``, which starts the ranks on a Ray cluster.

    Attributes:
        address: address of a running cluster, or ``local`` for a new one on this node; default: ``RAY_ADDRESS``, else
            Ray's own choice, the cluster of this node or a new one.
        cpus: CPUs that Ray reserves for each rank.
        gpus: GPUs that Ray reserves for each rank; with 0, a rank sees no GPU.
        code: ``upload``: Ray copies the working directory to every node; ``shared``: it is at the same path there.

    Raises:
        UsageError: ``cpus`` or ``gpus`` is below 0, both are 0, or ``gpus`` is above 1 and not whole; or ``address``
            has no port from 1 to 65535.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    code: Literal["upload", "shared"] = "upload"

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.gpus < 0 or self.cpus + self.gpus == 0:
            raise UsageError("--on ray reserves nothing for a device", remedy="give cpus or gpus above 0")
        if self.gpus > 1 and self.gpus % 1:
            raise UsageError(f"--on ray has gpus={self.gpus:g}", remedy="give a whole number, or one below 1")
        if self.address is not None and self.address not in ("local", "auto"):
            # Of other schemes, Ray or its plugins know the form.
            found = _ENDPOINT.fullmatch(self.address)
            if not (1 <= int(found[1]) < 1 << 16 if found else "://" in self.address.removeprefix("ray://")):
                raise UsageError(
                    f"--on ray has address={self.address}",
                    remedy="write ray:address=HOST:6379, ray:address=ray://HOST:10001 or ray:address=local",
                )


@dataclass(frozen=True, kw_only=True)
class SlurmEngineConfig:
    """Options of ``--on slurm``, which submits a Slurm job; inside an allocation it starts job steps of the allocation.

    Attributes:
        nodes: number of nodes of the job.
        time: time limit, such as ``4h``, ``90m``, ``2d`` or Slurm's own ``1-12:00:00``; default: the partition's.
        partition: ``--partition`` of ``sbatch``; default: Slurm's own, as for the next four.
        account: ``--account`` of ``sbatch``.
        qos: ``--qos`` of ``sbatch``, the quality of service.
        constraint: ``--constraint`` of ``sbatch``, features that nodes must have.
        memory: ``--mem`` of ``sbatch``, the memory of a node.
        cpus: CPUs for each device; default: Slurm's.
        gpus: GPUs for each device; default: none are requested.
        notice: seconds before the time limit at which Slurm signals the run (SIGUSR1) to save; 0 for no signal.
        requeue: whether Slurm starts the job again after exit code 75 and after the loss of a node.

    Raises:
        UsageError: ``nodes`` or ``cpus`` is below 1, ``gpus`` or ``notice`` below 0, ``time`` is malformed or no longer
            than ``notice``, one of the texts from ``partition`` to ``constraint`` is not a single word, or ``memory``
            is no size such as ``64G``.
    """

    nodes: int = 1
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    memory: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    notice: int = 120
    requeue: bool = True

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("cpus", 1), ("gpus", 0), ("notice", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UsageError(f"--on slurm has {name}={value}", remedy=f"give at least {least}")
        for name in ("partition", "account", "qos", "constraint"):
            if (value := getattr(self, name)) is not None and not _WORD.fullmatch(value):
                raise UsageError(f"--on slurm has {name}={value}", remedy="give one word, without blanks and quotes")
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise UsageError(f"--on slurm has memory={self.memory}", remedy="give a size such as 64G, of a node")
        if self.limit is not None and _slurm_seconds(self.limit) <= self.notice:
            raise UsageError(
                f"--on slurm has time={self.time}, and asks the run to save {self.notice} s before this limit",
                why="each start of the job would be asked at once, and save nothing",
                remedy="give more time or a shorter notice",
            )

    @property
    def limit(self) -> str | None:
        """The time limit of the Slurm job as ``sbatch --time`` takes it, such as ``01:30:00``; None without a limit.

        Of the option ``time``, ``90m``, ``4h`` and ``2d`` become hours, minutes and seconds; Slurm's own forms with a
        colon, such as ``30:00`` (minutes and seconds) and ``1-12:00:00``, stay as they are. Raises UsageError for any
        other text.

        >>> SlurmEngineConfig(time="90m").limit, SlurmEngineConfig(time="2d").limit
        ('01:30:00', '48:00:00')
        """
        if self.time is None or _SLURM_TIME.fullmatch(self.time):
            return self.time
        match = _LIMIT.fullmatch(self.time)
        if match is None:
            raise UsageError(f"--on slurm has time={self.time}", remedy="write 4h, 90m, 2d or 1-12:00:00")
        minutes = int(match[1]) * {"m": 1, "h": 60, "d": 24 * 60}[match[2]]
        return f"{minutes // 60:02}:{minutes % 60:02}:00"


def _slurm_seconds(limit: str) -> int:
    """Return the seconds of ``minutes:seconds``, ``hours:minutes:seconds``, or ``days-hours:minutes`` with or without
    seconds.
    """
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


EngineConfig = LocalEngineConfig | SshEngineConfig | RayEngineConfig | SlurmEngineConfig
ENGINES: dict[str, type[EngineConfig]] = {
    "local": LocalEngineConfig,
    "ssh": SshEngineConfig,
    "ray": RayEngineConfig,
    "slurm": SlurmEngineConfig,
}


def parse_engine(text: str) -> EngineConfig:
    """Parse ``--on``, the engine that starts a run's ranks: ``name:key=value,…``.

    Args:
        text: ``local`` (processes of this node), ``ssh``, ``ray`` or ``slurm``, with or without options.

    Returns:
        The engine's options, an instance of a class for each engine, such as ``RayEngineConfig``.

    Raises:
        UsageError: the text is malformed, a name or key is unknown (naming the nearest), a key is repeated, a value has
            the wrong type, or as the engine's class raises it.

    >>> parse_engine("ray:address=10.0.0.1:6379,cpus=2").cpus
    2.0
    """
    spec = Spec.parse(text, "--on")
    return spec.build(spec.choose(ENGINES, "engine"), "--on")


def parse_device_range(text: str, option: str = "--devices") -> tuple[int, int] | None:
    """Parse ``--devices``: return the least and the most devices of ``LEAST:MOST``; None for a text without a colon.

    Args:
        text: value of the option. A text without a colon is a plain number or ``auto``, and is not checked here.
        option: name of the option, which a UsageError states.

    Raises:
        UsageError: a text with a colon is not two whole numbers, the first at least 1 and the second no smaller.

    >>> parse_device_range("2:8"), parse_device_range("4")
    ((2, 8), None)
    """
    if ":" not in text:
        return None
    match = _RANGE.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"{option} is '{text}'", remedy="write LEAST:MOST, such as 2:8")
    return int(match[1]), int(match[2])


def check_devices(text: str, option: str) -> None:
    """Raise UsageError unless the devices of a run are a whole number of at least 1, a range ``2:8``, or ``auto``.

    Args:
        text: value of the option.
        option: name of the option, which the error states.
    """
    if text != "auto" and parse_device_range(text, option) is None and not (text.isdecimal() and int(text) >= 1):
        raise UsageError(
            f"{option} is '{text}'", remedy="give a whole number of at least 1, a range such as 2:8, or auto"
        )


def parse_seconds(text: str, option: str) -> float:
    """Parse a time, ``60s`` or ``60``, and return its seconds; a fraction such as ``0.5s`` is possible.

    Args:
        text: the number, with or without ``s``.
        option: name of the option, which a UsageError states.

    Raises:
        UsageError: the text has another form.

    >>> parse_seconds("60s", "--wait")
    60.0
    """
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} is '{text}'", remedy="write seconds, at least 0, such as 60s")
    return float(match[1])
