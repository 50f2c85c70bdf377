"""Everything that ``tutti train`` can be told. The fields are flags, TOML keys and Python arguments alike. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tutti.errors import UsageError
from tutti.spec import Duration


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Attributes:
        data: folder, file or hub name that the task reads.
        model: ``name:key=value``; default: the task's first.
        augment: random crops and flips, where the task has them.
        batch_norm: statistics of a worker's samples, or of few: ``ghost:size=32``.
        strategy: how devices share the work, ``name:key=value``.
        optimizer: ``name:key=value``.
        schedule: learning-rate schedule, ``name:key=value``.
        lr_scale: rule of the rate at this batch: linear, sqrt or adam_sqrt, ``linear:base_batch=256``.
        workers: logical replicas, part of the algorithm; default: devices.
        devices: processes or GPUs P, only speed; ``auto``: every GPU here, or one process.
        batch_size: samples in one *global* batch, over all workers.
        micro_batch: most samples in one forward pass; default: no limit.
        epochs, steps, samples: how long, at most one of the three; default: 3 epochs.
        duration: the same in one word: 3ep, 500st or 20000sa.
        regime_batch: train for as many updates as with this batch; milestones and warm-up too.
        precision: fp32, bf16 (autocast, fp32 weights) or fp64.
        channels_last: memory layout of images; default: on for image tasks.
        clip: largest norm of the whole gradient.
        eval_every: 1ep, 100st …; none for only at the end.
        checkpoint_every: 1ep, 100st …; none for only when told to stop.
        keep: checkpoints to keep, the newest.
        resume: run directory; alone: the newest run that is equal.
        max_restarts: starts anew from the last checkpoint after a failure.
        seed: every random stream is derived from it.
        reproducible: bit-identical weights on any number of devices.
        threads: CPU threads a process; default: cores ÷ local processes.
        device: auto, cpu or cuda.
        max_nonfinite: steps in a row that a NaN or infinity may skip.
        timeout: seconds that ranks wait for each other.
        runs: folder in which run directories are made.
        out: this run's directory; default: ``RUNS/TASK-TIME``.
        overwrite: allow ``out`` to exist and not be empty.
        log_every: steps between lines without a terminal.
    """

    data: str | None = None
    model: str | None = None
    augment: bool = False
    batch_norm: str = "worker"
    strategy: str = "mirrored"
    optimizer: str = "adam:lr=0.001"
    schedule: str = "constant"
    lr_scale: str = "none"
    workers: int | None = None
    devices: str = "auto"
    batch_size: int = 64
    micro_batch: int | None = None
    epochs: float | None = None
    steps: int | None = None
    samples: int | None = None
    duration: str | None = None
    regime_batch: int | None = None
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    channels_last: bool | None = None
    clip: float | None = None
    eval_every: str = "1ep"
    checkpoint_every: str = "1ep"
    keep: int = 2
    resume: str | None = None
    max_restarts: int = 0
    seed: int = 0
    reproducible: bool = False
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_nonfinite: int = 10
    timeout: float = 300.0
    runs: str = "runs"
    out: str | None = None
    overwrite: bool = False
    log_every: int = 50

    def __post_init__(self) -> None:
        for name in (
            "workers",
            "batch_size",
            "micro_batch",
            "steps",
            "samples",
            "regime_batch",
            "threads",
            "max_nonfinite",
            "log_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_flag(name)} is {value}", remedy="give a whole number of at least 1")
        for name in ("epochs", "clip", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{_flag(name)} is {value}", remedy="give a number above 0")
        if self.devices != "auto" and (not self.devices.isdecimal() or int(self.devices) < 1):
            raise UsageError(f"--devices is '{self.devices}'", remedy="give a whole number of at least 1, or auto")
        for name in ("seed", "max_restarts"):
            if getattr(self, name) < 0:
                raise UsageError(f"{_flag(name)} is {getattr(self, name)}", remedy="give a whole number of at least 0")
        if self.reproducible and self.threads not in (None, 1):
            raise UsageError(
                f"--reproducible does not go with --threads {self.threads}",
                why="the order of a sum inside one operation depends on the number of threads",
                remedy="leave out one of the two",
            )
        if self.regime_batch is not None and self.length().unit == "st":
            raise UsageError(
                "--regime-batch changes nothing in a run whose length is in steps",
                remedy="give --epochs or --samples, or leave it out",
            )
        self.length()
        self.every("eval_every")
        self.every("checkpoint_every")

    def length(self) -> Duration:
        """How long to train. Raises UsageError where more than one of the four options is given."""
        given = [name for name in ("epochs", "steps", "samples", "duration") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(map(_flag, given))} exclude each other", remedy="give one of them")
        if self.duration is not None:
            duration = Duration.parse(self.duration, "--duration")
            if duration.value <= 0:
                raise UsageError(f"--duration is {self.duration}", remedy="give more than 0")
            return duration
        if self.steps is not None:
            return Duration(self.steps, "st")
        if self.samples is not None:
            return Duration(self.samples, "sa")
        return Duration(self.epochs if self.epochs is not None else 3.0, "ep")

    def every(self, field: Literal["eval_every", "checkpoint_every"]) -> Duration | None:
        """How often to evaluate or to save; None for ``none``. Raises UsageError."""
        text = getattr(self, field)
        if text == "none":
            return None
        duration = Duration.parse(text, _flag(field))
        if duration.value <= 0:
            raise UsageError(f"{_flag(field)} is 0", remedy="give 1ep, 100st …, or none")
        return duration


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
