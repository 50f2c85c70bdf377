"""Events that a training run reports to listeners (terminal, run directory, a user's own object), on rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from tutti.types.step_records import StepRecord


@dataclass(frozen=True)
class RunHeader:
    """Title, settings and length of a run, known before the first step.

    Attributes:
        title: one line: task, strategy, optimizer.
        derived: settings that follow from the options, such as the samples of a logical worker's batch: name → text, in
            the order to print them.
        total_steps: steps in the whole run; None if unknown until a stream ends.
        steps_per_epoch: steps in one epoch; None if unknown until a stream ends, or if the batch grows.
    """

    title: str
    derived: Mapping[str, str]
    total_steps: int | None
    steps_per_epoch: int | None


@dataclass(frozen=True)
class Clock:
    """Start time of a run, and the training time that it has spent before this process resumed it.

    Attributes:
        started: Unix time of the run's first start; None if unknown.
        spent: seconds of training before this process; 0 for a new run.
    """

    started: float | None
    spent: float = 0.0

    @classmethod
    def saved(cls, facts: Mapping[str, Any]) -> Clock:
        """Return the clock of a run to resume, read from the facts that its checkpoint stores.

        The facts ``started`` (Unix time) and ``seconds`` of training so far are read; checkpoints of older versions
        lack them, which gives None and 0.

        Args:
            facts: facts of the checkpoint, by name.

        >>> Clock.saved({"started": 1.7e9, "seconds": 60}), Clock.saved({})
        (Clock(started=1700000000.0, spent=60.0), Clock(started=None, spent=0.0))
        """
        started, spent = (facts.get(name) for name in ("started", "seconds"))
        return cls(
            float(started) if isinstance(started, int | float) else None,
            float(spent) if isinstance(spent, int | float) and 0 <= spent < float("inf") else 0.0,
        )


@dataclass(frozen=True)
class Pace:
    """Speed, elapsed and remaining time of a run after one step.

    Attributes:
        samples_per_second: throughput of all devices together over the last 30 steps.
        elapsed: seconds of training since the run's first start, over all resumes, without evaluations and saves.
        remaining: estimated seconds of training to go, at the present rate; infinite while the end is unknown.
        device: figures of one device by name, such as ``throughput/device/mfu``.
        data: seconds for which the last step waited for its batch, on rank 0; None if not measured.
    """

    samples_per_second: float
    elapsed: float
    remaining: float
    device: Mapping[str, float] = field(default_factory=dict)
    data: float | None = None


@dataclass(frozen=True)
class EvalRecord:
    """Results of an evaluation: means over every held-out sample, each counted once.

    Attributes:
        step, epoch: the step after which the evaluation ran, and its epoch, from 1.
        loss, metrics: loss and metrics of the model, or of its EMA if the run keeps one.
        samples: number of held-out samples.
        raw: loss and metrics of the weights in training, if ``loss`` and ``metrics`` are of the EMA; else None.
        seconds: seconds of training until the evaluation; None to take the seconds until the last reported step.
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
        """Results of the evaluation by name: ``loss``, each metric and, with an EMA of the weights, raw values.

        Raw values, such as ``raw_loss``, are of the weights in training; ``loss`` and the metrics are then those of the
        EMA.
        """
        raw = {f"raw_{name}": value for name, value in (self.raw or {}).items()}
        return {"loss": self.loss, **self.metrics, **raw}


class Listener(Protocol):
    """Receiver of a run's events (protocol), such as steps and evaluations, on rank 0 only.

    A run calls ``started`` first and ``close`` last, after errors too.
    """

    def started(self, header: RunHeader) -> None:
        """Receive title, settings and number of steps of a run; called once on rank 0, before the first step.

        Args:
            header: title in one line, settings that follow from the options, and steps of the run, None if unknown.
        """

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        """Receive the record of one optimizer step and the run's speed; called on rank 0 after every step.

        Args:
            record: numbers of the step: its number, loss, metrics, learning rate and so on.
            pace: samples a second, and elapsed and remaining seconds of the run.
        """

    def evaluated(self, record: EvalRecord) -> None:
        """Receive the results of one evaluation on held-out samples; called on rank 0 after every evaluation.

        Args:
            record: loss and metrics as means over all held-out samples, and the step after which they were computed.
        """

    def warned(self, text: str) -> None:
        """Receive the text of a warning of the run; called on rank 0 at any time before ``close``."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Receive the results of a run; called once on rank 0, after the last step, and not if an error ends the run.

        Args:
            summary: results by name, the content of ``summary.json``.
        """

    def close(self) -> None:
        """Release files and the terminal that this listener uses; called once on rank 0, last, after errors too."""


class EarlyWarnings:
    """Receiver of warnings, called with the text of each: keeps them until ``pass_to`` names a function to forward to.

    A rank's entry point (``train.main``) makes one for the time before the run has its listeners. From ``pass_to`` on,
    each call forwards its text at once.
    """

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._warned: Callable[[str], None] = self._kept.append

    def __call__(self, text: str) -> None:
        """Forward a warning's text to the run's listener; before there is one, keep the text until ``pass_to``."""
        self._warned(text)

    def pass_to(self, warned: Callable[[str], None]) -> None:
        """Pass all warnings that this object has collected, in order, and from now on every later one, to ``warned``.

        To be called once: a second call passes the collected warnings again.

        Args:
            warned: function that is called with the text of one warning.
        """
        self._warned = warned
        for text in self._kept:
            warned(text)


class Listeners:
    """Listener of a run's events (header, steps, evaluations, warnings) that passes each on to several listeners.

    An error of one listener is raised at once, and the later ones do not get the event; ``close`` closes all.

    Args:
        members: the listeners, called in this order.
    """

    def __init__(self, members: Sequence[Listener]) -> None:
        self.members = members

    def started(self, header: RunHeader) -> None:
        """Pass title, settings and number of steps of the run on to every listener, before the first step.

        Args:
            header: title, settings and number of steps of the run.
        """
        for member in self.members:
            member.started(header)

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        """Pass the record of one optimizer step on to every listener.

        Args:
            record: loss, metrics and position of the step.
            pace: speed, elapsed and remaining time of the run.
        """
        for member in self.members:
            member.stepped(record, pace)

    def evaluated(self, record: EvalRecord) -> None:
        """Pass the result of one evaluation on to every listener.

        Args:
            record: held-out loss and metrics, and the step after which they were evaluated.
        """
        for member in self.members:
            member.evaluated(record)

    def warned(self, text: str) -> None:
        """Pass the text of a warning of the run on to every listener, in order."""
        for member in self.members:
            member.warned(text)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Pass the results of the run, the content of ``summary.json``, on to every listener."""
        for member in self.members:
            member.finished(summary)

    def close(self) -> None:
        """Close every listener of the run's events, in order; an error of one is raised after all are closed."""
        with ExitStack() as later:
            for member in reversed(self.members):
                later.callback(member.close)
