"""Write and read the run directory: a run's configuration, metrics, environment and summary as TOML and JSON.

``config.toml`` (repeats the run) · ``metrics.jsonl`` (one object a step, evaluation or resume) · ``env.json`` ·
``summary.json`` and ``servers.svg`` (written atomically at the end). No torch at import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tutti.config.train_config import TrainConfig
from tutti.device import device_names, toolkit_versions
from tutti.distribution import VERSION
from tutti.errors import DiskError, UsageError, counted
from tutti.launcher.encoding import strict_json
from tutti.metrics import server_figure
from tutti.metrics.listener import Clock, EvalRecord, Pace, RunHeader
from tutti.metrics.metrics_file import METRICS, metric_lines, metric_records, to_json_number
from tutti.native.native_library import kernels
from tutti.types.step_records import StepRecord

ENVIRONMENT = "env.json"
MOST_WAITING = 1000
"""Lines of metrics that are buffered while the disk is full, before an error is raised."""

BESIDE_THE_RESULT = frozenset(
    {"out", "runs", "overwrite", "log_every", "resume", "change", "devices", "device", "threads", "timeout", "keep"}
    | {"data_workers", "tensorboard", "logger", "profile", "keep_best", "machine", "noise_every"}
    | {"start_timeout", "step_timeout", "save_timeout", "max_restarts", "on", "wait"}
)
"""Options that do not affect a run's result, such as output folders, number of devices, logging and timeouts."""

# Seconds within which ranks end whose launcher was killed, and between two looks at a lock.
_ENDING, _PACE = 10.0, 0.05
_ENCODE = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def make_run_directory(config: TrainConfig, task: str) -> Path:
    """Create this run's directory and return its path; called in one process of the run, before its ranks train.

    The path is ``config.out``; if that is None, ``TASK-YYYYmmdd-HHMMSS`` (time in UTC) in the folder ``config.runs``,
    with a number behind it if this name is taken. Summary, metrics and checkpoints of an earlier run in ``config.out``
    are deleted, so that they are not mistaken for this run's.

    Args:
        config: the run's configuration, with ``out``, ``runs`` and ``overwrite``.
        task: name of the task.

    Raises:
        UsageError: ``out`` is a file, or not empty while ``overwrite`` is off. Files of a run that failed before its
            first step do not count.
        DiskError: the directory cannot be written.
    """
    if config.out is None:
        return _fresh(Path(config.runs), f"{_short(task)}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    path = Path(config.out)
    if path.exists() and not path.is_dir():
        raise UsageError("the run directory is a file", where=str(path), remedy="choose another folder with --out")
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()) and not config.overwrite and not _never_began(path):
            raise UsageError(
                "the run directory is not empty", where=str(path), remedy="choose another --out, or add --overwrite"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write")
        for name in ("summary.json", METRICS):
            (path / name).unlink(missing_ok=True)
        if (path / "checkpoints").is_dir():
            shutil.rmtree(path / "checkpoints")
    return path


@contextlib.contextmanager
def claim_run_directory(path: Path) -> Iterator[None]:
    """Hold the lock of a run directory within the block, so that no two runs write into it at the same time.

    Processes that are forked within the block hold the lock, too, until they end: ranks that outlive their launcher for
    a moment keep the directory. Without an effect where the file system has no locks of directories, as NFS.

    Args:
        path: the run directory.

    Raises:
        UsageError: another run holds the lock, and has not released it after a wait of some seconds.
        DiskError: the directory cannot be opened.
    """
    with _writing(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + _ENDING
        while not _locked(descriptor):
            if time.monotonic() > end:
                raise UsageError(
                    "another run writes into this run directory",
                    where=str(path),
                    why="its launcher or a rank of it still runs, and each would delete the other's checkpoints",
                    remedy="end that run first, or choose another --out",
                )
            time.sleep(_PACE)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Take the lock of a directory if it is free; True also where there are no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _never_began(path: Path) -> bool:
    """Return whether the directory holds only the files of a run that failed before it could train."""
    names = {entry.name for entry in path.iterdir()}
    return names <= {"logs", "summary.json"} and any(path.glob("logs/failure-rank*.json"))


def find_run(config: TrainConfig, task: str) -> Path:
    """Return the directory of the run to resume: the newest with the same task and an equal configuration.

    The run is sought in the folder ``config.runs``; the newest run has the ``config.toml`` that was written last.
    Directories with an unreadable ``config.toml`` are left out. Configurations are equal if their ``config_sha256`` is,
    which leaves out options without an effect on the result; settings that ``config.change`` names may differ, too. If
    ``config`` leaves ``workers`` unset, the number of logical workers (shares of the global batch) of a run that was
    resumed before is not compared: resuming has written the number of its first start into its ``config.toml``.

    Args:
        config: configuration that the run must have, and the folder of runs (``runs``).
        task: name of the task.

    Raises:
        UsageError: no run matches.
    """
    folder, wanted = Path(config.runs), config_sha256(config)
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    files = sorted(folder.glob("*/config.toml"), key=lambda path: path.stat().st_mtime, reverse=True)
    for file in files:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            equal = values.pop("task", None) == task and wanted in _sha256s(values, config, file.parent)
        except (OSError, ValueError, TypeError, UsageError):
            continue
        if equal and values.keys() <= known:
            return file.parent
    raise UsageError(
        f"no run of {task} with this configuration can be resumed",
        where=f"{len(files)} runs in {folder}",
        remedy="give the same options as before, or --resume DIR",
    )


def _sha256s(values: Mapping[str, Any], config: TrainConfig, run: Path) -> set[str]:
    """Return the hashes that a run's configuration matches: its own, and for a resumed run that without ``workers``.

    The second only if ``config`` leaves ``workers`` unset.
    """
    saved = TrainConfig(**values)
    found = {config_sha256(saved)}
    if config.workers is None and saved.workers is not None:
        bare = config_sha256(dataclasses.replace(saved, workers=None))
        # Metrics are long: read those of a run that may match.
        if bare == config_sha256(config) and any(line.get("group") == "resume" for line in metric_records(run)):
            found.add(bare)
    if config.change is not None:
        known = {field.name for field in dataclasses.fields(TrainConfig)}
        # Other names are options of the optimizer.
        named = {name if name in known else "optimizer" for name in config.changes.names}
        found.add(config_sha256(dataclasses.replace(saved, **{name: getattr(config, name) for name in named})))
    return found


def config_toml(config: TrainConfig, task: str) -> str:
    """Return the configuration of a run as TOML text for ``tutti train --config``; unset options are left out.

    Args:
        config: the configuration.
        task: name of the task, which becomes the key ``task``.
    """
    import tomli_w

    values = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return tomli_w.dumps({"task": task, **values})


def read_summary(path: Path) -> dict[str, Any]:
    """Return a run's results, read from ``summary.json`` of its directory; an empty dict if it is missing or invalid.

    Args:
        path: the run directory.

    Returns:
        The JSON object: results by name, such as ``exit_code``, ``eval`` (held-out values) and ``weights_sha256``, as
        far as the run has recorded them.
    """
    with contextlib.suppress(OSError, ValueError):
        return read_json(path / "summary.json")
    return {}


def record_exit(path: Path, code: int, attempts: Sequence[Mapping[str, Any]] = ()) -> None:
    """Set ``exit_code`` in ``summary.json`` of a run directory; other entries stay, and a missing file is made.

    Args:
        path: the run directory.
        code: exit code of the command that made the run, 0 for success.
        attempts: one object for each start of the run by an engine such as Slurm, with the devices of the start; set as
            the entry ``attempts``, unless empty.

    Raises:
        DiskError: the file cannot be written.
    """
    more = {"attempts": list(attempts)} if attempts else {}
    write_json(path / "summary.json", {**read_summary(path), "exit_code": int(code), **more})


class RunDirectory:
    """Listener of a run's events that writes them into files of the run directory, on rank 0 alone.

    The constructor creates the folder if necessary and writes ``config.toml``, ``env.json`` and the initial
    ``metrics.jsonl``, which is empty for a new run. Later lines of ``metrics.jsonl`` are written at once, so that
    they outlive the process, and whole: a full disk leaves no partial line. While the disk is full, lines are buffered.
    Every line has ``time``, its Unix time, and ``seconds`` of training until then. A resumed run keeps the lines up to
    its checkpoint's step, and adds a line of group ``resume`` with the number of lost steps.

    Args:
        path: the run directory.
        config: the run's configuration.
        task: the task's name.
        resumed: step of the checkpoint that the run resumes from; None for a new run.
        clock: start and earlier training time; None for a new run or a checkpoint without them.
        launched: Unix time at which the command was started that makes these records; None if unknown.

    Attributes:
        path: the run directory.
        clock: start of the run, and seconds of training before this start, lost steps included.

    Raises:
        DiskError: a file cannot be written, or ``MOST_WAITING`` lines are buffered; from all methods but ``close``.
    """

    def __init__(
        self,
        path: str | Path,
        config: TrainConfig,
        task: str,
        resumed: int | None = None,
        clock: Clock | None = None,
        launched: float | None = None,
    ) -> None:
        self.path = Path(path)
        self.clock = (clock or Clock(time.time())) if resumed is None else _clock(self.path, clock or Clock(None))
        self._elapsed = self.clock.spent
        self._waiting: list[bytes] = []
        metrics = self.path / METRICS
        # A rerun must neither write into the run that it repeats nor continue it.
        rerun = dataclasses.replace(config, out=None, overwrite=False, resume=None, change=None)
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # Replace the file atomically: a run that is killed here keeps its history, and a reader that follows the
            # file sees a new one.
            _write(metrics, b"" if resumed is None else _until(self.path, resumed, self.clock.spent, launched))
            self._metrics = metrics.open("ab", buffering=0)
        _write(self.path / "config.toml", config_toml(rerun, task).encode(errors="surrogateescape"))
        first = launched if resumed is None else read_environment(self.path).get("launched")
        write_json(self.path / ENVIRONMENT, {"launched": first, "started": self.clock.started, **environment()})

    def started(self, header: RunHeader) -> None:
        """Write nothing when the run starts: its settings follow from ``config.toml`` in the run directory.

        Args:
            header: title, settings and length of the run; not used.
        """

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        """Append the numbers of one optimizer step to ``metrics.jsonl``, as a JSON line of group ``train``.

        Keys are ``group``, ``step``, ``epoch``, ``samples`` and ``updates`` (so far), ``loss``, each metric,
        ``grad_norm``, ``lr``, ``seconds`` (of training so far) and, as far as the run has them, ``loss_scale``,
        ``data_seconds`` (wait for the batch), figures of AdaScale, gradient noise and one device, ``bubble`` (idle
        fraction of a pipeline's schedule) and ``skipped``. NaN and infinities become null.

        Args:
            record: numbers of the step.
            pace: speed and seconds of training, and figures of one device, which the line has too.

        Raises:
            DiskError: the disk has been full for so long that ``MOST_WAITING`` (1,000) lines are buffered.
        """
        line: dict[str, Any] = {
            "group": "train",
            "step": record.step,
            "epoch": record.epoch,
            "samples": record.samples,
            "updates": record.updates,
            "loss": to_json_number(record.loss),
        }
        for name, value in record.metrics.items():
            line.setdefault(name, to_json_number(value))
        line["grad_norm"] = to_json_number(record.grad_norm)
        line["lr"] = to_json_number(record.lr)
        if record.loss_scale is not None:
            line["loss_scale"] = record.loss_scale
        for name, value in record.adascale.items():
            line[name] = to_json_number(value)
        for name, value in record.noise.items():
            line[name] = to_json_number(value)
        if record.bubble is not None:
            line["bubble"] = round(record.bubble, 6)
        line["seconds"] = round(pace.elapsed, 6)
        if pace.data is not None:
            line["data_seconds"] = round(pace.data, 6)
        line |= pace.device
        if record.skipped:
            line["skipped"] = True
        self._elapsed = pace.elapsed
        self._append(line)

    def evaluated(self, record: EvalRecord) -> None:
        """Append the result of one evaluation to ``metrics.jsonl``, as a JSON line of group ``eval``.

        Keys are ``group``, ``step``, ``epoch``, ``samples`` (number of held-out samples), ``loss`` and each metric, and
        ``seconds`` of training until the evaluation. If the run keeps an average (EMA) of the weights, the values are
        of the average, ``weights`` is ``ema``, and ``raw_loss`` and ``raw_{metric}`` are of the weights in training.
        NaN and infinities become null.

        Args:
            record: the means over all held-out samples.

        Raises:
            DiskError: the disk has been full for so long that ``MOST_WAITING`` (1,000) lines are buffered.
        """
        line: dict[str, Any] = {
            "group": "eval",
            "step": record.step,
            "epoch": record.epoch,
            "samples": record.samples,
        }
        if record.raw is not None:
            line["weights"] = "ema"
        for name, value in record.values.items():
            line.setdefault(name, to_json_number(value))
        line["seconds"] = round(self._elapsed if record.seconds is None else record.seconds, 6)
        self._append(line)

    def warned(self, text: str) -> None:
        """Append a JSON line of group ``warning`` to ``metrics.jsonl``: the text, and seconds of training so far.

        Raises:
            DiskError: the disk has been full for so long that ``MOST_WAITING`` (1,000) lines are buffered.
        """
        self._append({"group": "warning", "text": text, "seconds": round(self._elapsed, 6)})

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary``, the run's results, to ``summary.json`` in the run directory.

        With parameter servers their statistics are drawn as ``servers.svg``, too, if matplotlib is installed.

        Raises:
            DiskError: a file, or a buffered line of ``metrics.jsonl``, cannot be written.
        """
        self._flush()
        write_json(self.path / "summary.json", summary)
        if (statistics := summary.get("servers")) and server_figure.can_draw():
            title = f"{summary['task']} · {summary['strategy']} · {counted(summary['workers'], 'worker')}"
            _write(self.path / "servers.svg", server_figure.server_figure(statistics, self._updates(), title))

    def _updates(self) -> list[tuple[float, float]]:
        """Return (seconds, updates) after each step since the run was started or last resumed."""
        found: list[tuple[float, float]] = []
        for line in metric_records(self.path):
            if line.get("group") == "resume":
                found.clear()
            elif line.get("group") == "train":
                found.append((line["seconds"], line["updates"]))
        return found

    def close(self) -> None:
        """Write the buffered lines of ``metrics.jsonl`` and close the file; lines that a full disk refuses are lost."""
        if not self._metrics.closed:
            # The error that ends the run matters more than lines that the full disk still refuses.
            with contextlib.suppress(DiskError):
                self._flush()
            self._metrics.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._waiting.append(_line({**line, "time": round(time.time(), 6)}))
        try:
            self._flush()
        except DiskError:
            # Failed saves decide how long a run tolerates a full disk; a run without saves must end here.
            if len(self._waiting) >= MOST_WAITING:
                raise

    def _flush(self) -> None:
        with _writing(self._metrics.name):
            end = self._metrics.seek(0, os.SEEK_END)
            try:
                _write_all(self._metrics.fileno(), b"".join(self._waiting))
            except OSError:
                self._metrics.truncate(end)
                raise
        self._waiting.clear()


def config_sha256(config: TrainConfig) -> str:
    """Return the hexadecimal SHA-256 of the options that affect a run's result, such as the batch size.

    ``BESIDE_THE_RESULT`` names the options left out, such as output folders, number of devices and timeouts. Options at
    their default are left out too, so that a new option does not change the hash of an older configuration.

    Args:
        config: the run's configuration.
    """
    # Options at their default are left out: an option that a later version adds does not change older hashes.
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in BESIDE_THE_RESULT and getattr(config, field.name) != field.default
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _line(record: Mapping[str, Any]) -> bytes:
    # File names may contain bytes that are invalid in the locale's encoding.
    return f"{_ENCODE(record)}\n".encode(errors="surrogateescape")


def _until(path: Path, step: int, seconds: float, launched: float | None) -> bytes:
    """Return a run's lines of metrics up to ``step``, with a ``resume`` line that counts the lost steps after it.

    Args:
        path: the run directory.
        step: of the checkpoint that the run resumes from.
        seconds: of training so far, lost steps included.
        launched: Unix time at which the resuming command was started; None if unknown.
    """
    kept, lost = [], 0
    for line, record in metric_lines(path) if (path / METRICS).exists() else ():
        if record is None:
            continue
        if record.get("step", 0) <= step:
            kept.append(line.rstrip(b"\n") + b"\n")
        else:
            lost += record.get("group") == "train"
    resume: dict[str, Any] = {"group": "resume", "from": step, "lost": lost, "seconds": round(seconds, 6)}
    if launched is not None:
        resume["launched"] = launched
    return b"".join(kept) + _line({**resume, "time": round(time.time(), 6)})


def _clock(path: Path, saved: Clock) -> Clock:
    """Return the clock of a resumed run: the checkpoint's, with the time of training after it was saved.

    Args:
        path: the run directory, whose metrics give the time.
        saved: the checkpoint's clock.
    """
    records = metric_records(path) if (path / METRICS).exists() else []
    seconds = [record.get("seconds", 0.0) for record in records]
    started = saved.started
    if started is None:
        started = read_environment(path).get("started")
    return Clock(started, max([saved.spent, *seconds]))


def read_environment(path: Path) -> dict[str, Any]:
    """Return a run's software and hardware, read from ``env.json``; an empty dict if it is missing or invalid.

    Args:
        path: the run directory.

    Returns:
        The JSON object: the entries of ``environment`` (``versions``, ``platform``, ``devices`` and so on), and the
        Unix times ``launched`` and ``started`` at which the run's command and its training began; as far as the run has
        recorded them.
    """
    with contextlib.suppress(OSError, ValueError):
        return read_json(path / ENVIRONMENT)
    return {}


def environment() -> dict[str, Any]:
    """Return a JSON object of this process's software and hardware, for ``env.json`` of a run.

    Returns:
        A dict with ``versions`` (of tutti, torch, numpy and Python, by name), ``platform``, ``machine`` (processor
        type), ``host``, ``cpu_count`` (usable cores), ``torch_threads``, ``kernels`` (text that says whether tutti's
        C++ loops can be compiled here), ``cuda`` (version, or None) and ``devices`` (names of the accelerators).
    """
    import torch

    return {
        "versions": {
            "tutti": VERSION,
            "torch": torch.__version__,
            "numpy": _version("numpy"),
            "python": platform.python_version(),
        },
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "kernels": kernels(),
        **toolkit_versions(),
        "devices": device_names(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fresh(folder: Path, name: str) -> Path:
    with _writing(folder / name):
        folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = folder / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
            else:
                return path


def _short(task: str) -> str:
    """Return a task's name in a form that is safe in a folder's name.

    >>> _short("lessons/line.py:make")
    'line-make'
    """
    text = re.sub(r"\.py(?=:|$)", "", task.replace("\\", "/").rsplit("/", 1)[-1])
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.") or "run"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, such as one that ``write_json`` has written.

    Bytes that are invalid in UTF-8, as file names may have them, become surrogates, as in ``os.fsdecode``.

    Args:
        path: the file.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: the content is no JSON object.
    """
    try:
        found = json.loads(path.read_bytes().decode(errors="surrogateescape"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object to a file, which is replaced atomically; NaN and infinities become null.

    Args:
        path: the file.
        value: the object.

    Raises:
        DiskError: the file cannot be written.
    """
    _write(path, (strict_json(value, indent=2, ensure_ascii=False) + "\n").encode(errors="surrogateescape"))


def _write(path: Path, data: bytes) -> None:
    """Replace ``path`` atomically and fsync it and its directory. Raises DiskError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _writing(path):
        try:
            with temporary.open("wb", buffering=0) as file:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write_all(descriptor: int, data: bytes) -> None:
    unwritten = memoryview(data)
    # On a nearly full disk, ``write`` takes a part of the bytes and fails only on the next call.
    while unwritten:
        unwritten = unwritten[os.write(descriptor, unwritten) :]


@contextlib.contextmanager
def _writing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(
            "cannot write the run directory",
            where=str(path),
            why=error.strerror or str(error),
            remedy="free space on that disk, or choose a folder that you may write with --out",
        ) from error
