"""What faults came to: one by one, and for the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Verdict = Literal["equal bits", "different", "not compared"]


@dataclass
class Outcome:
    """What one fault came to.

    Attributes:
        fault: in words.
        kind: of the fault.
        step: the last step on record when it was done.
        noticed_seconds: until the run said so or had ended its other processes; None where it went on as if nothing
            had been.
        stood_still_seconds: longest time without a step, up to the first step after the fault was over.
        restarts: times that the run's own launcher started its ranks anew.
        resumed: whether the run had ended and was continued from outside.
        lost_steps: steps that were made, and then made again.
        most_lost: how many that may be; None where nothing is promised, or it depends on the data.
        exit_code: with which the run ended, where it did.
        notes: what else there is to say.
        broken: promises that were not kept.
    """

    fault: str
    kind: str
    step: int
    noticed_seconds: float | None = None
    stood_still_seconds: float = 0.0
    restarts: int = 0
    resumed: bool = False
    lost_steps: int = 0
    most_lost: int | None = None
    exit_code: int | None = None
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Every promise that was not kept."""
        too_many = self.most_lost is not None and self.lost_steps > self.most_lost
        return [*self.broken, *[f"{self.lost_steps} steps lost, more than {self.most_lost}"] * too_many]


@dataclass(frozen=True)
class Report:
    """What a run came to that met faults.

    Attributes:
        directory: of the run.
        planned: faults that were to be played.
        outcomes: those that were.
        exit_code: with which the run ended; None where it goes on.
        finished: whether it had to end with exit code 0.
        steps: steps of the run.
        executed: steps that were made for them, those made again included.
        seconds: from start to end, without the uninterrupted run.
        weights_sha256: of the run.
        reference_sha256: of the uninterrupted run.
        left: files of unfinished saves that the run left behind.
    """

    directory: str
    planned: int
    outcomes: Sequence[Outcome]
    exit_code: int | None
    finished: bool
    steps: int
    executed: int
    seconds: float
    weights_sha256: str | None = None
    reference_sha256: str | None = None
    left: Sequence[str] = ()

    @property
    def goodput(self) -> float:
        """Useful steps ÷ all steps made."""
        return self.steps / self.executed if self.executed else 1.0

    @property
    def verdict(self) -> Verdict:
        """How the weights compare with the uninterrupted run's."""
        if self.reference_sha256 is None:
            return "not compared"
        return "equal bits" if self.weights_sha256 == self.reference_sha256 else "different"

    def problems(self) -> list[str]:
        """Every promise that was not kept; none is survival."""
        found = [
            f"{outcome.fault} at step {outcome.step}: {text}"
            for outcome in self.outcomes
            for text in outcome.problems()
        ]
        if len(self.outcomes) < self.planned:
            found.append(f"the run was over after {len(self.outcomes)} of {self.planned} faults")
        if self.finished and self.exit_code:
            found.append(f"the run ended with exit code {self.exit_code}")
        if self.verdict == "different":
            found.append("the weights are not those of the uninterrupted run")
        return [*found, *(f"{name} was left" for name in self.left)]

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        outcomes = [{**dataclasses.asdict(outcome), "survived": not outcome.problems()} for outcome in self.outcomes]
        more = {"goodput": self.goodput, "verdict": self.verdict, "survived": not self.problems()}
        return {**dataclasses.asdict(self), "outcomes": outcomes, **more, "problems": self.problems()}


def summarize(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """One row a kind of fault: kind, times, median and longest stand-still, lost steps, restarts, resumes, survived."""
    rows: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(_named(outcome) for outcome in outcomes):
        members = [outcome for outcome in outcomes if _named(outcome) == kind]
        still = [outcome.stood_still_seconds for outcome in members]
        lost = [outcome.lost_steps for outcome in members]
        rows.append(
            (
                kind,
                str(len(members)),
                f"{median(still):.2f} s",
                f"{max(still):.2f} s",
                f"{median(lost):g}",
                str(max(lost)),
                str(sum(outcome.restarts for outcome in members)),
                str(sum(outcome.resumed for outcome in members)),
                str(sum(not outcome.problems() for outcome in members)),
            )
        )
    return rows


def _named(outcome: Outcome) -> str:
    return "kill the launcher" if outcome.fault == "kill the launcher" else outcome.kind
