"""Record the outcome of each fault and of the whole run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from tutti.errors import counted

Verdict = Literal["equal bits", "different", "not compared"]


@dataclass
class FaultOutcome:
    """Outcome of one fault that was injected into a training run.

    Attributes:
        fault: the fault in words, such as ``kill rank 1``.
        kind: kind of the fault.
        step: the last step on record when the fault was injected.
        noticed_seconds: seconds until the run warned of the fault or had ended its other processes; None if it did
            neither.
        stood_still_seconds: longest time without a step, up to the first step after the fault was over.
        restarts: number of times that the run's own launcher restarted its ranks.
        resumed: whether the run's launcher ended too, and the run was started again with ``tutti train --resume``.
        lost_steps: number of steps that were repeated.
        most_lost: largest permitted ``lost_steps``; None if nothing is promised, or the promise depends on the data.
        exit_code: exit code of the run if the fault ended it.
        notes: further remarks for the report.
        broken: promises of tutti (such as the exit code) that the run broke, in words.
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
        """Return one sentence for each promise of tutti that the run broke under this injected fault.

        The sentences are the entries of ``broken`` (wrong exit code and the like, in words), and one more if
        ``lost_steps``, the number of training steps that were repeated, exceeds ``most_lost``, the largest permitted
        number (None: no limit).

        Returns:
            The sentences; an empty list means that the run survived the fault.
        """
        too_many = self.most_lost is not None and self.lost_steps > self.most_lost
        return [*self.broken, *[f"{counted(self.lost_steps, 'step')} lost, more than {self.most_lost}"] * too_many]


@dataclass(frozen=True)
class Report:
    """Outcome of a training run into which faults were injected.

    Attributes:
        directory: run directory.
        planned: number of faults planned.
        outcomes: outcomes of the faults that were injected, in order.
        exit_code: exit code of the run; None while it goes on.
        finished: whether the run had to end with exit code 0.
        steps: the last training step that the run has made.
        executed: number of steps executed, repeated steps included.
        seconds: seconds from start to end, without the uninterrupted run.
        weights_sha256: hash of the run's weights; None if unknown.
        reference_sha256: hash of the weights of a run without faults; None: not compared.
        left: names of files of unfinished saves that the run left behind.
    """

    directory: str
    planned: int
    outcomes: Sequence[FaultOutcome]
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
        """Fraction of useful steps of the run with faults, in (0, 1]; 1 if no step was executed.

        The fraction is steps of the run ÷ steps executed, repeated ones included.
        """
        return self.steps / self.executed if self.executed else 1.0

    @property
    def verdict(self) -> Verdict:
        """Result of comparing the final weights' SHA-256 hash with the uninterrupted run's, in words.

        ``equal bits``; ``different``, also where the hash of the run with faults is unknown; or ``not compared`` where
        there is no uninterrupted run, or the hash of its weights is unknown.
        """
        if self.reference_sha256 is None:
            return "not compared"
        return "equal bits" if self.weights_sha256 == self.reference_sha256 else "different"

    def problems(self) -> list[str]:
        """Return one sentence for each promise of tutti that a run with injected faults broke.

        Returns:
            The sentences; an empty list means that the run survived. There is one for each promise that was broken
            under a single fault (``FaultOutcome.problems``); one if any fault could not be injected because the run was
            over; one for a non-zero exit code, if ``finished``; one if ``verdict`` is ``different`` (the final weights
            are not those of the run without faults); and one for each file of an unfinished save that was left behind.
        """
        found = [
            f"{outcome.fault} at step {outcome.step}: {text}"
            for outcome in self.outcomes
            for text in outcome.problems()
        ]
        if len(self.outcomes) < self.planned:
            found.append(f"the run was over after {len(self.outcomes)} of {counted(self.planned, 'fault')}")
        if self.finished and self.exit_code:
            found.append(f"the run ended with exit code {self.exit_code}")
        if self.verdict == "different":
            found.append("the weights are not those of the uninterrupted run")
        return [*found, *(f"{name} was left" for name in self.left)]

    def as_json(self) -> dict[str, Any]:
        """Return the report on a run with injected faults as a dict that ``json.dumps`` accepts.

        Returns:
            The attributes of this class by their names, and ``goodput`` (fraction of executed steps that were useful),
            ``verdict`` (``equal bits``, ``different`` or ``not compared``: final weights beside those of the run
            without faults), ``survived`` (bool: no promise was broken) and ``problems`` (list of sentences).
            ``outcomes`` is a list of dicts, each with the attributes of `FaultOutcome` and ``survived``.
        """
        outcomes = [{**dataclasses.asdict(outcome), "survived": not outcome.problems()} for outcome in self.outcomes]
        more = {"goodput": self.goodput, "verdict": self.verdict, "survived": not self.problems()}
        return {**dataclasses.asdict(self), "outcomes": outcomes, **more, "problems": self.problems()}


def summarize(outcomes: Sequence[FaultOutcome]) -> list[tuple[str, ...]]:
    """Return a table of the outcomes of faults injected into a run: one row for each kind of fault, no heading row.

    Args:
        outcomes: one outcome for each injected fault.

    Returns:
        Rows of nine texts, in the order in which the kinds of fault first occurred; empty without outcomes. The texts
        are: kind; number of faults; median and longest time without a training step, in seconds, such as ``0.42 s``;
        median and largest number of steps that had to be repeated; number of restarts of the ranks by the run's own
        launcher; number of times that the run ended and was started again with ``--resume``; number of faults under
        which the run broke no promise (``FaultOutcome.problems`` is empty). Killing the launcher is a kind of its own,
        ``kill the launcher``.
    """
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


def _named(outcome: FaultOutcome) -> str:
    return "kill the launcher" if outcome.fault == "kill the launcher" else outcome.kind
