"""End a run at an evaluation that reaches the target of ``--until`` or exhausts ``--patience``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tutti.checkpoint.manifest import REMEDY
from tutti.config.metric_direction import Metric
from tutti.config.training_target import TrainingTarget, check_metric
from tutti.errors import CheckpointError
from tutti.metrics.metrics_file import from_json_number, to_json_number
from tutti.train.best_value import BestValue

Ending = Literal["target", "patience", "length"]


@dataclass(frozen=True)
class EvaluatedAt:
    """The position of a run at an evaluation.

    Attributes:
        step: global step.
        updates: number of updates of the parameters so far.
        samples: samples consumed.
        epochs: epochs of training.
        seconds: seconds of training since the first start of the run, without evaluations and saves.
        wall_seconds: seconds elapsed since the first start, with evaluations, saves and pauses; None if the start is
            unknown.
        value: value of the watched metric.
    """

    step: int
    updates: int
    samples: int
    epochs: float
    seconds: float
    wall_seconds: float | None
    value: float


class TargetWatch:
    """Decides after each evaluation whether a run ends: at its target (``--until``) or by ``--patience``.

    Args:
        metric: the metric that is watched.
        target: value of the metric at which the run ends; None for no target.
        patience: number of evaluations in a row without a better value that end the run; None for no such limit.

    Attributes:
        ending: ``target`` or ``patience`` once an evaluation has ended the run; None before.
    """

    def __init__(self, metric: Metric, target: TrainingTarget | None, patience: int | None) -> None:
        self.metric, self.target, self.patience = metric, target, patience
        self.ending: Literal["target", "patience"] | None = None
        self._best: EvaluatedAt | None = None
        self._reached: EvaluatedAt | None = None
        self._last: EvaluatedAt | None = None
        self._before: int | None = None
        self._values = BestValue(metric)
        self._count = 0

    @property
    def option(self) -> str:
        """Option that names the watched metric, for messages: ``--until`` if there is a target, else ``--patience``."""
        return "--until" if self.target is not None else "--patience"

    def check(self, reported: Sequence[str], averaged: bool) -> None:
        """Check that the run's evaluations report the metric that is watched for ``--until`` or ``--patience``.

        Args:
            reported: names of the values that the loss function reports, with ``loss``.
            averaged: whether the run keeps an average of its weights, and so reports ``raw_`` values as well.

        Raises:
            UsageError: no value has the metric's name; the error suggests the nearest name.
        """
        check_metric(self.metric.name, self.option, reported, averaged)

    def evaluated(self, at: EvaluatedAt) -> None:
        """Compare the watched metric at an evaluation with its target and its best so far, and decide if the run ends.

        Not collective: every rank must pass the same values, so that all end alike. Sets ``ending`` to ``target`` once
        the target has been reached, or to ``patience`` after that many evaluations in a row without a better value.

        Args:
            at: position of the run at the evaluation, such as ``step`` and ``samples``, and ``value``, the metric's.
        """
        previous, self._last = self._last, at
        self._count += 1
        if self._values.add(at.value):
            self._best = at
        if self._reached is None and self.target is not None and self.target.reached(at.value):
            self._reached = at
            self._before = 0 if previous is None else previous.samples
        self._end()

    def _end(self) -> None:
        if self._reached is not None:
            self.ending = "target"
        elif self.patience is not None and self._values.exhausted(self.patience):
            self.ending = "patience"

    def state(self) -> dict[str, Any]:
        """Return the state of target and early stopping as a JSON value for a checkpoint; ``load`` restores it.

        Returns:
            A dict with ``metric`` (a dict: its name and direction), ``value`` (the target, or None), ``best``,
            ``reached`` and ``last`` (each the fields of an ``EvaluatedAt``, such as ``step`` and ``value``, as a dict,
            or None), ``evaluations`` and ``stale`` (numbers of all evaluations, and of those since the best), and
            ``samples_before`` (samples at the evaluation before the one that reached the target; 0 if that was the
            first, None if the target was not reached).
        """
        return {
            "metric": asdict(self.metric),
            "value": None if self.target is None else self.target.value,
            "best": _plain(self._best),
            "reached": _plain(self._reached),
            "last": _plain(self._last),
            "samples_before": self._before,
            "stale": self._values.stale,
            "evaluations": self._count,
        }

    def load(self, saved: Mapping[str, Any]) -> bool:
        """Restore the state of the watch for target and early stopping from a checkpoint, if saved for the same metric.

        A target of another value is judged by the evaluations from now on; the best value and the evaluations without a
        better one are kept.

        Args:
            saved: the result of ``state``.

        Returns:
            True if the state is of this run's metric and was loaded; False if nothing was loaded.

        Raises:
            CheckpointError: the state is malformed.
        """
        try:
            if saved["metric"] != asdict(self.metric):
                return False
            self._best, self._last = _read(saved["best"]), _read(saved["last"])
            best = None if self._best is None else self._best.value
            self._values = BestValue(self.metric, best, int(saved["stale"]))
            self._count = int(saved["evaluations"])
            if self.target is not None and saved["value"] == self.target.value:
                self._reached, self._before = _read(saved["reached"]), saved["samples_before"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("the checkpoint's 'target' is invalid", why=repr(error), remedy=REMEDY) from error
        self._end()
        return True

    def summary(self) -> dict[str, Any]:
        """Return the entries of ``summary.json`` on the target (``--until``) and early stopping (``--patience``).

        Returns:
            A dict with the key ``target`` if the run has a target and ``early_stopping`` if it has a patience. The
            value of each is a dict with ``metric``, ``better`` (``lower`` or ``higher``), ``best``, ``best_step``,
            ``evaluations`` (number) and ``ended_by`` (``target``, ``patience`` or ``length``). ``target`` also has
            ``value``, ``reached`` (bool), and the position at which it was reached, each entry None if it was not:
            ``steps`` (of training), ``updates`` (of the parameters, fewer where steps were left out), ``samples``,
            ``samples_before`` (at the evaluation before), ``epochs``, ``seconds`` (of training alone) and
            ``wall_seconds`` (since the first start, with evaluations, saves and pauses). ``early_stopping`` also has
            ``patience`` and ``without_better`` (evaluations since the best).
        """
        best, at = self._best, self._reached
        common = {
            "metric": self.metric.name,
            "better": self.metric.direction,
            "best": None if best is None else best.value,
            "best_step": None if best is None else best.step,
            "evaluations": self._count,
            "ended_by": self.ending or "length",
        }
        found: dict[str, Any] = {}
        if self.target is not None:
            found["target"] = {
                **common,
                "value": self.target.value,
                "reached": at is not None,
                "steps": None if at is None else at.step,
                "updates": None if at is None else at.updates,
                "samples": None if at is None else at.samples,
                "samples_before": self._before,
                "epochs": None if at is None else at.epochs,
                "seconds": None if at is None else at.seconds,
                "wall_seconds": None if at is None else at.wall_seconds,
            }
        if self.patience is not None:
            found["early_stopping"] = {**common, "patience": self.patience, "without_better": self._values.stale}
        return found


def wall_seconds(started: float | None) -> float | None:
    """Return the seconds of wall time since a run started, until now; None if its start is unknown.

    Args:
        started: Unix time of the start in seconds; None if unknown.
    """
    return None if started is None else time.time() - started


def _plain(at: EvaluatedAt | None) -> dict[str, Any] | None:
    if at is None:
        return None
    return {**asdict(at), "value": to_json_number(at.value)}


def _read(saved: Mapping[str, Any] | None) -> EvaluatedAt | None:
    if saved is None:
        return None
    return EvaluatedAt(**{**saved, "value": from_json_number(saved["value"])})
