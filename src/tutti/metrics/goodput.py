"""Goodput of a run: productive ÷ elapsed time, and the lost time by cause, from its ``metrics.jsonl``. No torch."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import UsageError
from tutti.metrics.metrics_file import metric_records
from tutti.metrics.records import ENVIRONMENT, read_json, read_summary
from tutti.metrics.timeline import segments_of_chrome, shares

CAUSES: Mapping[str, str] = {
    "start": "from the command to the first step, and what that step takes longer than others",
    "data": "training waited for a batch",
    "evaluation": "evaluations",
    "save": "training waited for checkpoints, traces and the end of the run",
    "failure": "steps that were computed twice, and the time until the run was started again",
    "stopped": "between a stop without lost steps and the next start",
    "restart": "from the next start to its first step, and what that step takes longer than others",
    "skipped steps": "steps without an update, because a gradient was not finite",
    "slow steps": "what steps took longer than the median, of steps over 1.5 times the median",
    "straggler": "devices waited for the slowest one, in the share of time that a trace of some steps shows",
    "bubble": "pipeline stages waited for micro-batches, in the share of time that follows from the schedule",
}
"""Causes of lost time, each with its definition."""

SLOW = 1.5
"""A step is slow if it takes more than this multiple of the median of the steps with as many samples."""

FEWEST = 5
"""Fewest steps with equal numbers of samples of which the median is taken."""


@dataclass(frozen=True)
class Goodput:
    """Division of a run's time into productive steps and lost time; ``productive`` and ``lost`` add up to ``elapsed``.

    Attributes:
        elapsed: seconds from the run's command to its end, or to its last record.
        productive: seconds of steps whose work was kept, without waiting for data, without the excess of slow steps,
            and without the idle time of devices (mean over devices), as far as it is known.
        lost: seconds by cause: ``start``, ``data`` (waits for batches), ``evaluation``, ``save``, ``failure`` (repeated
            steps), ``stopped``, ``restart``, ``skipped steps`` (a gradient was not finite), ``slow steps``,
            ``straggler`` (devices waited for the slowest) and ``bubble`` (of a pipeline's schedule); only causes that
            were measured.
        steps: number of steps whose work was kept; steps that are repeated after a resume count once, skipped ones not.
        attempts: number of starts of the run.
        notes: sentences on gaps in the records.
    """

    elapsed: float
    productive: float
    lost: Mapping[str, float]
    steps: int
    attempts: int
    notes: tuple[str, ...] = ()

    @property
    def fraction(self) -> float:
        """Goodput of the run, 0 to 1: productive seconds divided by elapsed seconds; 0 for an elapsed time of 0.

        Productive are the seconds of steps whose work was kept: no restart has repeated them, and the update was not
        skipped for a gradient that is not finite. Subtracted are waits for data, the excess over the median of steps
        longer than 1.5 times the median, and the idle time of devices (mean over devices) as far as it was measured.
        Elapsed are the seconds from the launch of the run to its end, restarts included.
        """
        return self.productive / self.elapsed if self.elapsed > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of ``tutti goodput --json``.

        Keys: ``goodput`` (0 to 1), ``elapsed_seconds``, ``productive_seconds``, ``lost_seconds`` (by cause, such as
        ``data``), ``steps`` (whose work was kept), ``attempts`` (starts of the run) and ``notes`` (sentences on gaps in
        the records).
        """
        return {
            "goodput": self.fraction,
            "elapsed_seconds": self.elapsed,
            "productive_seconds": self.productive,
            "lost_seconds": dict(self.lost),
            "steps": self.steps,
            "attempts": self.attempts,
            "notes": list(self.notes),
        }


@dataclass
class _Step:
    seconds: float
    data: float
    samples: int
    first_of: str | None
    bubble: float
    skipped: bool


@dataclass
class _Account:
    """Sums while the records are read, in their order.

    Attributes:
        launched: Unix time at which the present attempt was started.
        spent: seconds of training before it.
        before: the previous record with a time, of this attempt or of the one before; None before the first.
        fresh: the cause of the time until the next step, if it is the first of an attempt.
    """

    launched: float
    lost: dict[str, float]
    spent: float = 0.0
    before: Mapping[str, Any] | None = None
    fresh: str | None = "start"
    samples: int = 0
    steps: list[_Step] = field(default_factory=list)
    attempts: int = 1

    def resume(self, line: Mapping[str, Any]) -> None:
        kept_time, kept_seconds = self._last()
        again, launched = line["seconds"] - kept_seconds, line.get("launched")
        self.spent, self.attempts, self.fresh = line["seconds"], self.attempts + 1, "restart"
        if launched is None or launched <= kept_time + again:
            # The launcher has restarted the ranks: it was there all the time.
            self.lost["failure"] += again
            self.launched = kept_time + again
        else:
            self.lost["failure" if line["lost"] else "stopped"] += launched - kept_time
            self.launched = launched
        self.before = None

    def train(self, line: Mapping[str, Any]) -> None:
        first = self.fresh
        if first is not None:
            seconds = line["seconds"] - self.spent
            self.lost[first] += line["time"] - seconds - self.launched
        else:
            kept_time, kept_seconds = self._last()
            seconds = line["seconds"] - kept_seconds
            self.lost["save"] += line["time"] - kept_time - seconds
        self.steps.append(
            _Step(
                seconds=seconds,
                data=line.get("data_seconds", 0.0),
                samples=line["samples"] - self.samples,
                first_of=first,
                bubble=line.get("bubble", 0.0),
                skipped=line.get("skipped", False),
            )
        )
        self.before, self.samples, self.fresh = line, line["samples"], None

    def evaluate(self, line: Mapping[str, Any]) -> None:
        if self.fresh is not None:
            return
        kept_time, kept_seconds = self._last()
        waited = max(line["seconds"] - kept_seconds, 0.0)
        self.lost["evaluation"] += line["time"] - kept_time - waited
        self.before = {**line, "seconds": kept_seconds + waited}

    def _last(self) -> tuple[float, float]:
        return (self.launched, self.spent) if self.before is None else (self.before["time"], self.before["seconds"])


def measured_goodput(
    lines: Iterable[Mapping[str, Any]], launched: float, ended: float | None, idle: float | None = None
) -> Goodput:
    """Divide the time of a run into productive steps and lost time by cause, all in seconds.

    Args:
        lines: the records of ``metrics.jsonl``, in order.
        launched: Unix time at which the run was first started.
        ended: Unix time at which the run ended; the time of the last step or evaluation in ``lines`` is taken instead
            where this is None or earlier.
        idle: fraction of the time in which devices waited for the slowest one, mean over devices, in traced steps;
            None if no step was traced.

    Returns:
        A ``Goodput``: ``elapsed`` and ``productive`` seconds, ``lost`` (seconds by cause, as far as measured),
        ``steps`` (number of steps whose work was kept), ``attempts`` (number of starts) and ``notes`` (sentences on
        gaps in the records). The causes:

        - ``start``: from the launch to the first step, and the excess of this step over the median step.
        - ``data``: waits for batches.
        - ``evaluation``: evaluations on held-out samples.
        - ``save``: waits for checkpoints and traces, and the time after the last record.
        - ``failure``: steps that a failure has undone, and the time from the failure to the next start.
        - ``stopped``: from a stop that undid no step to the next start.
        - ``restart``: from a later start to its first step, and the excess of this step over the median step.
        - ``skipped steps``: steps whose update was skipped because a gradient was not finite, as far as they have no
          other cause above.
        - ``slow steps``: the excess over the median of steps longer than 1.5 times the median.
        - ``bubble``: the idle fraction of the pipeline's schedule (``bubble`` in the records, for equal stages and
          backwards that take twice a forward), times the seconds of steps that have no cause above.
        - ``straggler``: the part of ``idle`` that exceeds the bubble, times the same seconds.

        The median is taken over at least five steps of equally many samples; with fewer, no step exceeds it.

    Raises:
        UsageError: no step is recorded, or the records have no times.
    """
    account = _Account(launched, defaultdict(float))
    last, told = launched, False
    for line in lines:
        group = line.get("group")
        if "time" not in line:
            raise UsageError("the records have no times", remedy="goodput needs a run of this version of tutti")
        if group == "resume":
            account.resume(line)
        elif group == "train":
            account.train(line)
            told = told or "data_seconds" in line
        elif group == "eval":
            account.evaluate(line)
        if group in ("train", "eval"):
            last = line["time"]
    if not account.steps:
        raise UsageError("the run has recorded no step", remedy="goodput needs a run with steps")
    end = max(last, ended or last)
    account.lost["save"] += end - last
    return _close(account, end - launched, told, idle)


def _close(account: _Account, elapsed: float, told: bool, idle: float | None) -> Goodput:
    """Attribute the time of the steps themselves, and return the whole account.

    Args:
        account: the sums.
        elapsed: seconds of the run.
        told: whether the records say how long training waited for data.
        idle: as for ``measured_goodput``.
    """
    lost, steps = account.lost, account.steps
    alike = defaultdict(list)
    for step in steps:
        if step.first_of is None:
            alike[step.samples].append(step.seconds - step.data)
    medians = {samples: statistics.median(values) for samples, values in alike.items() if len(values) >= FEWEST}
    for step in steps:
        lost["data"] += step.data
        worked = step.seconds - step.data
        typical = medians.get(step.samples, worked)
        if step.first_of is not None:
            lost[step.first_of] += max(worked - typical, 0.0)
            worked = min(worked, typical)
        elif worked > SLOW * typical:
            lost["slow steps"] += worked - typical
            worked = typical
        if step.skipped:
            lost["skipped steps"] += worked
            continue
        if step.bubble:
            lost["bubble"] += step.bubble * worked
        if idle is not None:
            lost["straggler"] += max(idle - step.bubble, 0.0) * worked
    if idle is None:
        notes = ["stragglers that are slow in every step are within the productive time: train with --trace"]
    else:
        notes = [
            f"straggler: devices idled {idle:.1%} of the traced steps; what exceeds the bubble is taken for all steps"
        ]
    if "bubble" in lost:
        notes.append("bubble: computed for equal stages and backwards that take twice a forward, not measured")
    if not told:
        lost.pop("data", None)
        notes.append("this run has not recorded how long it waited for data")
    # Times are rounded to a microsecond, so that a sum of nothing may be a little less.
    found = {cause: max(lost[cause], 0.0) for cause in CAUSES if cause in lost}
    kept = sum(not step.skipped for step in steps)
    return Goodput(elapsed, elapsed - sum(found.values()), found, kept, account.attempts, tuple(notes))


def run_goodput(path: Path) -> Goodput:
    """Read a run directory, and divide the run's time into productive steps and lost time by cause.

    Args:
        path: directory of a run, with ``env.json`` and ``metrics.jsonl``.

    Returns:
        A ``Goodput``: ``elapsed`` and ``productive`` seconds, ``lost`` (seconds by cause, as far as measured),
        ``steps`` (number of steps whose work was kept), ``attempts`` (number of starts) and ``notes`` (sentences on
        gaps in the records). Causes are ``start`` (until the first step), ``data`` (waits for batches),
        ``evaluation``, ``save``, ``failure`` (steps undone by it, and the time until the next start), ``stopped``
        (from a stop that undid no step to the next start), ``restart`` (from a later start to its first step),
        ``skipped steps`` (a gradient was not finite), ``slow steps`` (their excess over the median), ``straggler``
        (devices waited for the slowest one, by ``trace/trace.json``) and ``bubble`` (of a pipeline's schedule).

    Raises:
        UsageError: ``env.json`` or ``metrics.jsonl`` is missing or unreadable, ``env.json`` is no JSON object or lacks
            the run's start, or the records have no step or no times.
    """
    try:
        environment = read_json(path / ENVIRONMENT)
    except (OSError, ValueError) as error:
        why = f"it has no {ENVIRONMENT}" if isinstance(error, FileNotFoundError) else str(error)
        raise UsageError("there is no run", where=str(path), why=why, remedy="give a run directory") from error
    launched = environment.get("launched") or environment.get("started")
    if not isinstance(launched, int | float):
        raise UsageError(
            "the run's start is unknown", where=str(path / ENVIRONMENT), remedy="it was made by an older version"
        )
    return measured_goodput(metric_records(path), launched, read_summary(path).get("ended"), _traced_idle(path))


def _traced_idle(path: Path) -> float | None:
    """Return the fraction of traced time in which devices waited for others, their mean; None without a trace."""
    try:
        rows = segments_of_chrome(read_json(path / "trace" / "trace.json"))
    except (OSError, ValueError):
        return None
    return statistics.fmean(each.get("idle", 0.0) for each in shares(list(rows.values()))) if rows else None
