"""What a training run tells the outside: the terminal, the run directory, a user's own object. Only rank 0 speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tutti.types import StepRecord


@dataclass(frozen=True)
class Header:
    """What is known before the first step.

    Attributes:
        title: one line: task, strategy, optimizer.
        derived: the batch contract and all other derived numbers, in the order to print them.
        total_steps: steps in the whole run; None where only the end of a stream will tell.
        steps_per_epoch: steps in one epoch; None as above, and where the batch grows.
    """

    title: str
    derived: Mapping[str, str]
    total_steps: int | None
    steps_per_epoch: int | None


@dataclass(frozen=True)
class Pace:
    """How fast it goes: samples per second over the last steps, seconds since the start, seconds still to go."""

    samples_per_second: float
    elapsed: float
    remaining: float


@dataclass(frozen=True)
class EvalRecord:
    """An evaluation: means over every held-out sample, each counted once.

    Attributes:
        step, epoch: after which step, and in which epoch from 1.
        loss, metrics: of the model, or of the weights' average where one is kept.
        samples: how many there are.
        raw: the same values of the weights in training, where the others are of their average.
        seconds: of training until then; None: those of the last step.
    """

    step: int
    epoch: int
    loss: float
    metrics: Mapping[str, float]
    samples: int
    raw: Mapping[str, float] | None = None
    seconds: float | None = field(default=None, compare=False)

    @property
    def values(self) -> dict[str, float]:
        """All of them by the names that a checkpoint and ``metrics.jsonl`` keep them under."""
        raw = {f"raw_{name}": value for name, value in (self.raw or {}).items()}
        return {"loss": self.loss, **self.metrics, **raw}


class Listener(Protocol):
    """Called on rank 0 only, in the order of the methods; ``close`` comes last, after errors too."""

    def started(self, header: Header) -> None: ...

    def stepped(self, record: StepRecord, pace: Pace) -> None: ...

    def evaluated(self, record: EvalRecord) -> None: ...

    def warned(self, text: str) -> None: ...

    def finished(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Listeners:
    """Several listeners as one."""

    def __init__(self, members: Sequence[Listener]) -> None:
        self.members = members

    def started(self, header: Header) -> None:
        for member in self.members:
            member.started(header)

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        for member in self.members:
            member.stepped(record, pace)

    def evaluated(self, record: EvalRecord) -> None:
        for member in self.members:
            member.evaluated(record)

    def warned(self, text: str) -> None:
        for member in self.members:
            member.warned(text)

    def finished(self, summary: Mapping[str, Any]) -> None:
        for member in self.members:
            member.finished(summary)

    def close(self) -> None:
        for member in self.members:
            member.close()
