"""The run directory: what a training run leaves on disk, readable by anything that reads TOML and JSON.

``config.toml`` (reruns the run) · ``metrics.jsonl`` (one object a step, an evaluation, a resume) · ``env.json`` ·
``summary.json`` and ``servers.svg`` (appear whole, at the end). No torch at import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tutti.errors import DiskError, UsageError
from tutti.measure import servers
from tutti.training.config import TrainConfig
from tutti.training.listener import EvalRecord, Header, Pace
from tutti.types import StepRecord

MOST_WAITING = 1000
"""Lines of metrics that may wait for room on a full disk."""

_ENCODE = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def make_run_directory(config: TrainConfig, task: str) -> Path:
    """Create this run's directory: ``config.out``, or ``RUNS/TASK-YYYYmmdd-HHMMSS`` (UTC), numbered where taken.

    A directory that is used again loses its old summary, metrics and checkpoints: none may be taken for this run's.
    Raises UsageError where ``out`` holds something, other than what a run that never began has left, and ``overwrite``
    is off, DiskError where it cannot be written.
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
        for name in ("summary.json", "metrics.jsonl"):
            (path / name).unlink(missing_ok=True)
        if (path / "checkpoints").is_dir():
            shutil.rmtree(path / "checkpoints")
    return path


def _never_began(path: Path) -> bool:
    """Whether all that is here is what a run left that failed before it could train."""
    names = {entry.name for entry in path.iterdir()}
    return names <= {"logs", "summary.json"} and any(path.glob("logs/failure-rank*.json"))


def find_run(config: TrainConfig, task: str) -> Path:
    """The newest run below ``config.runs`` of the same task and an equal configuration. Raises UsageError."""
    folder, wanted = Path(config.runs), config_sha256(config)
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    files = sorted(folder.glob("*/config.toml"), key=lambda path: path.stat().st_mtime, reverse=True)
    for file in files:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            equal = values.pop("task", None) == task and config_sha256(TrainConfig(**values)) == wanted
        except (OSError, ValueError, TypeError, UsageError):
            continue
        if equal and values.keys() <= known:
            return file.parent
    raise UsageError(
        f"no run of {task} with this configuration can be resumed",
        where=f"{len(files)} runs in {folder}",
        remedy="give the same options as before, or --resume DIR",
    )


def config_toml(config: TrainConfig, task: str) -> str:
    """The configuration as TOML that ``tutti train --config`` reads back; unset options are left out."""
    import tomli_w

    values = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return tomli_w.dumps({"task": task, **values})


def read_summary(path: Path) -> dict[str, Any]:
    """``summary.json`` of run directory ``path``; empty where the run did not get so far."""
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def record_exit(path: Path, code: int) -> None:
    """State ``exit_code`` in ``summary.json`` of run directory ``path``, beside what is there. Raises DiskError."""
    _write_json(path / "summary.json", {**read_summary(path), "exit_code": int(code)})


class RunDirectory:
    """The listener that writes the run directory ``path``. ``config.toml`` and ``env.json`` are there from the start.

    A line is written at once, so that it outlives its process, and whole: a full disk leaves no half of it. Lines that
    it refuses wait for room; every method raises DiskError where too many wait or a file cannot be written. A run that
    was ``resumed`` at a step keeps the lines up to it, and one of group ``resume`` counts those lost and done again.
    """

    def __init__(self, path: str | Path, config: TrainConfig, task: str, resumed: int | None = None) -> None:
        self.path = Path(path)
        self._elapsed = 0.0
        self._waiting: list[bytes] = []
        metrics = self.path / "metrics.jsonl"
        # A rerun must not write into the run that it repeats.
        rerun = dataclasses.replace(config, out=None, overwrite=False)
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # The old lines are replaced whole: a run that is killed here keeps its history, and who follows it notices.
            _write(metrics, b"" if resumed is None else _until(metrics, resumed))
            self._metrics = metrics.open("ab", buffering=0)
        _write(self.path / "config.toml", config_toml(rerun, task).encode())
        _write_json(self.path / "env.json", environment())

    def started(self, header: Header) -> None:
        """The derived numbers follow from ``config.toml``: nothing to write."""

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        line: dict[str, Any] = {
            "group": "train",
            "step": record.step,
            "epoch": record.epoch,
            "samples": record.samples,
            "updates": record.updates,
            "loss": _finite(record.loss),
        }
        for name, value in record.metrics.items():
            line.setdefault(name, _finite(value))
        line["grad_norm"] = _finite(record.grad_norm)
        line["lr"] = _finite(record.lr)
        if record.loss_scale is not None:
            line["loss_scale"] = record.loss_scale
        for name, value in record.adascale.items():
            line[name] = _finite(value)
        line["seconds"] = round(pace.elapsed, 6)
        if record.skipped:
            line["skipped"] = True
        self._elapsed = pace.elapsed
        self._append(line)

    def evaluated(self, record: EvalRecord) -> None:
        line: dict[str, Any] = {
            "group": "eval",
            "step": record.step,
            "epoch": record.epoch,
            "samples": record.samples,
        }
        if record.raw is not None:
            line["weights"] = "ema"
        for name, value in record.values.items():
            line.setdefault(name, _finite(value))
        line["seconds"] = round(self._elapsed if record.seconds is None else record.seconds, 6)
        self._append(line)

    def warned(self, text: str) -> None:
        self._append({"group": "warning", "text": text, "seconds": round(self._elapsed, 6)})

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._flush()
        _write_json(self.path / "summary.json", summary)
        if told := summary.get("servers"):
            title = f"{summary['task']} · {summary['strategy']} · {summary['workers']} workers"
            _write(self.path / "servers.svg", servers.svg(told, self._updates(), title).encode())

    def _updates(self) -> list[tuple[float, float]]:
        """Seconds and updates after each step since this run began or was resumed."""
        found: list[tuple[float, float]] = []
        for line in map(json.loads, (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
            if line["group"] == "resume":
                found.clear()
            elif line["group"] == "train":
                found.append((line["seconds"], line["updates"]))
        return found

    def close(self) -> None:
        if not self._metrics.closed:
            # What ends the run matters more than lines for which there is still no room.
            with contextlib.suppress(DiskError):
                self._flush()
            self._metrics.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._waiting.append(f"{_ENCODE(line)}\n".encode())
        try:
            self._flush()
        except DiskError:
            # Saves decide how long a full disk is put up with; a run without any must end by itself.
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
    """Hash of what decides the result: not of where it is written, or on how many devices it runs."""
    aside = {"out", "runs", "overwrite", "log_every", "resume", "devices", "device", "threads", "timeout", "keep"}
    aside |= {"data_workers", "tensorboard", "profile", "keep_best"}
    aside |= {"start_timeout", "step_timeout", "save_timeout", "max_restarts"}
    # Only what was chosen: an option that a later version adds leaves older runs what they are.
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in aside and getattr(config, field.name) != field.default
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _until(path: Path, step: int) -> bytes:
    """The whole lines of a metrics file up to ``step``, and how many steps were made after it."""
    kept, lost = [], 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("step", 0) <= step:
            kept.append(line)
        else:
            lost += record["group"] == "train"
    resume = _ENCODE({"group": "resume", "from": step, "lost": lost})
    return b"".join(kept) + f"{resume}\n".encode()


def environment() -> dict[str, Any]:
    """What the run ran on: versions, platform, cores that this process may use, threads of torch."""
    import torch

    return {
        "versions": {
            "tutti": _version("tutti"),
            "torch": torch.__version__,
            "numpy": _version("numpy"),
            "python": platform.python_version(),
        },
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
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
    """A task's name as part of a folder's name.

    >>> _short("lessons/line.py:make")
    'line-make'
    """
    text = re.sub(r"\.py(?=:|$)", "", task.replace("\\", "/").rsplit("/", 1)[-1])
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.") or "run"


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """``value`` as strict JSON can hold it: NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _finite(value) if isinstance(value, float) else value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write(path, (json.dumps(_plain(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode())


def _write(path: Path, data: bytes) -> None:
    """Replace ``path`` whole or not at all, and keep it through a power cut. Raises DiskError."""
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
    rest = memoryview(data)
    # A nearly full disk takes a part, and says so only on the next call.
    while rest:
        rest = rest[os.write(descriptor, rest) :]


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
