"""Read finished runs: the samples that they needed to a target, and the seconds of their steps. Loads no torch."""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tutti.config.settings import read_file
from tutti.config.train_config import TrainConfig
from tutti.config.training_target import TrainingTarget, check_metric
from tutti.errors import ExitCode, TargetError, UsageError, counted
from tutti.metrics.goodput import run_goodput
from tutti.metrics.metrics_file import metric_records
from tutti.metrics.records import read_environment, read_summary
from tutti.planning.device_plan import MeasuredTarget
from tutti.planning.other_time import OtherTime, RunOverhead, interval_count

log = logging.getLogger("tutti.plan")
_BLOCKS = 5
_LEAST_STEPS = 10
_SAME = ("data", "model", "augment")
"""Options that all runs must have in common, so that their samples to a target are of one problem."""
TRAINING_OPTIONS = ("optimizer", "schedule", "lr_scale", "clip", "ema", "gradient_noise")
"""Options on which the samples to a target depend, besides those of the problem, the batch and the precision."""


@dataclass(frozen=True)
class RunEvidence:
    """Configuration, target and step times of a finished training run, from which further runs are planned.

    Attributes:
        path: run directory.
        task: name of the run's task.
        config: configuration of the run.
        target: entry ``target`` of the run's ``summary.json``; None without ``--until``.
        step_seconds: mean seconds of a step of a whole global batch, after the first fifth of the steps; None where
            fewer than ten steps are left, or their recorded seconds or samples do not advance.
        step_spread: standard error of the natural logarithm of ``step_seconds``; 0 where that is None.
        host: ``NAME cpu`` or ``NAME accelerator``, by the name of the host in ``env.json``; empty without that file.
        held_out: names of the held-out values that the run reported.
        overhead: seconds of start, evaluations and saves; None where the records have no times.
        epoch_samples: training samples of an epoch; None where the run has recorded no whole epoch.
    """

    path: Path
    task: str
    config: TrainConfig
    target: Mapping[str, Any] | None
    step_seconds: float | None
    step_spread: float
    host: str
    held_out: tuple[str, ...]
    overhead: RunOverhead | None = None
    epoch_samples: float | None = None

    @property
    def devices(self) -> int:
        """Number of devices on which the finished run was trained, from its option ``devices``."""
        return int(self.config.devices)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Find run directories of ``tutti train`` (they hold a ``config.toml``), without repetition.

    Args:
        paths: each a run directory, or a folder whose direct subfolders are searched for run directories.

    Returns:
        The run directories, in the order of ``paths`` and within a folder sorted by name.

    Raises:
        UsageError: a path is no run directory, and none of its subfolders is one.
    """
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / "config.toml").is_file() else sorted(c.parent for c in path.glob("*/config.toml"))
        if not inside:
            raise UsageError(
                "there is no run", where=str(path), remedy="give run directories of tutti train, or a folder of them"
            )
        found += [each for each in inside if each not in found]
    return found


def read_evidence(path: Path) -> RunEvidence:
    """Read configuration, target and step times from one run directory of ``tutti train``.

    Without a readable ``summary.json``, as before the end of a run, the target is None and a warning is logged.

    Args:
        path: the run directory. ``config.toml`` and ``metrics.jsonl`` are needed; ``summary.json`` gives the target,
            and ``env.json`` the host.

    Returns:
        A ``RunEvidence``: ``path`` as given; ``task`` and ``config``; ``target``, the object ``target`` of the summary
        (None without ``--until``; a missed target if the run diverged); ``step_seconds``, the mean seconds of a step
        after the first fifth of the steps, scaled to a whole global batch (None where fewer than ten steps are left, or
        where seconds or samples do not advance within one of five equal blocks of them); ``step_spread``, the standard
        error of the natural logarithm of ``step_seconds`` (0 without it); ``host``, name of the host and ``cpu`` or
        ``accelerator`` (empty where ``env.json`` is missing or invalid); ``held_out``, names of the values that
        evaluations have recorded; ``overhead``, the seconds of start, evaluations and saves; and ``epoch_samples``, the
        training samples of an epoch.

    Raises:
        UsageError: ``config.toml`` or ``metrics.jsonl`` is missing or cannot be read, the configuration has an invalid
            value, or its number of devices is no whole number, such as ``auto``.
    """
    values = dict(read_file(path / "config.toml"))
    task = str(values.pop("task", ""))
    config = TrainConfig(**values)
    records = metric_records(path)
    steps, held_out = _records(records)
    seconds, spread = _step_seconds(steps, config.batch_size)
    summary = read_summary(path)
    if not summary:
        log.warning("%s: the run has not ended, or its summary.json cannot be read: it says nothing of a target", path)
    target = summary.get("target")
    if summary.get("exit_code") == ExitCode.NON_FINITE and config.until is not None:
        target = _missed(TrainingTarget.parse(config.until, f"until of {path}"))
    if not config.devices.isdecimal():
        raise UsageError("the run does not say on how many devices it was", where=str(path), remedy="leave it out")
    epoch = _epoch_samples(records, target)
    overhead = _overhead(path, config, records, epoch)
    return RunEvidence(path, task, config, target, seconds, spread, _host(path), held_out, overhead, epoch)


def _missed(wanted: TrainingTarget) -> dict[str, Any]:
    """Return the entry ``target`` of a run that diverged, whose summary has none: it has never reached the target."""
    better = "higher" if wanted.metric.higher else "lower"
    known = {"metric": wanted.metric.name, "better": better, "value": wanted.value, "reached": False}
    return {**known, "samples": None, "samples_before": None, "epochs": None}


def _epoch_samples(records: Sequence[Mapping[str, Any]], target: Mapping[str, Any] | None) -> float | None:
    """Return the samples of the first epoch, if a step of a later one is recorded or the target is behind it."""
    train = [record for record in records if record.get("group") == "train" and "epoch" in record]
    if any(record["epoch"] > 1 for record in train):
        return float(max((record["samples"] for record in train if record["epoch"] == 1), default=0)) or None
    if target is not None and target.get("reached") and target.get("epochs"):
        return float(target["samples"] / target["epochs"])
    return None


def _overhead(
    path: Path, config: TrainConfig, records: Sequence[Mapping[str, Any]], epoch: float | None
) -> RunOverhead | None:
    """Return the seconds of start, evaluations and saves of a run; None where its records have no times or no end."""
    ended = read_summary(path).get("ended")
    timed = [record for record in records if record.get("group") in ("train", "eval") and "time" in record]
    try:
        lost = run_goodput(path).lost
    except UsageError:
        return None
    if not timed or not isinstance(ended, int | float):
        return None
    devices = int(config.devices)
    end = max(ended - timed[-1]["time"], 0.0)
    samples = max((record["samples"] for record in timed if record["group"] == "train"), default=0)
    evaluations = sum(record["group"] == "eval" for record in timed)
    saves = (interval_count(config.checkpoint_interval, samples, config.batch_size, epoch) or 1) - 1
    return RunOverhead(
        devices,
        config.strategy_choice.data_ranks(devices),
        lost.get("start", 0.0),
        lost.get("evaluation", 0.0) / evaluations if evaluations else None,
        max(lost.get("save", 0.0) - end, 0.0) / saves if saves else None,
        end,
    )


def other_time(runs: Sequence[RunEvidence], config: TrainConfig) -> OtherTime:
    """Return a predictor of a planned run's seconds for start, evaluations and saves, from those of finished runs.

    Args:
        runs: finished runs on the planned machine.
        config: options of the planned run, of which the intervals of evaluations and checkpoints are read.

    Returns:
        An ``OtherTime``; without measured seconds its predictions are empty.
    """
    measured = tuple(run.overhead for run in runs if run.overhead is not None)
    epoch = next((run.epoch_samples for run in runs if run.epoch_samples is not None), None)
    return OtherTime(measured, config.eval_interval, config.checkpoint_interval, epoch)


def _records(records: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[int, float, float]], tuple[str, ...]]:
    """Return (step, samples, seconds) of the records of training, and names of held-out values."""
    found: list[tuple[int, float, float]] = []
    names: dict[str, None] = {}
    for record in records:
        if record.get("group") == "train":
            found.append((int(record["step"]), float(record["samples"]), float(record["seconds"])))
        elif record.get("group") == "eval":
            names |= dict.fromkeys(n for n, v in record.items() if isinstance(v, int | float))
    for name in ("step", "epoch", "samples", "seconds", "time"):
        names.pop(name, None)
    return found, tuple(names)


def _step_seconds(steps: Sequence[tuple[int, float, float]], batch: int) -> tuple[float | None, float]:
    """Return the mean seconds of a step behind the first fifth of them, and the standard error of its logarithm.

    It is seconds a sample × batch, because the last batch of an epoch may be smaller. The error comes from five blocks.
    """
    kept = steps[max(1, len(steps) // 5) :]
    if len(kept) < _LEAST_STEPS:
        return None, 0.0
    size = (len(kept) - 1) // _BLOCKS
    marks = [kept[number * size] for number in range(_BLOCKS)] + [kept[-1]]
    rates = []
    for (_, before, start), (_, after, end) in pairwise(marks):
        if after <= before or end <= start:
            return None, 0.0
        rates.append(math.log((end - start) / (after - before)))
    (_, before, start), (_, after, end) = kept[0], kept[-1]
    return (end - start) / (after - before) * batch, statistics.stdev(rates) / math.sqrt(_BLOCKS)


def _host(path: Path) -> str:
    env = read_environment(path)
    if not env:
        return ""
    return f"{env.get('host', '')} {'accelerator' if env.get('devices') else 'cpu'}"


def usable_runs(found: Sequence[RunEvidence], task: str) -> tuple[list[RunEvidence], list[str]]:
    """Select the finished runs that can serve to plan training of a task, and check that model and data are equal.

    Runs with ``--batch-growth``, ``--lr-scale adascale`` or ``--regime-batch`` are left out, because their batch size
    or learning rate changes with the run.

    Args:
        found: the runs; all kept runs must have the options ``data``, ``model`` and ``augment`` of the first kept one.
        task: name of the task.

    Returns:
        A pair of lists: the kept runs, and lines in words on runs that were left out, and on options of
        ``TRAINING_OPTIONS`` and ``precision`` in which kept runs differ.

    Raises:
        UsageError: a run is of another task, or its option ``data``, ``model`` or ``augment`` differs from that of the
            first kept run.
    """
    notes: list[str] = []
    kept: list[RunEvidence] = []
    for run in found:
        if run.task != task:
            raise UsageError(
                f"the run trains '{run.task}', and not '{task}'", where=str(run.path), remedy="leave it out"
            )
        if run.config.growth is not None or run.config.lr_rule.adaptive or run.config.regime_batch is not None:
            notes.append(f"left out {run.path}: its batch or its learning rate changes with the run")
            continue
        for name in _SAME:
            if kept and getattr(run.config, name) != getattr(kept[0].config, name):
                raise UsageError(
                    f"two runs differ in '{name}'",
                    where=f"{kept[0].path}, {run.path}",
                    why="their samples to the target are of two problems",
                    remedy="plan from runs of one model and data",
                )
        kept.append(run)
    for name in (*TRAINING_OPTIONS, "precision"):
        values = sorted({str(getattr(run.config, name)) for run in kept})
        if len(values) > 1:
            notes.append(f"the runs differ in {name}: {', '.join(values)}")
    return kept, notes


def target_interval(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Return the number of training samples after which a run reached its target, as an interval.

    A run evaluates at intervals, and so reached the target somewhere between two evaluations. ``tutti plan`` and
    ``tutti noise`` take the middle of the interval as the samples to the target.

    Args:
        entry: the object ``target`` of the run's ``summary.json``.

    Returns:
        A pair of Python floats: samples at the last evaluation that missed the target (0 if there was none), and at the
        evaluation that met it. Both are infinite if the run did not reach the target.
    """
    if entry.get("samples") is None:
        return math.inf, math.inf
    return float(entry.get("samples_before") or 0), float(entry["samples"])


def interval_spread(interval: tuple[float, float]) -> float:
    """Return the standard deviation of the natural logarithm of a number of which only an interval is known.

    The number is taken as uniformly distributed over the interval; the result is width ÷ (√12 · middle), to first
    order.

    Args:
        interval: low end, at least 0, and high end, above 0.

    >>> round(interval_spread((900.0, 1100.0)), 4)
    0.0577
    """
    low, high = interval
    return (high - low) / (math.sqrt(12) * (low + high) / 2)


def measured_targets(
    runs: Sequence[RunEvidence], target: TrainingTarget | None, task: str
) -> tuple[TrainingTarget, list[MeasuredTarget], list[str]]:
    """Return the samples that runs needed to a target metric, as the median for each batch size.

    A run that missed the target counts as infinitely many samples; a batch whose median run missed it is left out.

    Args:
        runs: runs of one task, model and data, with synchronous strategies.
        target: metric, direction and level to reach; None: the target that all runs with ``--until`` were trained to.
        task: name of the task, for the ``tutti train`` command that the errors propose.

    Returns:
        Three values. The target. A list by rising batch size, whose elements have ``batch`` (samples of a global
        batch), ``samples`` (training samples until the target was reached, the middle of ``target_interval``, in the
        median of the runs; the higher of two middle ones), ``runs`` (number of runs) and ``spread`` (standard deviation
        of ln ``samples`` within ``target_interval``). A list of texts on runs that missed the target, batches left out,
        and long intervals between evaluations.

    Raises:
        UsageError: ``target`` is None, and no run was trained to a target or the runs have different targets; the runs
            report held-out values, and the metric is none of them; or no run was trained to the given ``target``.
        TargetError: at no batch size the median run reached the target.
    """
    trained = {(str(r.target["metric"]), float(r.target["value"])): r for r in runs if r.target is not None}
    train = f"tutti train {task} --batch-size B --until NAME=VALUE, with two batch sizes at least"
    if target is None:
        if len(trained) != 1:
            shown = ", ".join(f"{name}={value:g}" for name, value in sorted(trained)) or "none"
            raise UsageError(
                f"the targets of the runs are: {shown}", remedy=f"give --target; runs have one after {train}"
            )
        ((name, value), run), *_ = trained.items()
        better = "" if run.target is None else run.target["better"]
        target = TrainingTarget.parse(f"{name}{'>=' if better == 'higher' else '<='}{value:.17g}", "--runs")
    wanted = (target.metric.name, target.value)
    reported = sorted({name for run in runs for name in run.held_out})
    if reported and target.metric.name not in reported:
        check_metric(target.metric.name, "--target", reported, averaged=False)
    if wanted not in trained:
        shown = ", ".join(f"{name}={value:g}" for name, value in sorted(trained)) or "none"
        raise UsageError(f"no run was trained to {target}", why=f"targets of the runs: {shown}", remedy=f"run {train}")
    by_batch: dict[int, list[tuple[float, float]]] = defaultdict(list)
    notes = []
    for run in runs:
        entry = run.target
        if entry is None or (entry["metric"], entry["value"]) != wanted:
            continue
        before, seen = interval = target_interval(entry)
        by_batch[run.config.batch_size].append(interval)
        if math.isinf(seen):
            notes.append(f"{run.path} did not reach {target}: it counts as infinitely many samples")
        elif seen > 1.1 * max(before, 1):
            notes.append(f"{run.path} reached it between {before:,.0f} and {seen:,.0f} samples: evaluate more often")
    found = []
    for batch, intervals in sorted(by_batch.items()):
        interval = sorted(intervals, key=statistics.fmean)[len(intervals) // 2]
        if math.isinf(interval[1]):
            missed = sum(math.isinf(seen) for _, seen in intervals)
            notes.append(f"batch {batch} is left out: {missed} of {counted(len(intervals), 'run')} missed it")
        else:
            middle = statistics.fmean(interval)
            found.append(MeasuredTarget(batch, middle, len(intervals), interval_spread(interval)))
    if not found:
        raise TargetError(
            f"no run has reached {target}",
            why="; ".join(notes),
            remedy="train longer, with another learning rate, or plan for a target that was reached",
        )
    return target, found, notes
