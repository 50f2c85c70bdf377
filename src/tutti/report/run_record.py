"""Read a run directory as far as it goes: records, summary, configuration, environment, and what is missing. No torch.

A run that crashed, was killed or is under way leaves some of its files. Each missing or unreadable part becomes a
sentence in ``RunRecord.problems``; only a folder without any file of a run is refused.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tutti.errors import ExitCode, TuttiError, UsageError, counted
from tutti.metrics.goodput import Goodput, run_goodput
from tutti.metrics.metrics_file import METRICS, metric_lines
from tutti.metrics.records import ENVIRONMENT, read_json
from tutti.metrics.timeline import TimelineSegment, segments_of_chrome

FILES = ("config.toml", ENVIRONMENT, METRICS, "summary.json")
"""Files of a run directory, of which at least one, or a failure record, makes a folder a run directory."""

LANDSCAPE = "landscape.json"
"""File that ``tutti landscape`` writes into a run directory."""

MOST_SEGMENTS = 20_000
"""Segments of a timeline above which it is not drawn."""

Point = tuple[float, float]


@dataclass(frozen=True)
class MeasuredStep:
    """A recorded step of a run; the first step after each start of the run is never one.

    Attributes:
        seconds: duration of the step, including the wait for its batch.
        data: seconds for which the step waited for its batch; None if not recorded.
        samples: samples in the global batch of the step.
    """

    seconds: float
    data: float | None
    samples: float


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory of ``tutti train``, as read for a report.

    Attributes:
        path: the run directory.
        name: name of the directory, made printable.
        trained: the lines of ``metrics.jsonl`` that record a training step, in order; each has the key ``first`` too,
            which is true for the first step after a start.
        evaluated: the lines of ``metrics.jsonl`` that record an evaluation, in order.
        resumed: number of resumes.
        warnings: texts of warnings and diagnoses, each once.
        failures: one sentence for each rank that recorded a failure.
        config: content of ``config.toml``; empty if missing.
        environment: content of ``env.json``; empty if missing.
        summary: content of ``summary.json``; empty if missing.
        timeline: segments of the trace of each device, in order; empty if no trace was recorded, or if it has more than
            ``MOST_SEGMENTS``.
        goodput: the run's time, divided into productive and lost time; None if its records do not give it.
        landscape: content of ``landscape.json``, of ``tutti landscape``; empty without one.
        problems: a sentence for each file or value that is missing or unreadable.
        lines: number of readable lines in ``metrics.jsonl``.
    """

    path: Path
    name: str
    trained: Sequence[Mapping[str, Any]] = ()
    evaluated: Sequence[Mapping[str, Any]] = ()
    resumed: int = 0
    warnings: Sequence[str] = ()
    failures: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    timeline: Sequence[Sequence[TimelineSegment]] = ()
    goodput: Goodput | None = None
    landscape: Mapping[str, Any] = field(default_factory=dict)
    problems: Sequence[str] = ()
    lines: int = 0

    @property
    def task(self) -> str:
        """Name of the task that the run trains; ``unknown task`` if no file of the run directory states it."""
        found = self.summary.get("task", self.config.get("task"))
        return found if isinstance(found, str) and found else "unknown task"

    @property
    def devices(self) -> int | None:
        """Number of devices of the run; None if no file of the run directory states it."""
        found = finite(self.summary.get("devices"))
        if found is None:
            text = self.config.get("devices")
            found = float(text) if isinstance(text, str) and text.isdecimal() else finite(text)
        return int(found) if found is not None and found >= 1 else None

    @property
    def exit_code(self) -> int | None:
        """Exit code that the run has recorded at its end; None if it is under way, or was killed."""
        found = finite(self.summary.get("exit_code"))
        return None if found is None else int(found)

    @property
    def state(self) -> str:
        """How the run ended, in words: ``finished``, ``no end recorded``, or its exit code and the code's meaning.

        >>> RunRecord(Path("r"), "r").state, RunRecord(Path("r"), "r", summary={"exit_code": 5}).state
        ('no end recorded', 'exit code 5: peer')
        """
        if self.exit_code is None:
            return "no end recorded"
        if self.exit_code == ExitCode.DONE:
            return "finished"
        try:
            meaning = ExitCode(self.exit_code).name.lower().replace("_", " ")
        except ValueError:
            meaning = "unknown"
        return f"exit code {self.exit_code}: {'threshold not met' if meaning == 'threshold' else meaning}"

    @cached_property
    def steps(self) -> list[MeasuredStep]:
        """The recorded steps of the run, without the first step after each start, whose duration includes warming up.

        Each has ``seconds`` (difference of the training seconds recorded at this step and at the step before), ``data``
        (seconds for which it waited for its batch; None if not recorded) and ``samples`` of its global batch. Steps
        without the necessary values are left out. Computed once, when it is first read.
        """
        found = []
        for before, line in zip(self.trained, self.trained[1:], strict=False):
            now, then = finite(line.get("seconds")), finite(before.get("seconds"))
            samples, fewer = finite(line.get("samples")), finite(before.get("samples"))
            if line.get("first") or None in (now, then, samples, fewer):
                continue
            seconds, count = float(now or 0) - float(then or 0), float(samples or 0) - float(fewer or 0)
            if seconds > 0 and count > 0:
                found.append(MeasuredStep(seconds, finite(line.get("data_seconds")), count))
        return found

    @property
    def step_seconds(self) -> float | None:
        """Median duration in seconds of the run's steps, without the first step after each start; None if unknown."""
        return statistics.median(step.seconds for step in self.steps) if self.steps else None

    @property
    def data_seconds(self) -> float | None:
        """Median time in seconds that a step of the run waited for its global batch; None if it is not recorded."""
        waits = [step.data for step in self.steps if step.data is not None]
        return statistics.median(waits) if waits else None

    @property
    def rate(self) -> float | None:
        """Throughput of the run, in samples a second of all devices together; None if unknown.

        The median over the recorded steps, without the first step after each start; for a run without such steps the
        mean that ``summary.json`` states.
        """
        if self.steps:
            return statistics.median(step.samples / step.seconds for step in self.steps)
        return finite(self.summary.get("samples_per_second"))

    @property
    def peak_memory(self) -> float | None:
        """Peak memory in bytes of the rank that took most; None if it is not recorded.

        Of tensors on an accelerator; on a CPU of the whole process (resident set).
        """
        found = [device if device is not None else resident for _, resident, device in self.peaks]
        return max((each for each in found if each is not None), default=None)

    @property
    def peaks(self) -> list[tuple[int, float | None, float | None]]:
        """Peak memory of each rank: (rank, bytes of the process's resident set, bytes of tensors on its accelerator).

        A number that is not recorded, such as the bytes of tensors on a CPU, is None. The list is empty for a run that
        has recorded no end.
        """
        rows = self.summary.get("peak_memory")
        found = []
        for row in rows if isinstance(rows, list) else ():
            rank = finite(row.get("rank")) if isinstance(row, Mapping) else None
            if rank is not None:
                found.append((int(rank), finite(row.get("resident")), finite(row.get("device"))))
        return found

    @property
    def held_out(self) -> list[str]:
        """Names of the values that the run's evaluations on held-out samples recorded; ``loss`` comes first.

        The other names are those of the task's metrics, such as ``accuracy``. Empty if no evaluation is recorded.
        """
        known = ("group", "step", "epoch", "samples", "seconds", "time", "weights")
        names = dict.fromkeys(name for line in self.evaluated for name in line if name not in known)
        return sorted(names, key=lambda name: name != "loss")

    def curve(self, name: str, axis: str, of: str = "train") -> list[Point]:
        """Return the curve of a value that the run has recorded, for a chart.

        Args:
            name: name of the value y, such as ``loss``.
            axis: quantity x: ``samples`` trained so far, ``step``, or ``seconds`` of training.
            of: ``train`` for the value of each step, ``eval`` for the held-out value of each evaluation.

        Returns:
            Points (x, y) in the order of the records; records in which x or y is missing or not finite have no point.
            Empty if the value is not recorded.
        """
        trained_samples = {finite(line.get("step")): line.get("samples") for line in self.trained}
        found = []
        for line in self.trained if of == "train" else self.evaluated:
            place = line.get(axis)
            if of == "eval" and axis == "samples":
                # In an evaluation's record, samples are those that it was measured on.
                place = trained_samples.get(finite(line.get("step")))
            x, y = finite(place), finite(line.get(name))
            if x is not None and y is not None:
                found.append((x, y))
        return found


def finite(value: Any) -> float | None:
    """Return a finite number as a float; None for NaN, infinities, truth values and anything else.

    >>> finite(3), finite("3"), finite(float("nan")), finite(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def printable(text: object) -> str:
    r"""Convert an object to a text that is safe to print and to encode as UTF-8.

    U+FFFD takes the place of each character that is not printable; line breaks and tabs stay.

    >>> printable("a\x00b"), printable("n\udce4m")
    ('a�b', 'n�m')
    """
    # A lone surrogate, which stands for an undecodable byte of a file name, is not printable either.
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text))


def read_run(path: Path) -> RunRecord:
    """Read configuration, environment, metrics, summary, trace and failures of a run directory for the report.

    A file that is missing or damaged raises no error, but adds a sentence to ``problems`` of the result.

    Args:
        path: run directory of ``tutti train``.

    Returns:
        The content of the files, unchanged but for damaged parts: ``config``, ``environment``, ``summary`` and
        ``landscape`` (dicts, empty if missing), ``trained`` and ``evaluated`` (lines of ``metrics.jsonl`` as dicts, in
        order), ``timeline`` (traced segments of each device), ``goodput`` (productive and lost time; None if unknown),
        ``failures``, ``warnings`` and ``problems`` (sentences).

    Raises:
        UsageError: ``path`` is no run directory.
    """
    if not path.is_dir():
        raise UsageError(
            "there is no run", where=printable(path), why="it is no directory", remedy="give a run directory"
        )
    failures = list(_failures(path))
    if not failures and not any((path / name).is_file() for name in FILES):
        raise UsageError(
            "this directory is no run",
            where=printable(path),
            why=f"it has none of {', '.join(FILES)}",
            remedy="give a run directory, such as runs/NAME",
        )
    problems: list[str] = []
    config = _parsed(path / "config.toml", _toml, problems)
    environment = _parsed(path / ENVIRONMENT, read_json, problems)
    summary = _parsed(path / "summary.json", read_json, problems)
    trained, evaluated, resumed, warnings, lines = _metrics(path, problems)
    if summary and finite(summary.get("exit_code")) is None:
        problems.append("summary.json has no exit code: the run was ended before it could record one")
    diagnoses = summary.get("diagnoses")
    warnings += [printable(each) for each in diagnoses] if isinstance(diagnoses, list) else []
    return RunRecord(
        path=path,
        name=printable(path.resolve().name or path),
        trained=trained,
        evaluated=evaluated,
        resumed=resumed,
        warnings=list(dict.fromkeys(warnings)),
        failures=failures,
        config=config,
        environment=environment,
        summary=summary,
        timeline=_timeline(path / "trace" / "trace.json", problems),
        goodput=_goodput(path, problems),
        landscape=_parsed(path / LANDSCAPE, read_json, problems) if (path / LANDSCAPE).is_file() else {},
        problems=problems,
        lines=lines,
    )


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8", errors="replace"))


def _parsed(path: Path, read: Callable[[Path], dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    """Return the file's table; an empty one, and a problem, if it is missing or invalid."""
    try:
        found = read(path)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {printable(error)}")
        return {}
    if not found:
        problems.append(f"{path.name} is empty")
    return found


Lines = list[dict[str, Any]]


def _metrics(path: Path, problems: list[str]) -> tuple[Lines, Lines, int, list[str], int]:
    """Return steps, evaluations, number of resumes, warnings and number of readable lines."""
    trained: Lines = []
    evaluated: Lines = []
    warnings: list[str] = []
    resumed = unread = read = 0
    first = True
    try:
        records = [record for _, record in metric_lines(path)]
    except OSError as error:
        problems.append("metrics.jsonl " + ("is missing" if isinstance(error, FileNotFoundError) else "is unreadable"))
        records = []
    for line in records:
        if line is None:
            unread += 1
            continue
        read += 1
        group = line.get("group")
        if group == "train":
            trained.append({**line, "first": first})
            first = False
        elif group == "eval":
            evaluated.append(line)
        elif group == "resume":
            resumed, first = resumed + 1, True
        elif group == "warning":
            warnings.append(printable(line.get("text", "")))
    if unread:
        many = counted(unread, "line")
        problems.append(f"{many} of metrics.jsonl cannot be read; the last line of a killed run may be cut")
    if (path / METRICS).is_file() and not trained:
        problems.append("metrics.jsonl has no step")
    return trained, evaluated, resumed, warnings, read


def _failures(path: Path) -> Iterator[str]:
    for file in sorted((path / "logs").glob("failure-rank*.json")):
        found = _parsed(file, read_json, [])
        rank = file.stem.removeprefix("failure-rank")
        step = f", step {found['step']}" if finite(found.get("step")) is not None else ""
        message = printable(found.get("message") or "no message").strip()
        yield f"rank {printable(found.get('rank', rank))}{step}: {message}"


def _timeline(path: Path, problems: list[str]) -> list[list[TimelineSegment]]:
    """Return each device's segments, in seconds, from a trace for Perfetto; none if there is no trace."""
    if not path.is_file():
        return []
    rows = segments_of_chrome(_parsed(path, read_json, problems))
    count = sum(map(len, rows.values()))
    if count > MOST_SEGMENTS or (rows and max(rows) > 4096):
        problems.append(f"the timeline has {count:,} segments, too many for a page: open trace/trace.json in Perfetto")
        return []
    ordered = (rows.get(device, ()) for device in range(max(rows, default=-1) + 1))
    return [[segment._replace(phase=printable(segment.phase)) for segment in row] for row in ordered]


def _goodput(path: Path, problems: list[str]) -> Goodput | None:
    try:
        return run_goodput(path)
    except TuttiError as error:
        problems.append(f"no goodput: {printable(error.why or error.what)}")
    except (ArithmeticError, AttributeError, KeyError, LookupError, TypeError, ValueError):
        problems.append("no goodput: a record lacks a field, or has one of another type")
    return None
