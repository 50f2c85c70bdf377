"""Options of ``--on``, the engine that starts a job's ranks, and of ``--devices`` with a least and a most. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tutti.config.spec import Spec
from tutti.errors import UsageError

_RANGE = re.compile(r"(\d+):(\d+)")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s?")


@dataclass(frozen=True, kw_only=True)
class LocalEngineConfig:
    """``local``: processes of this node."""


@dataclass(frozen=True, kw_only=True)
class SshEngineConfig:
    """``ssh``: processes on the nodes ``hosts``, as in ``ssh:hosts=host0:2+host1:2``."""

    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UsageError("--on ssh names no hosts", remedy="write ssh:hosts=host0:2+host1:2")


@dataclass(frozen=True, kw_only=True)
class RayEngineConfig:
    """``ray``: processes on a Ray cluster.

    Attributes:
        address: of a running cluster, ``local`` for a new one on this node; default: ``RAY_ADDRESS``, else Ray's own
            choice, the cluster of this node or a new one.
        cpus: CPUs that Ray reserves for a device.
        gpus: GPUs that Ray reserves for a device; with 0 ranks see none.
        code: ``upload``: Ray copies the working directory to every node; ``shared``: it is at the same path there.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    code: Literal["upload", "shared"] = "upload"

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.gpus < 0 or self.cpus + self.gpus == 0:
            raise UsageError("--on ray reserves nothing for a device", remedy="give cpus or gpus above 0")


EngineConfig = LocalEngineConfig | SshEngineConfig | RayEngineConfig
ENGINES: dict[str, type[EngineConfig]] = {
    "local": LocalEngineConfig,
    "ssh": SshEngineConfig,
    "ray": RayEngineConfig,
}


def parse_engine(text: str) -> EngineConfig:
    """Parse ``name:key=value`` of ``--on``. Raises UsageError.

    >>> parse_engine("ray:address=10.0.0.1:6379,cpus=2").cpus
    2.0
    """
    spec = Spec.parse(text, "--on")
    return spec.build(spec.choose(ENGINES, "engine"), "--on")


def parse_device_range(text: str) -> tuple[int, int] | None:
    """Return least and most of ``--devices 2:8``; None for a plain number or ``auto``. Raises UsageError.

    >>> parse_device_range("2:8"), parse_device_range("4")
    ((2, 8), None)
    """
    if ":" not in text:
        return None
    match = _RANGE.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--devices is '{text}'", remedy="write LEAST:MOST, such as 2:8")
    return int(match[1]), int(match[2])


def parse_seconds(text: str, option: str) -> float:
    """Parse ``60s`` or ``60``. Raises UsageError.

    >>> parse_seconds("60s", "--wait")
    60.0
    """
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} is '{text}'", remedy="write seconds, such as 60s")
    return float(match[1])
