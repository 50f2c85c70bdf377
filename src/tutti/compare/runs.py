"""Train the runs of a ladder, each in a directory named by its configuration; finished runs are reused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tutti.compare.ladder import Ladder
from tutti.compare.verdict import RungResult, RunOutcome
from tutti.config.metric_direction import Direction
from tutti.config.train_config import TrainConfig
from tutti.config.variables import without_settings
from tutti.errors import FINISHED, ExitCode, Preempted, TuttiError, UsageError
from tutti.metrics.metrics_file import METRICS, metric_records
from tutti.metrics.records import config_sha256, config_toml, read_summary

POLL = 0.25
"""Seconds between two looks at the runs under way."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Trial:
    """One run of a comparison: a rung (training configuration) with one seed.

    Attributes:
        rung: name of the rung.
        seed: seed of the run.
        config: configuration of the run, with this seed.
        directory: run directory.
    """

    rung: str
    seed: int
    config: TrainConfig
    directory: Path


@dataclass(frozen=True)
class Progress:
    """Newest training and evaluation records of a run under way.

    Attributes:
        step: newest line of group ``train`` in ``metrics.jsonl``; empty if there is none yet.
        evaluated: newest line of group ``eval``; empty if there is none yet.
    """

    step: dict[str, Any]
    evaluated: dict[str, Any]


def trials(ladder: Ladder, task: str, seeds: int, pool: Path) -> list[Trial]:
    """Return all runs of a ladder, each rung with each seed, ordered by seed; nothing is started.

    By this order an unfinished ladder has results of every rung. A directory is named by the hash of the options that
    decide the run's result: ladders with an equal rung share its runs.

    Args:
        ladder: the ladder, a series of training configurations (rungs).
        task: name of the task.
        seeds: number of seeds of each rung: the seed of its configuration and the numbers after it.
        pool: folder of the run directories.

    Returns:
        One trial (rung, seed, configuration and run directory) for each run.
    """
    found = []
    for seed in range(seeds):
        for rung in ladder.rungs:
            config = dataclasses.replace(rung.config, seed=rung.config.seed + seed)
            name = f"{Path(task.partition(':')[0]).stem}-{config_sha256(config)[:12]}"
            found.append(Trial(rung.name, config.seed, config, pool / name))
    return found


def finished(trial: Trial) -> bool:
    """Return whether the run directory of a trial (one training configuration with one seed) holds a finished run.

    True if the exit code in its ``summary.json`` says that the run ended as planned, with or without reaching the
    target of ``--until``. False for a run that failed, is under way or was not started.

    Args:
        trial: the run, of which the directory is read.
    """
    return read_summary(trial.directory).get("exit_code") in FINISHED


def run_trial(trial: Trial, task: str, watch: Callable[[Progress], None]) -> None:
    """Train one run in a process of its own, and block until it ends; resume it from its last checkpoint if it has one.

    To be called in the main thread: until the run ends, this process passes SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 on to
    the run's process, whose output goes to ``NAME.log`` beside the run directory ``NAME``. A run directory without a
    checkpoint is overwritten. An exception of ``watch`` kills the run and propagates.

    Args:
        trial: the run, one rung (configuration) with one seed.
        task: name of a built-in task, or path and function of the user's task.
        watch: called every 0.25 s, while the run is trained, with a ``Progress``: ``step`` and ``evaluated``, the
            newest records of a training step and of an evaluation, as dicts.

    Raises:
        Preempted: a signal asked to stop, and the run has ended; the same command resumes it.
        TuttiError: the run failed; the error has its exit code and the last lines of its log.
        OSError: the log or the run's configuration cannot be written.
    """
    log = trial.directory.with_name(f"{trial.directory.name}.log")
    words = [sys.executable, "-m", "tutti", "train"]
    if (trial.directory / "checkpoints").is_dir() and (trial.directory / "config.toml").is_file():
        words += ["--resume", str(trial.directory)]
    else:
        given = log.with_name(f"{trial.directory.name}.toml")
        given.parent.mkdir(parents=True, exist_ok=True)
        config = dataclasses.replace(trial.config, out=str(trial.directory), overwrite=True)
        given.write_text(config_toml(config, task), encoding="utf-8")
        words += ["--config", str(given)]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # TUTTI_* options are already in the configuration, and must not override the change of a rung.
            env=without_settings(os.environ),
        )
        with _passing_signals_on(process) as stopped:
            while process.poll() is None:
                watch(trial_progress(trial))
                time.sleep(POLL)
    if stopped:
        raise Preempted("the comparison was asked to stop", where=trial.rung, remedy="the same command continues it")
    if process.returncode not in FINISHED:
        raise _failed(trial, process.returncode, log)


@contextmanager
def _passing_signals_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward signals to the run, which saves and ends; yield the list of received signal numbers."""
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _SIGNALS}
    try:
        yield came
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(trial: Trial, code: int, log: Path) -> TuttiError:
    last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-3:]
    error = TuttiError(
        f"the run of '{trial.rung}' with seed {trial.seed} failed with exit code {code}",
        where=str(log),
        why=" / ".join(last),
        remedy="fix the cause and run the same command again: finished runs are kept",
    )
    error.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.UNEXPECTED
    return error


def trial_progress(trial: Trial) -> Progress:
    """Read the newest training and evaluation records of a run under way, from the end of its ``metrics.jsonl``.

    Reads the last 8 KiB. Incomplete lines are skipped; a missing file gives no records.

    Args:
        trial: the run, one training configuration with one seed.

    Returns:
        A ``Progress``: ``step``, the newest record of a training step, and ``evaluated``, that of an evaluation; each a
        dictionary of the record's entries, empty if it is not found there.
    """
    step: dict[str, Any] = {}
    evaluated: dict[str, Any] = {}
    try:
        with (trial.directory / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("group") == "train":
            step = record
        elif record.get("group") == "eval":
            evaluated = record
    return Progress(step, evaluated)


def outcome(trial: Trial, metric: str) -> RunOutcome:
    """Read the results of a finished run from its ``summary.json`` and ``metrics.jsonl``.

    Args:
        trial: the run, of which ``finished`` is True.
        metric: name of the held-out metric to compare.

    Returns:
        A ``RunOutcome``: ``held_out`` and ``training`` value of the metric (NaN if not finite), ``updates``,
        ``samples``, ``seconds``, ``samples_per_second``, ``curve`` (epoch and held-out value of each evaluation),
        ``weights_sha256``, and for the target of ``--until`` ``reached``, ``steps_to_target``, ``samples_to_target``
        and ``seconds_to_target`` (None without a target).

    Raises:
        UsageError: the task does not report the metric.
    """
    summary = read_summary(trial.directory)
    held_out = summary.get("eval") or {}
    if metric not in held_out:
        raise UsageError(
            f"the task reports no held-out '{metric}'",
            where=str(trial.directory),
            remedy=f"give --metric: {', '.join(held_out) or 'it has no held-out samples'}",
        )
    curve = []
    for record in metric_records(trial.directory):
        if record.get("group") == "eval":
            curve.append((float(record["epoch"]), _number(record[metric])))
    target = summary.get("target") or {}
    return RunOutcome(
        seed=trial.seed,
        held_out=_number(held_out[metric]),
        training=_number((summary.get("train") or {}).get(metric)),
        updates=int(summary["updates"]),
        samples=int(summary["samples"]),
        seconds=float(summary["seconds"]),
        samples_per_second=float(summary["samples_per_second"]),
        curve=tuple(curve),
        weights_sha256=str(summary.get("weights_sha256", "")),
        reached=target.get("reached"),
        steps_to_target=target.get("steps"),
        samples_to_target=target.get("samples"),
        seconds_to_target=target.get("seconds"),
    )


def directions(all_trials: list[Trial]) -> dict[str, Direction] | None:
    """Return for each metric whether lower or higher values are better, as the summary of a finished run states it.

    Args:
        all_trials: runs of one task; the first finished one is read.

    Returns:
        ``lower`` or ``higher`` by name of the metric; None if no run has finished.
    """
    found = next((trial for trial in all_trials if finished(trial)), None)
    return None if found is None else read_summary(found.directory).get("directions", {})


def _number(value: object) -> float:
    """Return ``value`` as a float; NaN for null, which stands for non-finite values in JSON."""
    return float(value) if isinstance(value, int | float) else math.nan


def rows(ladder: Ladder, all_trials: list[Trial], metric: str) -> dict[str, RungResult]:
    """Read the finished runs of a ladder, and collect their results for each training configuration (rung).

    Args:
        ladder: the ladder, a series of rungs.
        all_trials: the ladder's runs, of ``trials``.
        metric: name of the held-out metric.

    Returns:
        A dict from the name of each rung with at least one finished run to a ``RungResult``, the results over the
        seeds: mean, spread and target, and for each seed held-out and training metric, updates, samples and seconds
        (``outcomes``).

    Raises:
        UsageError: the task does not report ``metric``.
    """
    found = {}
    for rung in ladder.rungs:
        done = tuple(outcome(t, metric) for t in all_trials if t.rung == rung.name and finished(t))
        if done:
            found[rung.name] = RungResult(rung.name, rung.cause, rung.parent, done)
    return found
