"""The runs of a ladder: each once, in a directory named by its configuration; finished ones are kept."""

from __future__ import annotations

import dataclasses
import json
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
from tutti.compare.verdict import Outcome, Row
from tutti.errors import ExitCode, Preempted, TuttiError, UsageError
from tutti.training.config import TrainConfig
from tutti.training.records import config_sha256, config_toml, read_summary

POLL = 0.25
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Trial:
    """One rung with one seed."""

    rung: str
    seed: int
    config: TrainConfig
    directory: Path


@dataclass(frozen=True)
class Progress:
    """Where a trial is: its newest training and evaluation lines, empty where there are none yet."""

    step: dict[str, Any]
    evaluated: dict[str, Any]


def trials(ladder: Ladder, task: str, seeds: int, pool: Path) -> list[Trial]:
    """All runs of a ladder, first seeds first, so that an unfinished ladder has every rung once.

    A directory's name is the hash of what decides the run's result: ladders that share a rung share its run.
    """
    found = []
    for seed in range(seeds):
        for rung in ladder.rungs:
            config = dataclasses.replace(rung.config, seed=rung.config.seed + seed)
            name = f"{Path(task.partition(':')[0]).stem}-{config_sha256(config)[:12]}"
            found.append(Trial(rung.name, config.seed, config, pool / name))
    return found


def finished(trial: Trial) -> bool:
    """Whether the run is there, whole."""
    return read_summary(trial.directory).get("exit_code") == ExitCode.DONE


def run(trial: Trial, task: str, watch: Callable[[Progress], None]) -> None:
    """Train one trial in a process of its own, from its last checkpoint where it was broken off.

    Args:
        trial: what to train.
        task: name, or path and function of the user's own.
        watch: called a few times a second.

    Raises:
        Preempted: a signal asked to stop; the run has saved its state.
        TuttiError: the run failed, with its exit code and the last lines of what it said.
    """
    log = trial.directory.with_suffix(".log")
    words = [sys.executable, "-m", "tutti", "train"]
    if (trial.directory / "checkpoints").is_dir() and (trial.directory / "config.toml").is_file():
        words += ["--resume", str(trial.directory)]
    else:
        given = trial.directory.with_suffix(".toml")
        given.parent.mkdir(parents=True, exist_ok=True)
        config = dataclasses.replace(trial.config, out=str(trial.directory), overwrite=True)
        given.write_text(config_toml(config, task), encoding="utf-8")
        words += ["--config", str(given)]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        with _passing_signals_on(process) as stopped:
            while process.poll() is None:
                watch(progress(trial))
                time.sleep(POLL)
    if stopped:
        raise Preempted("the comparison was asked to stop", where=trial.rung, remedy="the same command goes on with it")
    if process.returncode != 0:
        raise _failed(trial, process.returncode, log)


@contextmanager
def _passing_signals_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Signals go to the run, which saves and ends; the numbers of those that came."""
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
        remedy="mend it and give the same command again: finished runs are kept",
    )
    error.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.UNEXPECTED
    return error


def progress(trial: Trial) -> Progress:
    """The newest lines of a trial's metrics. Reads the file's last 8 KiB."""
    step: dict[str, Any] = {}
    evaluated: dict[str, Any] = {}
    try:
        with (trial.directory / "metrics.jsonl").open("rb") as file:
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


def outcome(trial: Trial, metric: str) -> Outcome:
    """The figures of a finished trial. Raises UsageError where the task does not report ``metric``."""
    summary = read_summary(trial.directory)
    held_out = summary.get("eval") or {}
    if metric not in held_out:
        raise UsageError(
            f"the task reports no held-out '{metric}'",
            where=str(trial.directory),
            remedy=f"give --metric: {', '.join(held_out) or 'it has no held-out samples'}",
        )
    curve = []
    for line in (trial.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("group") == "eval":
            curve.append((float(record["epoch"]), float(record[metric])))
    return Outcome(
        seed=trial.seed,
        held_out=float(held_out[metric]),
        training=float((summary.get("train") or {}).get(metric, float("nan"))),
        updates=int(summary["updates"]),
        samples=int(summary["samples"]),
        seconds=float(summary["seconds"]),
        samples_per_second=float(summary["samples_per_second"]),
        curve=tuple(curve),
        weights_sha256=str(summary.get("weights_sha256", "")),
    )


def rows(ladder: Ladder, all_trials: list[Trial], metric: str) -> dict[str, Row]:
    """The rungs that have finished runs, with them."""
    found = {}
    for rung in ladder.rungs:
        done = tuple(outcome(t, metric) for t in all_trials if t.rung == rung.name and finished(t))
        if done:
            found[rung.name] = Row(rung.name, rung.cause, rung.parent, done)
    return found
