"""Why did a rank end? What a failing worker leaves behind, and which failure was the first cause. No torch."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti.errors import ExitCode, TuttiError, UsageError

_TAIL = 20
_WORKER = Path(__file__).with_name("child.py")
# Orderly ends that the run itself has already told the user about.
QUIET = frozenset({ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED})
# What gloo and the file store say where a peer went away or never came; torch raises it as a plain RuntimeError.
_LOST_PEER = re.compile(
    r"(?i)^wait timeout|connection (closed|reset) by peer|connection refused|broken pipe|connectFullMesh"
    r"|gloo.*(timed out|timeout)"
)
_HINTS = {
    signal.SIGKILL: "by hand, by a scheduler, or by the system because it was out of memory",
    signal.SIGBUS: "perhaps shared memory (/dev/shm) or a disk was full",
    signal.SIGSEGV: "a crash in native code; the log ends with the Python stack",
    signal.SIGABRT: "a native library gave up; its message is above or in the log",
}


@dataclass(frozen=True)
class Failure:
    """How one rank ended.

    Attributes:
        rank: the rank.
        time: seconds since the epoch.
        kind: the exception's class, or empty where there was none.
        message: what it said.
        exit_code: of the process, as in ``tutti.errors.ExitCode``.
        traceback: its text.
        step: the training step, where known.
        remedy: what to do, where known.
        signal: the signal that ended the process, where one did.
    """

    rank: int
    time: float
    kind: str
    message: str
    exit_code: int
    traceback: str = ""
    step: int | None = None
    remedy: str | None = None
    signal: int | None = None


def path(directory: Path, rank: int) -> Path:
    """Where a rank's failure is recorded."""
    return directory / f"failure-rank{rank}.json"


def log_path(directory: Path, rank: int) -> Path:
    """A rank's log."""
    return directory / f"rank{rank}.log"


def flight_path(directory: Path, rank: int) -> Path:
    """Where the last collectives of a rank that was stuck are written."""
    return directory / f"flight-rank{rank}.json"


def exit_code(exception: BaseException) -> int:
    """The process exit code for an exception; a lost peer counts as one even where torch raises something general."""
    if isinstance(exception, TuttiError):
        return int(exception.exit_code)
    if isinstance(exception, SystemExit):
        if exception.code is None:
            return int(ExitCode.DONE)
        return exception.code & 0xFF if isinstance(exception.code, int) else int(ExitCode.UNEXPECTED)
    if isinstance(exception, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED)
    if isinstance(exception, OSError) and exception.errno in (errno.ENOSPC, errno.EDQUOT):
        return int(ExitCode.DISK)
    # By name, so that judging an exception does not import torch.
    if any(base.__name__ == "DistError" for base in type(exception).__mro__):
        return int(ExitCode.PEER)
    if isinstance(exception, RuntimeError) and _LOST_PEER.search(str(exception)):
        return int(ExitCode.PEER)
    return int(ExitCode.UNEXPECTED)


def record(directories: Iterable[Path], rank: int, exception: BaseException, hidden: Collection[str] = ()) -> Failure:
    """Leave a record of ``exception``, as ``write`` does.

    Args:
        directories: the run's log directory, and others to try where it is full.
        rank: the failing rank.
        exception: what ended it.
        hidden: files whose outermost frames the traceback leaves out.
    """
    step = getattr(exception, "step", None)
    failure = Failure(
        rank=rank,
        time=time.time(),
        kind=type(exception).__name__,
        message=str(exception),
        exit_code=exit_code(exception),
        traceback=_trace(exception, hidden),
        step=step if isinstance(step, int) else None,
        remedy=exception.remedy if isinstance(exception, TuttiError) else None,
    )
    write(directories, failure)
    return failure


def write(directories: Iterable[Path], failure: Failure) -> None:
    """Write ``failure-rankN.json`` atomically, where there is room. Does not raise where no disk can take it."""
    for directory in directories:
        target = path(directory, failure.rank)
        temporary = target.with_suffix(f".tmp-{os.getpid()}")
        try:
            temporary.write_text(json.dumps(asdict(failure), indent=1) + "\n", encoding="utf-8")
            temporary.replace(target)
            break
        except OSError:
            with suppress(OSError):
                temporary.unlink()


def read(directories: Iterable[Path], rank: int) -> Failure | None:
    """A rank's record; None where there is none or it cannot be read."""
    for directory in directories:
        with suppress(OSError, ValueError, TypeError):
            return Failure(**json.loads(path(directory, rank).read_text(encoding="utf-8")))
    return None


def clear(directories: Iterable[Path], ranks: Collection[int]) -> None:
    """Remove the records of an earlier attempt."""
    for directory in directories:
        for rank in ranks:
            path(directory, rank).unlink(missing_ok=True)


def from_death(rank: int, code: int, seen: float) -> Failure:
    """The failure of a process that ended without a record.

    Args:
        rank: its rank.
        code: exit code as ``multiprocessing`` gives it: negative for a signal.
        seen: when its end was noticed, in seconds since the epoch.
    """
    if code >= 0:
        return Failure(rank, seen, "", f"ended with exit code {code} and no exception", code)
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = _HINTS.get(signal.Signals(number)) if number in set(signal.Signals) else None
    message = f"was killed by {name}" + (f" ({hint})" if hint else "")
    remedy = None
    if number == signal.SIGKILL:
        remedy = "Look for 'out of memory' in the system's log; fewer processes or a smaller batch need less memory."
    return Failure(rank, seen, "", message, int(ExitCode.PEER), remedy=remedy, signal=number)


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The one that the others follow from.

    A rank that was killed comes first, for nothing that goes wrong in one rank kills another one (but an abort is what
    some libraries do when a peer is lost); then the earliest that is not about a lost peer; then the earliest.
    """

    def order(failure: Failure) -> tuple[int, float]:
        if failure.signal is not None and failure.signal != signal.SIGABRT:
            return 0, failure.time
        return (2 if failure.exit_code == ExitCode.PEER and failure.signal is None else 1), failure.time

    return min(failures, key=order)


def describe(failure: Failure, log: Path) -> str:
    """What the user reads: which rank, what happened, its last lines, where the log is, what to do.

    What is wrong before training is so on every rank: then it is said as it would be without ranks.
    """
    if failure.kind == UsageError.__name__ and failure.step is None:
        return f"tutti: {failure.message}"
    if failure.kind == "SystemExit":
        what = f"exited with code {failure.exit_code}"
        what += f": {failure.message}" if not failure.message.isdecimal() else ""
    elif failure.kind:
        at = f" at step {failure.step}" if failure.step is not None else ""
        what = f"failed{at}: {failure.kind}: {failure.message}"
    else:
        what = failure.message
    lines = [f"tutti: rank {failure.rank} {what}"]
    if failure.traceback and not failure.kind:
        lines += _indented(failure.traceback.splitlines(), "innermost lines of its stack:")
    elif failure.rank != 0 or not failure.kind:
        last = tail(log)
        lines += _indented(last, f"last lines of {log}:") if last else [f"  Its log, {log}, is empty."]
    elif failure.exit_code == ExitCode.UNEXPECTED and failure.kind != "SystemExit":
        lines += _indented(failure.traceback.splitlines()[-_TAIL:], "traceback:")
    if failure.remedy and failure.remedy.lower().rstrip(".") not in failure.message.lower():
        lines.append(failure.remedy)
    return "\n".join(lines)


def tail(log: Path, lines: int = _TAIL) -> list[str]:
    """The last lines of a log; empty where there is none. Reads at most its last 64 KiB.

    A crash's stack is shown down to the user's own entry: below it is only how the worker was started.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            text = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    below = (index for index, line in enumerate(text) if line.startswith(f'  File "{_WORKER}", line '))
    return text[: next(below, None)][-lines:]


def _indented(lines: list[str], heading: str) -> list[str]:
    return [f"  {heading}", *(f"    {line}".rstrip() for line in lines)]


def _trace(exception: BaseException, hidden: Collection[str]) -> str:
    frames = exception.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in hidden:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(exception), exception, frames))
