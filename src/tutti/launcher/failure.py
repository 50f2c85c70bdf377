"""Failure records of ranks, and the choice of the root cause among them. No torch."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti.errors import ExitCode, LoaderError, TuttiError, UsageError

_TAIL = 20
# Modules that start a rank's work.
_STARTERS = tuple(
    f'  File "{Path(__file__).parents[1] / name}", line '
    for name in ("launcher/child.py", "launcher/script_rank.py", "train/engine_rank.py")
)
_FRAME = re.compile(r'  File "([^"]*)", line ')
# Folders of libraries, whose frames a traceback that is too long leaves out before those of the script.
_LIBRARIES = (f"{Path(__file__).parents[1]}{os.sep}", f"{os.sep}site-packages{os.sep}torch{os.sep}")
# Orderly ends, which the run itself has already reported to the user.
QUIET = frozenset({ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED})
# Exit codes for which a restart is useless; for the lasting ones only if tutti raised them.
_FINAL = frozenset({*QUIET, ExitCode.USAGE})
_LASTING = frozenset({ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.AUTHENTICATION, ExitCode.DISK})
# Messages of Gloo and the file store about a peer that is gone or never arrived; a plain RuntimeError in torch.
_LOST_PEER = re.compile(
    r"(?i)^wait timeout|connection (closed|reset) by peer|connection refused|broken pipe|connectFullMesh"
    r"|gloo.*(timed out|timeout)"
)
_HINTS = {
    signal.SIGKILL: "by hand, by a scheduler, or by the system because it was out of memory",
    signal.SIGBUS: "perhaps shared memory (/dev/shm) or a disk was full, or a mapped file was cut short",
    signal.SIGSEGV: "a crash in native code; the log ends with the Python stack",
    signal.SIGABRT: "a native library gave up; its message is above or in the log",
}


@dataclass(frozen=True)
class Failure:
    """Failure record: why the process of one rank ended, or why its watchdog kills it.

    Attributes:
        rank: the rank.
        time: seconds since the epoch.
        kind: name of the exception's class; empty without an exception.
        message: the exception's message, or a description of the end.
        exit_code: exit code of the process, as in ``tutti.errors.ExitCode``.
        traceback: text of the traceback; without an exception, of a stuck rank's stack.
        step: the training step, if known.
        remedy: advice for the user, if known.
        signal: the signal that ended the process, if any.
        node: name of the node on which the rank ran, if the job has several.
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
    node: str = ""


def path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's failure record in ``directory``: ``failure-rankN.json``.

    The record says why the rank's process ended: exception, exit code, traceback. The file need not exist.

    Args:
        directory: directory of the records, such as the run's log directory.
        rank: the rank N.
    """
    return directory / f"failure-rank{rank}.json"


def log_path(directory: Path, rank: int) -> Path:
    """Return the path of the file in ``directory`` that takes a rank's output: ``rankN.log``.

    Args:
        directory: the run's log directory.
        rank: the rank N.
    """
    return directory / f"rank{rank}.log"


def flight_path(directory: Path, rank: int) -> Path:
    """Return the path of the file in which a rank that made no progress has left its last collectives.

    Args:
        directory: the run's log directory.
        rank: the rank N.

    Returns:
        ``directory/flight-rankN.json``; the file need not exist.
    """
    return directory / f"flight-rank{rank}.json"


_before_report: list[Callable[[BaseException], object]] = []


def before_report(function: Callable[[BaseException], object]) -> None:
    """Register a function that may add a note to an uncaught exception of the script before the exception is shown.

    Replaces the function of an earlier call. ``add_notes`` calls it.

    Args:
        function: takes the exception, and raises none.
    """
    _before_report[:] = [function]


def add_notes(error: BaseException) -> None:
    """Call the function that ``before_report`` has registered, if any, with an exception that is about to be shown.

    Args:
        error: the uncaught exception, to which the function may add a note.
    """
    for function in _before_report:
        function(error)


def failure_exit_code(exception: BaseException) -> int:
    """Return the exit code (a member of ``tutti.errors.ExitCode``) with which a rank's process ends after an exception.

    A ``TuttiError`` has its own code, and ``SystemExit`` keeps its code modulo 256 (0 for None, ``UNEXPECTED`` for a
    text). ``KeyboardInterrupt`` gives ``INTERRUPTED``; errors of PyTorch about a lost peer, some of them recognised by
    their text, give ``PEER``; a full disk gives ``DISK``; all others give ``UNEXPECTED``.
    """
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
    if is_distributed_error(exception):
        return int(ExitCode.PEER)
    if isinstance(exception, RuntimeError) and _LOST_PEER.search(str(exception)):
        return int(ExitCode.PEER)
    return int(ExitCode.UNEXPECTED)


def is_distributed_error(exception: BaseException, name: str = "DistError") -> bool:
    """Return whether an exception is an error of ``torch.distributed``, without importing torch.

    Args:
        exception: the exception.
        name: the error's class, such as ``DistStoreError`` of the key-value store; by default the base class of all.
    """
    return any(base.__name__ == name for base in type(exception).__mro__)


def record_failure(
    directories: Iterable[Path], rank: int, exception: BaseException, hidden: Collection[str] = ()
) -> Failure:
    """Describe the exception that ends a rank, write the description as a JSON record for the launcher, and return it.

    The record, ``failure-rankN.json``, is written to the first directory where this succeeds. Never raises OSError: if
    all directories fail, such as on a full disk, no record is written. Calls the function of ``before_report`` first.

    Args:
        directories: the run's log directory, then other directories to try.
        rank: the failing rank.
        exception: the exception that ended the rank.
        hidden: paths of source files; the outermost frames that lie in these files are omitted from the traceback.

    Returns:
        The record: rank, time in seconds since the epoch, class name and text of the exception, exit code and
        traceback; also the training step and a remedy, if the exception has them.
    """
    add_notes(exception)
    step = getattr(exception, "step", None)
    failure = Failure(
        rank=rank,
        time=time.time(),
        kind=type(exception).__name__,
        message=str(exception),
        exit_code=failure_exit_code(exception),
        traceback=_trace(exception, hidden),
        step=step if isinstance(step, int) else None,
        remedy=exception.remedy if isinstance(exception, TuttiError) else None,
    )
    write_failure(directories, failure)
    return failure


def write_failure(directories: Iterable[Path], failure: Failure) -> None:
    """Write a failure as JSON to ``failure-rankN.json``, atomically, in the first directory where this succeeds.

    Never raises OSError; if all directories fail, nothing is written.

    Args:
        directories: directories to try, in order.
        failure: record of why the process of rank N (``failure.rank``) ended: exception, exit code, traceback, …
    """
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


def read_failure(directories: Iterable[Path], rank: int) -> Failure | None:
    """Return the failure record of a rank, read from the first directory with a readable one; None without any.

    Args:
        directories: directories to look in, in order, for the file ``failure-rankN.json``.
        rank: the rank N.

    Returns:
        Why the rank's process ended: kind and text of the exception, exit code, traceback, time in seconds since the
        epoch, and where known the training step, a remedy and the signal.
    """
    for directory in directories:
        with suppress(OSError, ValueError, TypeError):
            return Failure(**json.loads(path(directory, rank).read_text(encoding="utf-8")))
    return None


def clear(directories: Iterable[Path], ranks: Collection[int]) -> None:
    """Delete the failure records (``failure-rankN.json``) of some ranks, before the launcher starts these ranks again.

    A failure record says why the process of a rank ended. Without this call a record of the former start of a rank
    would be read as one of the new start. Records that do not exist are no error.

    Args:
        directories: directories of records; the records are deleted in each of them.
        ranks: ranks whose records are deleted.
    """
    for directory in directories:
        for rank in ranks:
            path(directory, rank).unlink(missing_ok=True)


def from_death(rank: int, code: int, seen: float) -> Failure:
    """Return a failure record for a rank's process that ended without writing one, made from its exit code.

    Args:
        rank: rank of the process.
        code: exit code of the process, as ``multiprocessing`` gives it: -N if signal N killed the process.
        seen: time at which the end of the process was noticed, in seconds since the epoch.

    Returns:
        The record, without exception and traceback: a message in words, and ``code`` as exit code. For a killed process
        the exit code is ``ExitCode.PEER``, ``signal`` is N, and for SIGKILL there is a remedy on memory.
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
    """Return the failure that most likely caused the failures of the other ranks.

    A failure record says why the process of one rank ended. The earliest record of the first of these kinds is chosen:

    1. A signal other than SIGABRT killed the rank: no error in one rank kills another.
    2. SIGABRT killed the rank (some libraries abort when a peer is lost), or an exception that is not about a lost peer
       ended it.
    3. An exception about a lost peer (exit code ``ExitCode.PEER``) ended the rank.

    Args:
        failures: records of ranks that ran at the same time, between one start of the ranks by the launcher and the
            next; at least one, otherwise ValueError is raised.

    Returns:
        One of ``failures``, unchanged: the earliest of the most preferred kind.
    """

    def order(failure: Failure) -> tuple[int, float]:
        if failure.signal is not None and failure.signal != signal.SIGABRT:
            return 0, failure.time
        return (2 if failure.exit_code == ExitCode.PEER and failure.signal is None else 1), failure.time

    return min(failures, key=order)


def is_final(cause: Failure) -> bool:
    """Return whether starting the job again is useless: it would fail in the same way, or was ended on purpose.

    True for wrong usage; for an exception about missing data, a bad checkpoint, authentication or a full disk; and for
    orderly ends, such as after an interrupt. False for a ``LoaderError``, a data error about a loader process that
    died. A script's own ``sys.exit(8)`` does not count as a disk error, although ``DISK`` has exit code 8.

    Args:
        cause: record of why a rank's process ended, which ended the job; its ``exit_code`` and ``kind``, the name of
            the exception's class (empty without one), are looked at.
    """
    raised = cause.kind not in ("", SystemExit.__name__, LoaderError.__name__)
    return cause.exit_code in _FINAL or (cause.exit_code in _LASTING and raised)


def describe_failure(failure: Failure, log: Path | None) -> str:
    """Return the user's message about a failed rank, of several lines: rank, error, end of the rank's log, remedy.

    A usage error before training is the same on every rank; its message names no rank.

    Args:
        failure: record of why the rank's process ended: rank, exception, exit code, traceback and so on.
        log: path of the rank's log; None if the rank's output, with its traceback, is on the terminal.
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
    place = f" on {failure.node}" if failure.node else ""
    lines = [f"tutti: rank {failure.rank}{place} {what}"]
    if failure.traceback and not failure.kind:
        lines += _indented(failure.traceback.splitlines(), "innermost lines of its stack:")
    elif log is not None and (failure.rank != 0 or not failure.kind):
        last = tail(log)
        lines += _indented(last, f"last lines of {log}:") if last else [f"  Its log, {log}, is empty."]
    elif log is not None and failure.exit_code == ExitCode.UNEXPECTED and failure.kind != "SystemExit":
        whole = failure.traceback.splitlines()
        last = _end_of_traceback(whole)
        lines += _indented(last, "traceback:" if len(last) == len(whole) else f"end of the traceback in {log}:")
    if failure.remedy and failure.remedy.lower().rstrip(".") not in failure.message.lower():
        lines.append(failure.remedy)
    return "\n".join(lines)


def tail(log: Path) -> list[str]:
    """Return at most the last 20 lines of a rank's log file, without line ends; empty if the file cannot be read.

    Reads at most the last 64 KiB of the file. If these have a stack that ``faulthandler`` wrote in a crash, innermost
    frame first, the lines end with the outermost frame of the user's code: the frames of tutti that called this code,
    and whatever follows them, are left out. So are frames of tutti and PyTorch in tracebacks, if there are more lines.

    Args:
        log: path of the log file.

    Returns:
        The lines in the order of the file, oldest first.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            text = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    below = (index for index, line in enumerate(text) if line.startswith(_STARTERS))
    return _end_of_traceback(text[: next(below, None)])


def _end_of_traceback(text: Sequence[str]) -> list[str]:
    """Return the last 20 lines of a text; a longer text loses the frames of tutti and PyTorch in its tracebacks first.

    The frames of the script are seldom the innermost ones: tutti calls the loss function, and PyTorch the modules.
    """
    if len(text) <= _TAIL:
        return list(text)
    kept: list[str] = []
    hidden = False
    for line in text:
        frame = _FRAME.match(line)
        if frame is not None:
            hidden = any(folder in frame[1] for folder in _LIBRARIES)
        elif not line.startswith("    "):
            hidden = False
        if not hidden:
            kept.append(line)
    return kept[-_TAIL:]


def _indented(lines: list[str], heading: str) -> list[str]:
    return [f"  {heading}", *(f"    {line}".rstrip() for line in lines)]


def _trace(exception: BaseException, hidden: Collection[str]) -> str:
    frames = exception.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in hidden:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(exception), exception, frames))
